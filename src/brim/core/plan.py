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
    """One technique's choice for one block.

    Attributes:
        technique: ``"weight_streaming"``, ``"checkpointing"``, ``"activation_offload"``, ``"optimizer_offload"``, ...
        block: The path of the block's module; ``""`` is the whole model.
        choice: What the technique does with it; of weight streaming ``"resident"``, ``"stream:ram"``,
            ``"stream:disk"`` or ``"compute:ram"``.
        bytes: The block's weights, where the choice is about those.
    """

    technique: str
    block: str  # module path; "" is the whole model
    choice: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a run under a plan will take.

    Attributes:
        peak_bytes: The most of each tier (``"vram"``, ``"ram"``, ``"disk"``).
        step_s: Seconds of a step; when generating, of a token. 0: not predicted.
        bound_s: The least that the hardware allows for it. 0: not known.
        limited_by: What sets the pace: ``"compute"``, or the link that is busiest (``"disk -> ram"``).
    """

    peak_bytes: Mapping[str, int]
    step_s: float = 0.0
    bound_s: float = 0.0
    limited_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done with each block of a model, and what is promised for it.

    Attributes:
        model: The model's name.
        hardware: The machine's name.
        task: ``"train"``, ``"generate"``, or ``"forward"`` (of ``brim.fit`` without an optimizer).
        budget_bytes: What was given of each tier.
        decisions: A choice for each block and technique.
        promise: What a run will take.
        settings: Numbers of techniques: ``ring_slots``, ``micro_batch``, ...
    """

    model: str
    hardware: str
    task: str
    budget_bytes: Mapping[str, int]
    decisions: tuple[Decision, ...]
    promise: Promise
    settings: Mapping[str, int] = field(default_factory=dict)

    def choices(self, technique: str) -> dict[str, str]:
        """The choices of one technique by block, in the order of decision."""
        return {d.block: d.choice for d in self.decisions if d.technique == technique}

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, with kind and format version."""
        return codec.to_json(self, VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Plan:
        """Back from ``to_json``. Raises FormatError for another kind or version, and for unknown or missing keys."""
        return codec.from_json(cls, document, VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read it from a JSON file. Raises FormatError for anything else, a missing file included."""
        return codec.read(cls, path, VERSION)
