"""A plan: decisions for the blocks of a model, and the promise that goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from brim.core.codec import Document
from brim.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A technique's choice for one block.

    Attributes:
        technique: ``"weight_streaming"``, ``"checkpointing"``, ``"activation_offload"``, ``"optimizer_offload"``, ...
        block: The path of the block's module; ``""`` is the whole model.
        choice: The chosen treatment; of weight streaming ``"resident"``, ``"stream:ram"``, ``"stream:disk"`` or
            ``"compute:ram"``.
        bytes: The bytes of the block's weights, if the choice concerns them.
    """

    technique: str
    block: str
    choice: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The predicted peaks and seconds of a run under a plan.

    Attributes:
        peak_bytes: The peak of each tier (``"vram"``, ``"ram"``, ``"disk"``).
        step_s: Seconds of a step; when generating, of a token. 0: not predicted.
        bound_s: The fewest seconds that the hardware allows. 0: not known.
        limited_by: The bottleneck: ``"compute"``, or the busiest link (``"disk -> ram"``).
    """

    peak_bytes: Mapping[str, int]
    step_s: float = 0.0
    bound_s: float = 0.0
    limited_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """The decisions for the blocks of a model, and the promise that goes with them.

    Attributes:
        model: The model's name.
        hardware: The machine's name.
        task: ``"train"``, ``"generate"``, or ``"forward"`` (of ``brim.fit`` without an optimizer).
        budget_bytes: The budget of each tier.
        decisions: A choice for each block and technique.
        promise: The predicted peaks and seconds of a run.
        settings: Numbers of techniques: ``ring_slots``, ``micro_batch``, ...
    """

    _VERSION = 1

    model: str
    hardware: str
    task: str
    budget_bytes: Mapping[str, int]
    decisions: tuple[Decision, ...]
    promise: Promise
    settings: Mapping[str, int] = field(default_factory=dict)

    def choices(self, technique: str) -> dict[str, str]:
        """Return the choices of one technique by block, in the order of decision."""
        return {d.block: d.choice for d in self.decisions if d.technique == technique}

    def exceeded(self, measured_bytes: Mapping[str, int]) -> list[str]:
        """Compare measured peaks with budget and promise.

        Args:
            measured_bytes: The measured peak of each tier.

        Returns:
            A sentence for each tier above its budget or promise.
        """
        sentences = []
        for tier, measured in measured_bytes.items():
            for limit, name in (
                (self.budget_bytes.get(tier), "budget"),
                (self.promise.peak_bytes.get(tier), "promise"),
            ):
                if limit is not None and measured > limit:
                    above = f"{format_bytes(measured - limit)} above the {name} of {format_bytes(limit)}"
                    sentences.append(f"{format_bytes(measured)} of {tier.upper()} were measured: {above}.")
                    break
        return sentences
