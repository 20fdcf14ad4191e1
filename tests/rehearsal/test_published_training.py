"""Reserved memory of whole trainings that others measured on GPUs, against the rehearsal device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.accuracy import ground_truth, torchtitan, xmem

if TYPE_CHECKING:
    from conftest import OnDevice

TESTS, PROGRAMS = Path(__file__).parents[1], Path(__file__).with_name("programs")
GIB, MIB = 1 << 30, 1 << 20

# Ranks -> how far reserved memory may be from the row, in GiB. On 8 GPUs it is the row's number, which has one
# digit behind the point; on 128, PyTorch 2.13 takes 0.19 GiB more than 2.6 does here, and 0.35 more than the row.
TORCHTITAN = {8: 0.05, 128: 0.4}

# Runs of xMem's whose batches have 10 lines or more are taken to be 128 tokens long each, as nearly all are. The
# measurement has what libraries load while a step runs, too: 25 MiB and more, some 0.5 %.
WITHIN = 0.005
# Here it depends on a batch's length, which was not recorded: one that is not full leaves blocks that the next one's
# logits (613 MiB) do not fit into. Four full ones take 612 MiB less than was published, by PyTorch 2.6 as by 2.13;
# with one of other lengths in the third step it is the published number but for 2 MiB, or one tensor more.
UNSETTLED = ("EleutherAI/gpt-neo-125M", "Adam", 25)
FULL, SHORTER = (128, 128, 128, 128), (128, 128, 120, 128)

LANGUAGE_MODELS = """
    import gc, json, sys, warnings
    sys.path.insert(0, {tests!r})
    warnings.simplefilter("ignore")
    import torch
    from support.accuracy import xmem
    from support.accuracy.early_2025 import transformers_4_51
    result = []
    for name, optimizer, batch, lengths in json.loads({runs!r}):
        with transformers_4_51():
            step = xmem.language_model(name, optimizer, batch, tuple(lengths))()
            for _ in lengths:
                step()
        result.append(torch.cuda.max_memory_reserved())
        step = None
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
"""


def skip_without(table: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (ground_truth.folder() / table).exists(), reason=f"{table} is not here")


@skip_without("published_tables.csv")
@pytest.mark.parametrize("ranks", TORCHTITAN)
def test_torchtitan_s_llama_reserves_what_was_published(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("RANKS", str(ranks))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    program = (PROGRAMS / "torchtitan_llama.py").read_text(encoding="utf-8")
    found = on_device.run(program, "H100", memory_bytes=95 * GIB, copy_limit_bytes=32 * MIB)
    (published,) = [there for key, there in torchtitan.measured() if torchtitan.RUNS[key] == ranks]
    print(f"{ranks} ranks: {found['reserved'] / GIB:.3f} GiB, published {published / GIB:.1f}")
    assert found["retries"] == 0
    assert abs(found["reserved"] - published) <= TORCHTITAN[ranks] * GIB


@skip_without("xmem.csv")
@pytest.mark.parametrize("card", ["RTX 3060", "RTX 4060"])
def test_language_models_reserve_what_was_published(on_device: OnDevice, card: str) -> None:
    rows = [
        row
        for row in ground_truth.rows("xmem.csv")
        if row["family"] != "CNN" and row["real_oom"] == "0" and row["gpu"].endswith(card)
        and int(row["batch_size"]) >= xmem._FULL_FROM
    ]  # fmt: skip
    runs = [(row["model"], row["optimizer"], int(row["batch_size"])) for row in rows]
    asked = [(*run, FULL) for run in runs] + [(*UNSETTLED, SHORTER)] * (UNSETTLED in runs)
    program = LANGUAGE_MODELS.format(tests=str(TESTS), runs=json.dumps(asked))
    found = on_device.run(program, card, values="whole", timeout_s=250, copy_limit_bytes=32 * MIB)
    missed = {}
    for run, row, reserved in zip(runs, rows, found, strict=False):
        published = float(row["ground_bytes"])
        print(*run, reserved, f"{reserved / published - 1:+.3%}")
        if run == UNSETTLED:
            assert reserved <= published <= found[-1]
        elif not -WITHIN <= reserved / published - 1 <= WITHIN:
            missed[run] = reserved / published - 1
    assert rows and missed == {}
