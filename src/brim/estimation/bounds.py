"""Margins above a predicted step: bytes that it may need in addition, each with its reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from brim import catalog
from brim.allocator.device_memory import SimulatedDevice
from brim.core import Category, Op, Storage, Timeline, Trace
from brim.estimation.simulation import Place, Replay
from brim.predict.cost import base_name
from brim.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Bytes that a step may need in addition to the prediction, and the reason.

    Attributes:
        name: The purpose of the bytes, in a word or two.
        bytes: The number of bytes.
        why: The reason, in a sentence.
    """

    name: str
    bytes: int
    why: str


class _AscendingDevice(SimulatedDevice):
    """Segments at ascending addresses, so that best fit breaks ties in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self._above = 1 << 40

    def allocate(self, size: int) -> int | None:
        below = super().allocate(size)
        if below is None:
            return None
        address = self._above
        self._above += -(-size // (2 * MIB)) * 2 * MIB
        return address


def margins(
    trace: Trace, timeline: Timeline, place: Place, alloc_conf: str, crowded: Trace | None = None
) -> tuple[Margin, ...]:
    """Margins to add to ``timeline``'s process bytes for a safe bound. Empty for a trace of the CPU.

    ``crowded``: the step of a mixture of experts traced with all tokens at the same experts.
    """
    if trace.target == "cpu":
        return ()
    candidates = (
        _addresses(trace, timeline, place, alloc_conf),
        context_margin(place),
        _convolutions(trace, timeline, place, alloc_conf),
        _not_modelled(trace),
        _routing(crowded, timeline, place, alloc_conf),
    )
    return tuple(margin for margin in candidates if margin.bytes)


def _addresses(trace: Trace, timeline: Timeline, place: Place, alloc_conf: str) -> Margin:
    other = Replay(trace, alloc_conf).peaks(None, place, device=_AscendingDevice()).reserved_bytes
    return Margin(
        name="fragmentation",
        bytes=max(other - timeline.peak_bytes.reserved, 0),
        why="the driver chooses where segments lie, and best fit breaks ties by address; the other order takes more",
    )


def context_margin(place: Place) -> Margin:
    """Bytes by which the CUDA context may be larger than ``place`` says; 0 where it is the largest known."""
    largest = max(catalog.known_contexts(), key=lambda context: context.bytes)
    if place.context in catalog.known_contexts() and place.context.cuda:
        why = "this GPU's context was measured before kernels were loaded; the largest known one has more of them"
    else:
        why = f"this GPU's context was not measured; the largest known one is {format_bytes(largest.bytes)}"
    return Margin(name="context", bytes=max(largest.bytes - place.context.bytes, 0), why=why)


def _convolutions(trace: Trace, timeline: Timeline, place: Place, alloc_conf: str) -> Margin:
    """The workspace of the most demanding engine. cuDNN tries the next engine when one has no room (Conv_v8.cpp)."""
    if not any(base_name(op.name) in CONVOLUTIONS for op in trace.ops):
        return Margin(name="convolution workspaces", bytes=0, why="")
    reserved = timeline.peak_bytes.reserved
    margins_by_engine = [
        (Replay(with_workspaces(trace, engine), alloc_conf).peaks(None, place).reserved_bytes - reserved, engine)
        for engine in ENGINES
    ]
    most, engine = max(margins_by_engine, key=lambda entry: entry[0])
    if place.total_bytes is not None:
        most = min(most, place.total_bytes - place.context.bytes - reserved)
    return Margin(
        name="convolution workspaces",
        bytes=max(most, 0),
        why=f"cuDNN chooses the engine at run time; the engine that needs the most memory here {engine.name}",
    )


def _not_modelled(trace: Trace) -> Margin:
    names = {base_name(text.partition(":")[0]) for text in trace.not_modelled} - set(CONVOLUTIONS)
    largest = max((_moved(op) for op in trace.ops if base_name(op.name) in names), default=0)
    return Margin(
        name="operations not modelled",
        bytes=largest,
        why="what they allocate inside is not known; taken to be at most the operands of the largest one",
    )


def _routing(crowded: Trace | None, timeline: Timeline, place: Place, alloc_conf: str) -> Margin:
    """Simulate the same step with every token at the same experts. Grouped experts need no additional memory."""
    if crowded is None:
        return Margin(name="routing", bytes=0, why="")
    worst = Replay(crowded, alloc_conf).peaks(None, place).reserved_bytes
    return Margin(
        name="routing",
        bytes=max(worst - timeline.peak_bytes.reserved, 0),
        why="all tokens may choose the same experts, where the trace spreads them evenly",
    )


def _moved(op: Op) -> int:
    return op.read_bytes + op.written_bytes


_FORWARD = ("convolution", "_convolution", "cudnn_convolution")
_BACKWARD = ("convolution_backward",)
CONVOLUTIONS = (*_FORWARD, *_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Bytes of workspace per byte of the operands, the result included, in each direction.

    cuDNN's heuristics choose the engine at run time. The prediction has the workspaces that follow from the arguments
    (``predict/lowering/cuda/convolution.py``), and the upper bound has the worst of the workspaces that are known:

    * Tensor-core engines (half precision, and float32 as TF32 from compute capability 8.0 on) work on channels-last
      operands, and cuDNN transposes others: "NCHW layouts can still be operated on by Tensor Cores, but include some
      overhead due to automatic transpose operations" (NVIDIA, Deep Learning Performance, Convolutional Layers).
    * Engines that transform their operands. Winograd's F(4x4, 3x3) holds 36 values per tile of 16; an FFT of real
      values holds 2 per value, in tiles that are padded. Workspaces of 36 * 4 * (tiles * (C + K) + C * K) bytes are
      in a public profile of ResNet-50 in float32 on a V100, in all three directions.

    The allocator keeps a forward workspace's block for the activations that follow, so engines that take one in the
    backward pass only reserve the most.
    """

    name: str
    forward: float
    backward: float


ENGINES = (
    Engine(name="transposes its operands", forward=1.0, backward=1.0),
    Engine(name="transforms its operands in the backward pass", forward=0.0, backward=36 / 16),
)


def with_workspaces(trace: Trace, engine: Engine) -> Trace:
    """``trace`` where every convolution takes the workspace of ``engine`` after its result, or after each gradient.

    Ticks are doubled, so that a workspace can live between an output and the next event.
    """
    storages = [
        replace(storage, born=2 * storage.born, died=None if storage.died is None else 2 * storage.died)
        for storage in trace.storages
    ]
    first = max((storage.id for storage in storages), default=-1) + 1
    for number, (tick, bytes, op) in enumerate(_workspaces(trace, engine), start=first):
        storages.append(Storage(
            id=number, bytes=bytes, category=Category.WORKSPACE, module=op.module, born=2 * tick + 1,
            died=2 * tick + 1,
        ))  # fmt: skip
    ops = tuple(replace(op, at=2 * op.at) for op in trace.ops)
    return replace(trace, storages=tuple(storages), ops=ops)


def _workspaces(trace: Trace, engine: Engine) -> Iterator[tuple[int, int, Op]]:
    """Tuples of a tick, the bytes of a workspace after it, and the operation."""
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
