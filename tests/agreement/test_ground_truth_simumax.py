"""Predicted memory and seconds against Megatron-LM with Transformer Engine on 8 B200, rank by rank."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest

from brim import catalog
from brim.estimation.ranks.estimate import ParallelEstimate, estimate_ranks
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.split import Split
from support.accuracy import ground_truth

MIB = 1 << 20
CASES = ground_truth.folder() / "simumax_b200.csv"
PER_RANK = ground_truth.folder() / "simumax_b200_per_rank.csv"

pytestmark = pytest.mark.skipif(not (CASES.exists() and PER_RANK.exists()), reason="the measurements are not here")


def rows() -> list[dict[str, str]]:
    with CASES.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok"]


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelEstimate]:
    folder = tmp_path_factory.mktemp("models")
    return {row["case"]: estimated(row, folder) for row in rows()}


def estimated(row: dict[str, str], folder: Path) -> ParallelEstimate:
    """The run of one row. Its tokenizer adds an end of document to the vocabulary that it is given
    (``_NullTokenizer`` in megatron/training/tokenizer/tokenizer.py)."""
    config = dict(catalog.model("llama-3-70b").config)
    config |= {"num_hidden_layers": int(row["layers"]), "vocab_size": int(row["vocab"]) + 1}
    assert (config["hidden_size"], config["intermediate_size"]) == (int(row["hidden"]), int(row["ffn"]))
    config["max_position_embeddings"] = 1 << 20
    model = folder / row["case"]
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    split = Split(
        gpus=int(row["world_size"]), tp=int(row["tp"]), pp=int(row["pp"]), cp=int(row["cp"]), dp=int(row["dp"]),
        zero=1, sequence_parallel=row["sequence_parallel"] == "1" and row["tp"] != "1",
        micro_batch=int(row["micro_batch_size"]),
        global_batch=int(row["micro_batches"]) * int(row["micro_batch_size"]) * int(row["dp"]),
    )  # fmt: skip
    recompute = row["recompute"]
    return estimate_ranks(
        model,
        split,
        engine="megatron",
        seq=int(row["seq_len"]),
        gpu="B200",
        checkpointing=recompute,
        precision="bf16",
        megatron=MegatronOptions(
            cross_entropy_loss_fusion=row["ce_fusion"] == "1",
            cross_entropy_fusion_impl="te",
            create_attention_mask_in_dataloader=False,
        ),
    )


def measured_mib() -> dict[tuple[str, int], float]:
    """Of the runs that are written rank by rank; longer runs of the same split share one measurement."""
    with PER_RANK.open(encoding="utf-8") as file:
        return {(row["case"], int(row["rank"])): float(row["max_allocated_mb"]) for row in csv.DictReader(file)}


def test_the_allocated_peak_of_every_rank_is_within_a_tenth_of_a_percent(
    estimates: dict[str, ParallelEstimate],
) -> None:
    compared = 0
    for (case, rank), there in measured_mib().items():
        predicted = estimates[case].ranks[rank].peak_bytes.allocated / MIB
        assert abs(predicted / there - 1) <= 0.001, (case, rank, predicted, there)
        compared += 1
    assert compared >= 8 * 6


def test_the_allocated_peak_of_the_worst_rank_is_within_what_the_figures_are_rounded_to(
    estimates: dict[str, ParallelEstimate],
) -> None:
    errors = []
    for row in rows():
        found = estimates[row["case"]]
        errors.append(abs(found.worst.peak_bytes.allocated / 2**30 / float(row["real_alloc_gib"]) - 1))
        assert errors[-1] <= 0.014, row["case"]
    assert statistics.median(errors) <= 0.005


def test_the_worst_rank_is_on_the_stage_that_was_worst(estimates: dict[str, ParallelEstimate]) -> None:
    there = measured_mib()
    for case, found in estimates.items():
        ranks = [there[case, rank] for rank in range(len(found.ranks))]
        worst = ranks.index(max(ranks))
        assert found.ranks[worst].coordinates["pp"] == found.worst.coordinates["pp"], case


def test_step_seconds_are_within_ten_percent_in_the_median(estimates: dict[str, ParallelEstimate]) -> None:
    """And within 30 % each: at 8-way tensor parallelism products are small and collectives many."""
    errors = []
    for row in rows():
        step_s = estimates[row["case"]].step_s
        assert step_s is not None
        errors.append(abs(step_s * 1e3 / float(row["real_step_ms"]) - 1))
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.30
