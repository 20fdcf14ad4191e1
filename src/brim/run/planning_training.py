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
from brim.planner.training import FULL, KEEP, OFFLOAD, SELECTIVE, Limits, StepProfile, Way
from brim.run.planning_request import Effect
from brim.run.training_choice import Choice
from brim.run.training_ladder import CHUNK_TOKENS, fits
from brim.run.training_prediction import Prediction, Rehearsal
from brim.techniques import checkpointing, chunked_loss, optimizers
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
    made = chunked_loss.options(
        tokens, layer.weight.shape[0], layer.weight.shape[1], hardware, dtype=layer.weight.dtype
    )
    return next((option for option in made if option.choice == str(CHUNK_TOKENS)), None)


def _effects(profile: StepProfile, hardware: Hardware, way: Way) -> Iterator[Effect]:
    frame, compute = way.frame, hardware.compute
    share = frame.micro_batch / profile.batch
    blocks = {block.name: block for block in profile.blocks}
    if frame.micro_batch < profile.batch:
        saved = int(profile.activation_bytes * (1 - share))
        yield Effect(
            technique="micro_batch",
            what=f"{frame.micro_batch} of {profile.batch} rows at once",
            saves_bytes={compute: saved},
        )
    if frame.chunked:
        saved = int(profile.head_bytes * share)
        yield Effect(
            technique="chunked_loss", what=f"logits of {CHUNK_TOKENS} tokens at once", saves_bytes={compute: saved},
            costs_s=profile.head_s,
        )  # fmt: skip
    for kept in (SELECTIVE, FULL, OFFLOAD):
        names = [name for name, choice in way.activations.items() if choice == kept]
        if names:
            away = [
                blocks[n].offload_bytes
                if kept == OFFLOAD
                else blocks[n].kept_bytes[KEEP] - blocks[n].kept_bytes[kept]
                for n in names
            ]
            yield Effect(
                technique="activation_offload" if kept == OFFLOAD else "checkpointing",
                what=f"{len(names)} of {len(blocks)} blocks" + ("" if kept == OFFLOAD else f", {kept}"),
                saves_bytes={compute: int(sum(away) * share)},
                costs_s=sum(blocks[n].again_s.get(kept, 0.0) for n in names),
            )
    moved = {}
    for choice in sorted({c for c in way.weights.values() if c != RESIDENT}):
        names = [name for name, chosen in way.weights.items() if chosen == choice]
        moved[choice] = sum(blocks[n].bytes for n in names)
        yield Effect(
            technique="weight_streaming",
            what=f"{len(names)} of {len(blocks)} blocks, {choice}",
            saves_bytes={compute: moved[choice]},
        )
    if frame.in_backward:
        yield Effect(
            technique="update_in_backward",
            what="each block as soon as it has its gradients",
            saves_bytes={compute: profile.gradient_bytes},
        )
    if frame.states != KEEP:
        yield Effect(
            technique="optimizer_offload",
            what=f"states in {frame.states}",
            saves_bytes={compute: profile.state_bytes, frame.states: -profile.state_bytes},
        )
    if frame.gradients != KEEP:
        yield Effect(
            technique="gradient_offload",
            what=f"gradients in {frame.gradients}",
            saves_bytes={compute: profile.gradient_bytes, frame.gradients: -profile.gradient_bytes},
        )
