"""Ways to train a model that is known by its configuration: searched, timed by their schedules, and proved.

A way is proved by tracing the step with the very techniques in force, on fake tensors. Where that takes more than the
search thought, the search is made again with what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from brim.core import Hardware
from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.planner import training as ways
from brim.planner.profile import profile_of
from brim.planner.schedule import Schedule
from brim.planner.steps import training_step_s
from brim.planner.training import FULL, KEEP, OFFLOAD, SELECTIVE, Frame, Limits, StepProfile, Way
from brim.run.planning_request import Effect
from brim.run.training_choice import CHUNK_TOKENS as CHUNK_TOKENS_NAME
from brim.run.training_choice import GRADIENTS, IN_BACKWARD, MICRO_BATCH, STATES, Choice
from brim.run.training_ladder import CHUNK_TOKENS, fits
from brim.run.training_prediction import Prediction, Rehearsal
from brim.techniques import activation_offload, checkpointing, chunked_loss, optimizers, weight_streaming
from brim.techniques.base import Option
from brim.techniques.blocks import Partition, tensor_bytes
from brim.techniques.placement import RESIDENT, STAGING_SLOTS
from brim.techniques.weight_streaming import RING_SLOTS

_PROOFS = 4  # how often a way is corrected before it is given up
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """A way that was proved: its choice as the runtime takes it, what it takes, and its schedule."""

    way: Way
    choice: Choice
    prediction: Prediction
    step_s: float
    schedule: Schedule

    @property
    def limited_by(self) -> str:
        busy = self.schedule.busy_s()
        return max(busy, key=lambda lane: busy[lane])


class Planner:
    """One training, its step traced once without any technique."""

    def __init__(self, rehearsal: Rehearsal, *, optimizer: str, precision: str, limits: Limits, tokens: int) -> None:
        self._rehearsal, self._limits, self._precision = rehearsal, limits, precision
        self._hardware: Hardware = rehearsal.hardware
        model, batch = rehearsal.model, rehearsal.batch
        plain = Choice(precision=precision, micro_batch=batch)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.profile: StepProfile = profile_of(
            rehearsal.trace(plain),
            rehearsal.partition,
            self._hardware,
            batch=batch,
            trained_bytes=trained_bytes(model, rehearsal.partition),
            state_bytes=sum(optimizers.state_bytes(optimizer, trained)),
            repeated=checkpointing.blocks(model),
            spent_bytes=rehearsal.spent_bytes(),
            head=_head(model, tokens, self._hardware),
        )

    def search(self, top: int) -> list[Found]:
        """Up to ``top`` proved ways, the fastest first; none when nothing fits."""
        found: list[Found] = []
        for _, way in self._in_order():
            made = self._prove(way)
            if made is not None and all(made.choice != other.choice for other in found):
                found.append(made)
            if len(found) == top:
                break
        return sorted(found, key=lambda one: one.step_s)

    def _in_order(self) -> Iterator[tuple[float, Way]]:
        """Ways by the seconds of their schedules. The program's bound says when no later one can be faster."""
        waiting: list[tuple[float, int, Way]] = []
        for index, way in enumerate(ways.best(self.profile, self._hardware, self._limits)):
            ready = [one for one in waiting if one[0] <= way.bound_s]
            for one in sorted(ready):
                waiting.remove(one)
                yield one[0], one[2]
            waiting.append((training_step_s(self.profile, self._hardware, way)[0], index, way))
        for seconds, _, way in sorted(waiting, key=lambda one: one[:2]):
            yield seconds, way

    def _prove(self, way: Way) -> Found | None:
        """``way``, or what the search makes of its frame when it knows what that really takes."""
        corrections: dict[str, int] = {}
        for _ in range(_PROOFS):
            choice = self.choice(way)
            prediction = self._rehearsal.predict(choice)
            if fits(prediction.peak_bytes, self._limits.budget_bytes):
                seconds, schedule = training_step_s(self.profile, self._hardware, way)
                return Found(way=way, choice=choice, prediction=prediction, step_s=seconds, schedule=schedule)
            for tier, budget in self._limits.budget_bytes.items():
                over = prediction.peak_bytes.get(tier, 0) - budget
                if over > 0:
                    corrections[tier] = corrections.get(tier, 0) + over + _MARGIN_BYTES
            tighter = replace(self._limits, corrections=corrections)
            again = ways.solve_shape(self.profile, self._hardware, tighter, ways.shape_of(way))
            if again is None:
                return None
            way = again
        return None

    def choice(self, way: Way) -> Choice:
        """``way`` as the runtime takes it."""
        frame = way.frame
        streaming = dict(way.weights)
        settings: dict[str, int] = {}
        if any(choice != RESIDENT for choice in streaming.values()):
            settings[RING_SLOTS] = frame.slots
            if self._hardware.compute == VRAM:
                settings[STAGING_SLOTS] = 2
        kept = way.activations
        return Choice(
            precision=self._precision,
            micro_batch=frame.micro_batch,
            chunk_tokens=CHUNK_TOKENS if frame.chunked else 0,
            checkpointing={b: c for b, c in kept.items() if c in (SELECTIVE, FULL)},
            activations=tuple(b for b, c in kept.items() if c == OFFLOAD),
            in_backward=frame.in_backward,
            states=frame.states,  # type: ignore[arg-type]  # the same three words
            gradients=frame.gradients,  # type: ignore[arg-type]
            streaming=streaming if settings else {},
            streaming_settings=settings,
        )

    def effects(self, found: Found) -> list[Effect]:
        """What each technique of ``found`` saves and costs, as the profile knows it."""
        return list(_effects(self.profile, self._hardware, found.way))


