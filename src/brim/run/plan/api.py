"""``brim.plan``: how a model is to be trained or run in what a machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from brim.core.options import Method, build
from brim.planning.request import Answer
from brim.requests.plan import Request
from brim.run.plan.search import plan as answer


def plan(
    model: str | Path, *, task: Literal["generate", "train"] = "generate",
    gpu: str | None = None, vram: str | int | None = None,
    ram: str | int | None = None, ram_gb_per_s: float | None = None, disk: str | int | None = None,
    batch: int = 1, seq: int = 1024, new_tokens: int = 128,
    precision: str | None = None, optimizer: str = "adamw", method: Method = "full",
    prefer: Literal["speed", "memory", "quality"] = "speed", lossless: bool = False,
    host_compute: bool = True, top: int = 5,
    precisions: bool = False, router_statistics: str | None = None,
) -> Answer:  # fmt: skip
    """Find the fastest ways to run or train a model in what a machine has.

    Where a model does not fit in this machine's memory, the best three plans are run for a few steps. Otherwise no
    weights are read.

    Each way is proved: a step is traced with the way's techniques in force, and its peaks are what is promised.

    Args:
        model: A name of the catalog, a Hugging Face folder, or a ``.gguf`` file; for training also
            ``"file.py:build"``, a function that returns a model and its inputs as a pair.
        task: ``"generate"`` or ``"train"``.
        gpu: A name of the catalog (``"RTX 3060"``). None: this machine.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"80%"`` of it. None: what is free; on this machine less a
            tenth.
        ram: Host memory, written alike. None: what is free less a tenth; beside a ``gpu`` its share of the
            machine that it is sold in, where the catalog has that, else 64 GiB.
        ram_gb_per_s: GB/s that host memory moves beside a ``gpu``. None: as with ``ram``.
        disk: Room on disk for what memory cannot hold, written alike. None: for training, what is free less a tenth;
            1 TiB beside a ``gpu``.
        batch: Sequences of a step.
        seq: Tokens of a training sequence, or of the prompt.
        new_tokens: Tokens to generate.
        precision: For generating ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` or ``"int4"``; for
            training ``"fp32"``, ``"tf32"``, ``"bf16-mixed"``, ``"fp16-mixed"``, ``"bf16"``, ``"bf16-stochastic"``,
            ``"bf16-master"`` or ``"fp8"``. None: the planner's choice.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``, ``"rmsprop"``,
            ``"adagrad"``, ``"lion"`` or ``"adamw8bit"``.
        method: ``"full"`` or ``"lora"``.
        prefer: What comes first: ``"speed"``, ``"memory"`` (the least in the compute tier), or ``"quality"`` (the
            fastest that rounds no weights).
        lossless: Take no precision that rounds weights to 8 bits or fewer.
        host_compute: For generating: whether the processor beside a GPU may compute blocks that rest in RAM. It
            rounds otherwise than the GPU; False keeps every bit.
        top: How many ways at most.
        precisions: For generating: also tell what each kind of block takes in 8 bits and in 16.
        router_statistics: For generating with a mixture of experts: plan by what its routers do in a short run, which
            is kept in this file; ``"auto"``: in the user's cache folder.

    Returns:
        ``proposals``, the first one the best; where nothing fits there are none, and ``nearest`` has changes under
        which it would.

    Raises:
        UsageError: A value that is not allowed, or an unknown name.
        ModelError: The model's files are missing or damaged.
        BudgetError: No way could ever fit: the inputs alone are more than all of the memory.
        UnsupportedError: The model is one that brim cannot run.
    """
    return answer(build(Request, locals()), precisions=precisions, router_statistics=router_statistics)
