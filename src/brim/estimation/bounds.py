"""How much more a step may take than predicted: a sum of named margins, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim import catalog
from brim.core import Op, Timeline, Trace
from brim.estimation.simulation import Place, simulate
from brim.memory.device_memory import SimulatedDevice
from brim.predict.cost import base_name
from brim.units import MIB, format_bytes

_CONVOLUTIONS = ("convolution", "convolution_backward", "_convolution", "cudnn_convolution")


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Bytes that are added to the prediction, and why."""

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
    trace: Trace, timeline: Timeline, place: Place, alloc_conf: str, config: Mapping[str, Any]
) -> tuple[Margin, ...]:
    """What to add to ``timeline``'s process bytes for a safe bound. Empty for a trace of the CPU."""
    if trace.target == "cpu":
        return ()
    found = (
        _addresses(trace, timeline, alloc_conf),
        _context(place),
        _convolutions(trace),
        _not_modelled(trace),
        _routing(trace, config),
    )
    return tuple(margin for margin in found if margin.bytes)


def _addresses(trace: Trace, timeline: Timeline, alloc_conf: str) -> Margin:
    other = simulate(trace, None, alloc_conf, device=_AscendingDevice()).peak_bytes.reserved
    return Margin(
        name="fragmentation",
        bytes=max(other - timeline.peak_bytes.reserved, 0),
        why="the driver chooses where segments lie, and best fit breaks ties by address; the other order takes more",
    )


def _context(place: Place) -> Margin:
    largest = max(catalog.known_contexts(), key=lambda context: context.bytes)
    if place.context in catalog.known_contexts() and place.context.cuda:
        why = "this GPU's context was measured before kernels were loaded; the largest known one has more of them"
    else:
        why = f"this GPU's context was not measured; the largest known one is {format_bytes(largest.bytes)}"
    return Margin(name="context", bytes=max(largest.bytes - place.context.bytes, 0), why=why)


def _convolutions(trace: Trace) -> Margin:
    largest = max((_moved(op) for op in trace.ops if base_name(op.name) in _CONVOLUTIONS), default=0)
    return Margin(
        name="convolution workspaces",
        bytes=largest,
        why="cuDNN chooses the algorithm at run time; its workspace is taken to be at most the operands of the "
        "largest convolution",
    )


def _not_modelled(trace: Trace) -> Margin:
    names = {base_name(text.partition(":")[0]) for text in trace.not_modelled} - set(_CONVOLUTIONS)
    largest = max((_moved(op) for op in trace.ops if base_name(op.name) in names), default=0)
    return Margin(
        name="operations not modelled",
        bytes=largest,
        why="what they allocate inside is not known; taken to be at most the operands of the largest one",
    )


def _routing(trace: Trace, config: Mapping[str, Any]) -> Margin:
    """A loop over experts works on one expert's tokens at a time: at worst on all of them."""
    experts = next((config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(n)), 0)
    chosen = config.get("num_experts_per_tok") or 0
    looped = [op for op in trace.ops if "experts." in op.module]
    if not (experts and chosen and looped) or "routing" not in trace.notes:
        return Margin(name="routing", bytes=0, why="")
    factor = experts / chosen - 1
    return Margin(
        name="routing",
        bytes=int(max(_moved(op) for op in looped) * factor),
        why=f"all tokens may choose one expert of {experts}, where the trace spreads them evenly",
    )


def _moved(op: Op) -> int:
    return op.read_bytes + op.written_bytes
