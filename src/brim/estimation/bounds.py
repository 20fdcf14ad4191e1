"""Margins above a predicted step: how many bytes more it may take, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from brim import catalog
from brim.allocator.device_memory import SimulatedDevice
from brim.core import Op, Timeline, Trace
from brim.estimation.simulation import Place, simulate
from brim.estimation.workspaces import CONVOLUTIONS, ENGINES, with_workspaces
from brim.predict.cost import base_name
from brim.units import MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Bytes that may come on top of a prediction, and why.

    Attributes:
        name: What they are for, in a word or two.
        bytes: How many.
        why: The reason, in a sentence.
    """

    name: str
    bytes: int
    why: str


class _AscendingDevice(SimulatedDevice):
    """Segments at ascending addresses: best fit then breaks ties the other way."""

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
        _addresses(trace, timeline, alloc_conf),
        context_margin(place),
        _convolutions(trace, timeline, place, alloc_conf),
        _not_modelled(trace),
        _routing(crowded, timeline, alloc_conf),
    )
    return tuple(margin for margin in candidates if margin.bytes)


def _addresses(trace: Trace, timeline: Timeline, alloc_conf: str) -> Margin:
    other = simulate(trace, None, alloc_conf, device=_AscendingDevice()).peak_bytes.reserved
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
        (simulate(with_workspaces(trace, engine), None, alloc_conf).peak_bytes.reserved - reserved, engine)
        for engine in ENGINES
    ]
    most, engine = max(margins_by_engine, key=lambda entry: entry[0])
    if place.total_bytes is not None:
        most = min(most, place.total_bytes - place.context.bytes - reserved)
    return Margin(
        name="convolution workspaces",
        bytes=max(most, 0),
        why=f"cuDNN chooses the engine at run time; the one that takes the most here {engine.name}",
    )


def _not_modelled(trace: Trace) -> Margin:
    names = {base_name(text.partition(":")[0]) for text in trace.not_modelled} - set(CONVOLUTIONS)
    largest = max((_moved(op) for op in trace.ops if base_name(op.name) in names), default=0)
    return Margin(
        name="operations not modelled",
        bytes=largest,
        why="what they allocate inside is not known; taken to be at most the operands of the largest one",
    )


def _routing(crowded: Trace | None, timeline: Timeline, alloc_conf: str) -> Margin:
    """Simulate the same step with every token at the same experts. Experts that run grouped need no more for it."""
    if crowded is None:
        return Margin(name="routing", bytes=0, why="")
    worst = simulate(crowded, None, alloc_conf).peak_bytes.reserved
    return Margin(
        name="routing",
        bytes=max(worst - timeline.peak_bytes.reserved, 0),
        why="all tokens may choose the same experts, where the trace spreads them evenly",
    )


def _moved(op: Op) -> int:
    return op.read_bytes + op.written_bytes