def trained_bytes(model: nn.Module, partition: Partition) -> dict[str, int]:
    """Of each block, the bytes that the optimizer changes."""
    parameters = dict(model.named_parameters())
    return {
        block.name: sum(tensor_bytes(parameters[n]) for n in block.tensors if parameters[n].requires_grad)
        for block in partition.blocks
    }


def _head(model: nn.Module, tokens: int, hardware: Hardware) -> Option | None:
    try:
        layer: Any = model.get_submodule(chunked_loss.find_head(model))
    except UnsupportedError:
        return None
    classes, hidden = layer.weight.shape
    made = chunked_loss.options(tokens, classes, hidden, hardware, dtype=layer.weight.dtype)
    return next((option for option in made if option.choice == str(CHUNK_TOKENS)), None)


def _effects(profile: StepProfile, hardware: Hardware, way: Way) -> Iterator[Effect]:
    compute, share = hardware.compute, way.frame.micro_batch / profile.batch
    yield from _whole_effects(profile, compute, way.frame)
    blocks = {block.name: block for block in profile.blocks}
    for kept in (SELECTIVE, FULL, OFFLOAD):
        chosen = [blocks[name] for name, choice in way.activations.items() if choice == kept]
        if chosen:
            left = [b.offload_bytes if kept == OFFLOAD else b.kept_bytes[KEEP] - b.kept_bytes[kept] for b in chosen]
            yield Effect(
                technique=activation_offload.NAME if kept == OFFLOAD else checkpointing.NAME,
                what=f"{len(chosen)} of {len(blocks)} blocks" + ("" if kept == OFFLOAD else f", {kept}"),
                saves_bytes={compute: int(sum(left) * share)},
                costs_s=sum(block.again_s.get(kept, 0.0) for block in chosen),
            )
    for choice in sorted({c for c in way.weights.values() if c != RESIDENT}):
        chosen = [blocks[name] for name, other in way.weights.items() if other == choice]
        yield Effect(
            technique=weight_streaming.NAME,
            what=f"{len(chosen)} of {len(blocks)} blocks, {choice}",
            saves_bytes={compute: sum(block.bytes for block in chosen)},
        )


def _whole_effects(profile: StepProfile, compute: str, frame: Frame) -> Iterator[Effect]:
    """What is chosen once for the whole model."""
    share = frame.micro_batch / profile.batch
    if frame.micro_batch < profile.batch:
        what, saved = f"{frame.micro_batch} of {profile.batch} rows at once", profile.activation_bytes * (1 - share)
        costs_s = profile.more_s(frame.micro_batch)
        yield Effect(technique=MICRO_BATCH, what=what, saves_bytes={compute: int(saved)}, costs_s=costs_s)
    if frame.chunked:
        what, saved = f"logits of {CHUNK_TOKENS} tokens at once", profile.head_bytes * share
        yield Effect(
            technique=CHUNK_TOKENS_NAME, what=what, saves_bytes={compute: int(saved)}, costs_s=profile.head_s
        )
    if frame.in_backward:
        what, saved = "each block as soon as it has its gradients", profile.gradient_bytes
        yield Effect(technique=IN_BACKWARD, what=what, saves_bytes={compute: int(saved)})
    for technique, what, place, count in (
        (STATES, "states", frame.states, profile.state_bytes),
        (GRADIENTS, "gradients", frame.gradients, profile.gradient_bytes),
    ):
        if place != KEEP:
            yield Effect(technique=technique, what=f"{what} in {place}", saves_bytes={compute: count, place: -count})
