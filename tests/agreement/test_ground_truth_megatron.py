"""Predicted memory of Megatron-LM's ranks against the peaks that its own functional tests recorded."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.megatron.step import stage_trace
from brim.estimation.ranks.sizes import Experts, Shape
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import simulate
from support.accuracy import ground_truth

ROWS = ground_truth.folder() / "megatron_golden.csv"
CAPABILITY = {"A100-80GB": (8, 0), "H100": (9, 0)}
SMALL = Shape(
    name="small", layers=12, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocabulary=50257,
    positions=1024, gated=False, layer_norm=True, bias=True, qkv_bias=True, tied=True, dropout=True,
)  # fmt: skip
LARGE = replace(
    SMALL, name="7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=16384, vocabulary=131074,
    positions=8192, tied=False,
)  # fmt: skip
ROUTED = replace(
    SMALL, name="routed", layers=4, ffn=1344, gated=True, bias=False, qkv_bias=False,
    experts=Experts(count=4, chosen=1, inner=1344, shared=0, dense_layers=0),
)  # fmt: skip

pytestmark = pytest.mark.skipif(not ROWS.exists(), reason="the measurements are not here")


def rows() -> list[dict[str, str]]:
    if not ROWS.exists():
        return []
    with ROWS.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['case']} {row['gpu']}")
def test_a_rank_takes_what_the_engine_recorded(row: dict[str, str]) -> None:
    """To 1 %, of the last rank."""
    large, note = row["shape"] == "7b", row["note"]
    shape = LARGE if large else SMALL if row["shape"] == "small" else ROUTED
    shape = replace(shape, dropout=shape.dropout and note != "no dropout")
    split = Split(
        gpus=8, tp=int(row["tp"]), pp=int(row["pp"]), cp=int(row["cp"]), interleave=int(row["virtual_chunks"]),
        sequence_parallel=row["sequence_parallel"] == "yes", zero=int(row["distributed_optimizer"] == "yes"),
        micro_batch=int(row["micro_batch"]), global_batch=8 if large else 32,
    )  # fmt: skip
    options = MegatronOptions(
        gradient_accumulation_fusion=False, deterministic_mode=True, cublas_workspace_config=":4096:8",
        cross_entropy_loss_fusion="fused loss" in note,
        transformer_impl="local" if "local spec" in note else "transformer_engine",
    )  # fmt: skip
    made = stage_trace(
        shape, split, split.pp - 1, sequence=8192 if large else 1024, recompute=row["recompute"], options=options,
        capability=CAPABILITY[row["gpu"]],
    )  # fmt: skip
    assert simulate(made.trace).peak_bytes.allocated == pytest.approx(int(row["peak_allocated_bytes"]), rel=0.01)
