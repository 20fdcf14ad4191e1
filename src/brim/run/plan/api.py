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
    """Find the fastest plans to train or run a model that fit a machine.

    Where a model does not fit in this machine's memory, the best three plans are run for a few steps. Otherwise no
    weights are read.

    Each plan is proved: a step is traced with the plan in force, and the peaks of this trace are the promise.

    Args:
        model: A name of the catalog, a Hugging Face folder, or a ``.gguf`` file; for training also
            ``"file.py:build"``, a function that returns a model and its inputs as a pair.
        task: ``"generate"`` or ``"train"``.
        gpu: A name of the catalog (``"RTX 3060"``). None: this machine.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"80%"`` of it. None: its memory without the CUDA context;
            on this machine nine tenths of the free memory.
        ram: Budget of host memory, in the same forms. None: nine tenths of the free memory; with a ``gpu``, of the
            RAM of the machine in which that GPU is sold, or of 64 GiB if the catalog does not have it.
        ram_gb_per_s: With a ``gpu``: the rate of its host's memory in GB/s. None: from the same machine as ``ram``.
        disk: Budget of disk space, in the same forms. None: for training, nine tenths of the free space; with a
            ``gpu``, 1 TiB.
        batch: Sequences of a step.
        seq: Tokens of a training sequence, or of the prompt.
        new_tokens: Tokens to generate.
        precision: For generating ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` or ``"int4"``; for
            training ``"fp32"``, ``"tf32"``, ``"bf16-mixed"``, ``"fp16-mixed"``, ``"bf16"``, ``"bf16-stochastic"``,
            ``"bf16-master"`` or ``"fp8"``. None: the planner's choice.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``, ``"rmsprop"``,
            ``"adagrad"``, ``"lion"`` or ``"adamw8bit"``.
        method: ``"full"`` or ``"lora"``.
        prefer: The order of the plans: ``"speed"``, ``"memory"`` (least bytes in the compute tier), or ``"quality"``
            (the fastest that rounds no weights).
        lossless: Use no precision that rounds weights to 8 bits or fewer.
        host_compute: For generating: True lets the CPU compute blocks that are in RAM. Its kernels round differently;
            with False results are equal to the GPU's bit for bit.
        top: The largest number of plans.
        precisions: For generating: also compare each kind of block in 8 bits and in 16 bits.
        router_statistics: For generating with a mixture of experts: a file with the choices of its routers, by which
            to plan. brim records it in a short run if it does not exist; ``"auto"``: in the user's cache folder.

    Returns:
        The answer: ``proposals``, the best first. If nothing fits it has none, and ``nearest`` has changes under
        which something fits.

    Raises:
        UsageError: A value that is not allowed, or an unknown name.
        ModelError: The model's files are missing or damaged.
        BudgetError: No plan can fit: the inputs alone exceed the memory.
        UnsupportedError: The model is one that brim cannot run.
    """
    return answer(build(Request, locals()), precisions=precisions, router_statistics=router_statistics)
