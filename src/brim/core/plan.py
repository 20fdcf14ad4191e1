"""What was decided, and what is promised for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.core import codec

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One technique's choice for one block: ``weight_streaming`` of ``model.layers.3`` is ``stream:disk``."""

    technique: str
    block: str  # module path; "" is the whole model
    choice: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a run under the plan will take. ``bound_s`` is the least time that the hardware allows for it."""

    peak_bytes: Mapping[str, int]
    step_s: float = 0.0
    bound_s: float = 0.0
    limited_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions per block and the promise. ``settings`` holds each technique's numbers (``ring_slots``)."""

    model: str
    hardware: str
    task: str
    budget_bytes: Mapping[str, int]
    decisions: tuple[Decision, ...]
    promise: Promise
    settings: Mapping[str, int] = field(default_factory=dict)

    def choices(self, technique: str) -> dict[str, str]:
        """Block path -> choice, for one technique, in the order of decision."""
        return {d.block: d.choice for d in self.decisions if d.technique == technique}

    def to_json(self) -> dict[str, Any]:
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        return codec.read(cls, path, VERSION)
