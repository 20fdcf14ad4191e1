"""Splits as files: what is written is read, and what does not fit the ranks or the command is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from brim.errors import FormatError, UnsupportedError, UsageError
from brim.estimation.ranks.split import Split
from brim.run.ranks import plan as distributed_plan
from brim.run.ranks.request import SplitRequest
from brim.run.train.request import Request

SPLIT = Split(
    gpus=8, tp=2, pp=2, zero=1, sequence_parallel=True, micro_batch=2, global_batch=16, gpus_per_node=8,
    stage_layers=(3, 1),
)  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    made = distributed_plan.SplitPlan(
        brim="0", model="llama", gpu="H100 SXM", engine="torch", precision="bf16-mixed", sequence=256, split=SPLIT,
        checkpointing="full", peak_bytes=1 << 30, step_s=0.5,
    )  # fmt: skip
    distributed_plan.write(tmp_path / "plan.json", made)
    return tmp_path / "plan.json"


def request(plan: Path | None = None, **split: int) -> SplitRequest:
    return SplitRequest(training=Request(model="llama", data="text.txt", output="out", plan=plan), **split)


def test_a_plan_decides_the_split_the_batch_and_the_sequence(plan: Path) -> None:
    followed = distributed_plan.with_plan(request(plan), 8)
    assert followed.split(8, 8) == SPLIT
    training = followed.training
    assert (training.batch, training.micro_batch, training.seq, training.checkpointing) == (16, 2, 256, "full")
    assert training.precision == "bf16-mixed"


def test_a_plan_of_another_engine_is_refused_with_what_to_do(plan: Path, tmp_path: Path) -> None:
    made = replace(distributed_plan.read(plan), engine="megatron", precision="bf16")
    distributed_plan.write(tmp_path / "megatron.json", made)
    with pytest.raises(UnsupportedError) as told:
        distributed_plan.with_plan(request(tmp_path / "megatron.json"), 8)
    assert "made for the engine megatron, and brim train uses torch" in told.value.reason
    assert "brim plan llama --task train --gpus 8 --gpu 'H100 SXM' --engine torch" in told.value.todo


def test_another_precision_beside_a_plan_is_refused(plan: Path) -> None:
    asked = request(plan)
    same = replace(asked, training=replace(asked.training, precision="bf16-mixed"))
    assert distributed_plan.with_plan(same, 8).training.precision == "bf16-mixed"
    with pytest.raises(UsageError, match="The plan is for bf16-mixed"):
        distributed_plan.with_plan(replace(asked, training=replace(asked.training, precision="fp32")), 8)


def test_a_plan_without_engine_and_precision_is_of_an_older_brim(plan: Path) -> None:
    document = json.loads(plan.read_text())
    del document["engine"], document["precision"]
    plan.write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(FormatError, match="Found kind 'SplitPlan', version 2"):
        distributed_plan.read(plan)


def test_a_plan_says_where_shards_lie(plan: Path, tmp_path: Path) -> None:
    split = replace(SPLIT, zero=3, offload_shards=True)
    made = replace(distributed_plan.read(plan), split=split)
    distributed_plan.write(tmp_path / "offloaded.json", made)
    followed = distributed_plan.with_plan(request(tmp_path / "offloaded.json"), 8)
    assert followed.offload_shards
    assert followed.split(8, 8) == split


@pytest.mark.parametrize(
    ("split", "ranks", "told"),
    [
        ({"zero": 3}, 1, "Cannot use --offload-shards on one rank"),
        ({}, 2, "--offload-shards was given without --zero"),
    ],
)
def test_shards_in_ram_need_shards(split: dict[str, int], ranks: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        request(offload_shards=True, **split).split(ranks, ranks)


def test_without_a_plan_nothing_changes() -> None:
    assert distributed_plan.with_plan(request(tp=2), 8) == request(tp=2)


def test_a_plan_for_other_ranks_is_refused(plan: Path) -> None:
    with pytest.raises(UsageError, match="It is for 8 ranks, and torchrun has started 4"):
        distributed_plan.with_plan(request(plan), 4)


def test_a_split_beside_a_plan_is_refused(plan: Path) -> None:
    with pytest.raises(UsageError, match="The plan decides these"):
        distributed_plan.with_plan(request(plan, tp=4), 8)


def test_another_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(FormatError, match="is not a valid plan for several ranks"):
        distributed_plan.with_plan(request(tmp_path / "plan.json"), 8)


@pytest.mark.parametrize(("ranks", "batch", "pp", "micro"), [(4, 8, 1, 2), (4, 8, 2, 2), (2, 6, 1, 3), (1, 8, 1, 8)])
def test_micro_batches_fill_a_pipeline_where_none_are_given(ranks: int, batch: int, pp: int, micro: int) -> None:
    training = Request(model="llama", data="text.txt", output="out", batch=batch)
    split = SplitRequest(training=training, pp=pp).split(ranks, ranks)
    assert split.micro_batch == micro
    assert split.micro_batch * split.micro_batches * split.dp == batch


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"ram": "1GiB"}, "Cannot use --ram on several ranks"), 
        ({"offload_optimizer": "disk"}, "--offload-optimizer"),
        ({"precision": "fp16-mixed"}, "--precision fp16-mixed"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_do_is_refused(option: dict[str, str], told: str) -> None:
    training = Request(model="llama", data="text.txt", output="out", **option)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=told):
        SplitRequest(training=training).check()


def test_adapters_are_for_data_parallel_ranks() -> None:
    training = Request(model="llama", data="text.txt", output="out", method="lora")
    SplitRequest(training=training, zero=3).check()
    for split in ({"tp": 2}, {"pp": 2}):
        with pytest.raises(UnsupportedError, match="Cannot use --method lora with"):
            SplitRequest(training=training, **split).check()
