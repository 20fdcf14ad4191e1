"""torchtitan's published runs of Llama 3.1 on 8 to 512 H100, end of 2024, against ``brim estimate --gpus``.

What each row states is in ``SPLITS``; the rest is torchtitan's of that day (commit 9dec370): float32 weights and
bfloat16 compute under FSDP2, AdamW, each block compiled by itself with its checkpointing inside, loss parallel,
expandable segments (run_llama_train.sh), as many micro-batches as pipeline stages where none are told
(torchtitan/config_manager.py), stages as ``generate_split_points`` cuts them, and weights stay gathered in a
pipeline.

Not modelled: Float8, asynchronous tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brim.core import Category, Storage, Trace
from brim.estimation.models import find_model
from brim.estimation.ranks import torch_engine as ranks_torch
from brim.estimation.ranks.compose import BACKWARD, FORWARD, OPTIMIZER
from brim.estimation.ranks.job import ParallelJob
from brim.estimation.ranks.schedule import brief, turns
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import simulate
from brim.estimation.workload import Workload
from support.accuracy import ground_truth

_VOCABULARY = 128_256
_ALLOCATOR = "expandable_segments:True"
_STAGES = (15, 16, 16, 16, 16, 16, 16, 15)
_CHUNKS = (7, *(8,) * 14, 7)
_8B: dict[str, Any] = {"zero": 3}
_70B: dict[str, Any] = {"zero": 3, "tp": 8, "sequence_parallel": True, "micro_batch": 16}
_405B: dict[str, Any] = {"zero": 1, "tp": 8, "pp": 8, "sequence_parallel": True, "stage_layers": _STAGES}

# The end of a row's method -> its split. ``FSDP`` rows take two sequences at once.
SPLITS: dict[str, dict[str, Any]] = {
    "FSDP": _8B | {"micro_batch": 2},
    "FSDP + torch.compile": _8B | {"micro_batch": 2},
    "FSDP + torch.compile + Float8": _8B | {"micro_batch": 2},
    "8B FSDP 8, CP 1": _8B,
    "8B FSDP 4, CP 2": _8B | {"cp": 2},
    "8B FSDP 2, CP 4": _8B | {"cp": 4},
    "8B FSDP 1, CP 8": _8B | {"cp": 8},
    "2D": _70B,
    "2D + AsyncTP": _70B,
    "1F1B": _405B | {"micro_batch": 4, "global_batch": 256},
    "Interleaved 1F1B": _405B | {"micro_batch": 4, "global_batch": 256, "interleave": 2, "stage_layers": _CHUNKS},
    "405B FSDP 8, CP 1": _405B | {"micro_batch": 1, "global_batch": 64},
    "405B FSDP 4, CP 2": _405B | {"micro_batch": 1, "global_batch": 32, "cp": 2},
    "405B FSDP 2, CP 4": _405B | {"micro_batch": 1, "global_batch": 16, "cp": 4},
    "405B FSDP 1, CP 8": _405B | {"micro_batch": 1, "global_batch": 8, "cp": 8},
}


def rows() -> Iterator[dict[str, str]]:
    """All of torchtitan's."""
    return (row for row in ground_truth.rows("published_tables.csv") if row["source"].startswith("torchtitan"))


def name_of(row: dict[str, str]) -> str:
    """Of its split in ``SPLITS``."""
    tail = row["method"].rpartition("| ")[2]
    return f"{row['model'].rpartition(' ')[2]} {tail}" if "CP" in tail else tail


def job_of(row: dict[str, str]) -> ParallelJob:
    split = Split(gpus=int(row["gpu"].partition("x")[0]), **SPLITS[name_of(row)])
    selective = "selective" in row["method"]
    workload = Workload(
        batch=split.micro_batch, seq=int(row["seq_len"]), precision="bf16-mixed", optimizer="adamw",
        checkpointing="alternate" if selective else "full",
    )  # fmt: skip
    return ParallelJob(
        source=find_model(row["model"].lower().replace(" ", "-")), workload=workload, split=split,
        sequence=int(row["seq_len"]), capability=(9, 0), compiled="compile" in row["method"],
    )  # fmt: skip


def peak_bytes(job: ParallelJob) -> int:
    """Reserved by the rank that reserves most."""
    stages, _ = ranks_torch.stages(job)
    traces = {id(facts): facts.trace for facts in stages}
    if job.split.pp > 1:
        traces[id(stages[-1])] = _with_outputs(stages[-1].trace, job)
    return max(int(simulate(trace, None, _ALLOCATOR).peak_bytes.reserved) for trace in traces.values())


def _with_outputs(trace: Trace, job: ParallelJob) -> Trace:
    """The last stage's logits of every micro-batch: torchtitan's stages give those, not the loss, and pipelining
    keeps them until the step ends (torch/distributed/pipelining/stage.py, ``output_chunks``)."""
    split = job.split
    told = brief(split, split.pp - 1)  # the trace has these micro-batches; the others' logits are there all the time
    order = turns(told, split.pp - 1)
    marks = [op.at for op in trace.ops if op.name in (FORWARD, BACKWARD, OPTIMIZER)][-len(order) - 1 :]
    born = [marks[at + 1] for at, turn in enumerate(order) if turn.forward and turn.chunk == split.interleave - 1] + [
        marks[0]
    ] * (split.micro_batches - told.micro_batches)
    size = 2 * split.micro_batch * job.sequence // split.cp * _VOCABULARY // split.tp
    made = [
        Storage(
            id=len(trace.storages) + index, bytes=size, category=Category.TEMPORARY, module="lm_head", born=at,
            died=marks[-1], dtype="bfloat16",
        )
        for index, at in enumerate(born)
    ]  # fmt: skip
    return replace(trace, storages=(*trace.storages, *made))


def main() -> None:
    for row in rows():
        told, named = float(row["peak"]), f"{row['gpu']:10} {row['model']:15} {row['method']:80}"
        found = peak_bytes(job_of(row)) / 2**30
        print(f"{named} {told:6.1f} {found:6.1f} {found / told - 1:+7.1%}", flush=True)


if __name__ == "__main__":
    main()
