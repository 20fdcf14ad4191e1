"""What several engines are asked, and what each answers: a training job, and the step of one of its pipeline
ranks."""

from __future__ import annotations

from dataclasses import dataclass

from brim.core import Op, Storage, Trace
from brim.estimation.models import Source
from brim.estimation.ranks.script import Sent
from brim.estimation.ranks.split import Split
from brim.estimation.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ParallelJob:
    """A model to train, how, and how it is split. ``capability`` is the GPU's. ``fused_loss``: of Megatron-LM
    only. ``target``: ``cuda``, or ``cpu`` for ranks without a GPU. ``compiled``: each block by torch.compile.
    ``layers``: which of the model's are there; None: all."""

    source: Source
    workload: Workload
    split: Split
    sequence: int
    capability: tuple[int, int]
    fused_loss: bool = True
    target: str = "cuda"
    compiled: bool = False
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """A pipeline rank's step: its memory, its kernels and what it sends.

    ``ops`` and ``sent`` are those of one micro-batch, and the optimizer's kernels; ``once`` is sent once a step.
    Where shards are in RAM, ``ram`` is what lies there, and ``in_ram`` are the CPU's operations beside ``ops``.
    ``weight_ops``: of ``ops``, the second halves of a zero-bubble pipeline's backward passes.
    """

    trace: Trace
    ops: tuple[Op, ...]
    sent: tuple[Sent, ...]
    once: tuple[Sent, ...]
    weight_ops: tuple[Op, ...] = ()
    not_modelled: tuple[str, ...] = ()
    ram: tuple[Storage, ...] = ()
    in_ram: tuple[Op, ...] = ()
