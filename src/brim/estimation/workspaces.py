"""A trace with the workspaces that cuDNN's convolution engines are known to ask for.

Which engine runs is decided by cuDNN's heuristics at run time. The prediction has what follows from the arguments
(``predict/lowering/cuda/convolution.py``), and the upper bound has the worst of the workspaces that are known:

* Tensor-core engines (half precision, and float32 as TF32 from compute capability 8.0 on) work on channels-last
  operands, and cuDNN transposes others: "NCHW layouts can still be operated on by Tensor Cores, but include some
  overhead due to automatic transpose operations" (NVIDIA, Deep Learning Performance, Convolutional Layers).
* Engines that transform their operands. Winograd's F(4x4, 3x3) holds 36 values per tile of 16; an FFT of real values
  holds 2 per value, in tiles that are padded. Workspaces of 36 * 4 * (tiles * (C + K) + C * K) bytes are in a public
  profile of ResNet-50 in float32 on a V100, in all three directions.

The allocator keeps a forward workspace's block for the activations that follow, so engines that take one in the
backward pass only reserve the most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from brim.core import Category, Op, Storage, Trace
from brim.predict.cost import base_name

_FORWARD = ("convolution", "_convolution", "cudnn_convolution")
_BACKWARD = ("convolution_backward",)
CONVOLUTIONS = (*_FORWARD, *_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Bytes of workspace per byte of the operands, the result included, in each direction."""

    name: str
    forward: float
    backward: float


ENGINES = (
    Engine(name="transposes its operands", forward=1.0, backward=1.0),
    Engine(name="transforms its operands in the backward pass", forward=0.0, backward=36 / 16),
)


def with_workspaces(trace: Trace, engine: Engine) -> Trace:
    """``trace`` where every convolution takes the workspace of ``engine`` after its result, or after each gradient.

    Ticks are doubled to make room: a workspace lives between an output and what comes next.
    """
    storages = [_later(storage) for storage in trace.storages]
    first = max((storage.id for storage in storages), default=-1) + 1
    for number, (tick, bytes, op) in enumerate(_workspaces(trace, engine), start=first):
        storages.append(Storage(
            id=number, bytes=bytes, category=Category.WORKSPACE, module=op.module, born=2 * tick + 1,
            died=2 * tick + 1,
        ))  # fmt: skip
    ops = tuple(replace(op, at=2 * op.at) for op in trace.ops)
    return replace(trace, storages=tuple(storages), ops=ops)


def _later(storage: Storage) -> Storage:
    return replace(storage, born=2 * storage.born, died=None if storage.died is None else 2 * storage.died)


def _workspaces(trace: Trace, engine: Engine) -> Iterator[tuple[int, int, Op]]:
    """After which tick, how many bytes, for which operation."""
    births = sorted((storage.born, storage.bytes) for storage in trace.storages)
    ticks = [tick for tick, _ in births]
    starts = [*(op.at for op in trace.ops), ticks[-1] + 1 if ticks else 0]
    for op, end in zip(trace.ops, starts[1:], strict=True):
        name = base_name(op.name)
        if name not in CONVOLUTIONS:
            continue
        outputs = births[bisect_left(ticks, op.at) : bisect_left(ticks, end)]
        if name in _BACKWARD:  # of the input and of the weight: each reads two operands and writes the third
            bytes, gradients = int(op.read_bytes * engine.backward), outputs[:2]
        else:
            bytes, gradients = int((op.read_bytes + op.written_bytes) * engine.forward), outputs[:1]
        for tick, _ in gradients:
            yield tick, bytes, op
