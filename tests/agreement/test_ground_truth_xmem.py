"""Predicted memory against published runs on GeForce cards. ``bench/accuracy.py --xmem`` has all of them."""

from __future__ import annotations

from functools import cache
from statistics import median

import pytest

from support.accuracy import ground_truth, xmem
from support.accuracy.table import Row

# One run of each kind that is quick to trace: optimizers with and without state, both cards, both families.
RUNS = (
    ("cerebras/Cerebras-GPT-111M", "AdamW", "25"),
    ("facebook/opt-125m", "AdamW", "38"),
    ("T5-small", "SGD", "25"),
    ("VGG16", "Adagrad", "480"),
    ("VGG16", "SGD", "684"),
)

pytestmark = [
    pytest.mark.skipif(not (ground_truth.folder() / "xmem.csv").exists(), reason="the published runs are not here"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about its own future
]


@cache
def predicted(run: tuple[str, str, str]) -> Row:
    """The prediction for one run; made once, as each takes seconds."""
    rows = ground_truth.rows("xmem.csv")
    return xmem.predict(next(row for row in rows if (row["model"], row["optimizer"], row["batch_size"]) == run))


@pytest.mark.thorough
@pytest.mark.parametrize("run", RUNS)
def test_a_runs_memory_is_predicted_within_eight_percent(run: tuple[str, str, str]) -> None:
    assert abs(predicted(run).error) <= 0.08


@pytest.mark.thorough
def test_half_of_the_runs_are_predicted_within_three_percent() -> None:
    assert median(abs(predicted(run).error) for run in RUNS) <= 0.03


@pytest.mark.parametrize("run", RUNS[:3])
def test_full_batches_of_text_are_predicted_within_half_a_percent(run: tuple[str, str, str]) -> None:
    assert abs(predicted(run).error) <= 0.005


# A run with engines of cuDNN that take a workspace, beside those above: the bound is what allows for them.
@pytest.mark.thorough
@pytest.mark.parametrize("run", [*RUNS, ("MnasNet", "AdamW", "200")])
def test_no_run_took_more_than_the_upper_bound(run: tuple[str, str, str]) -> None:
    assert predicted(run).notes["bound over"] >= 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_none_of_all_runs_took_more_than_the_upper_bound() -> None:
    over = {row.name: row.notes["bound over"] for row in xmem.rows()}
    assert len(over) >= 18
    assert min(over.values()) >= 0, over
