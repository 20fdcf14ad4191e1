"""A training step's choice per technique, converted to a Plan and to the solver's Assignment, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from brim.core import Decision, Plan, Promise
from brim.core.hardware import VRAM
from brim.core.options import Place as Place
from brim.errors import FormatError
from brim.planning.solver.step_profile import FULL, FULL_OFFLOAD, KEEP, OFFLOAD, Assignment, Frame
from brim.techniques.checkpointing.technique import NONE
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.placement import RESIDENT, STAGING_SLOTS
from brim.techniques.streaming.weight_streaming import RING_SLOTS

# Names of decisions and settings in a Plan.
PRECISION, CHECKPOINTING, ACTIVATIONS = "precision", "checkpointing", "activation_offload"
STATES, GRADIENTS = "optimizer_offload", "gradient_offload"
MICRO_BATCH, CHUNK_TOKENS, IN_PLACE, IN_BACKWARD = "micro_batch", "chunk_tokens", "in_place", "update_in_backward"
BRIEF_BUFFER, GPU_SIXTEENTHS = "brief_state_buffer", "gpu_sixteenths"
BLOCK_ROWS = "block_rows"
OFFLOADED = "offload"
TOKENS_AT_ONCE = 256  # of a chunk of logits, whose matrix product still runs at full rate
# Fields of Choice and of Frame.
SHARED = ("micro_batch", "block_rows", "in_backward", "states", "gradients", "gpu_sixteenths")
UNSOLVED = ("precision", "in_place", "brief_buffer")  # fields of Choice that the solver does not choose


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The techniques of a training step. The defaults are plain PyTorch with everything in the compute tier.

    ``micro_batch`` sequences go through the model at once, ``block_rows`` of them through a checkpointed block (0:
    all), and logits exist for ``chunk_tokens`` of their tokens at once (0: all). ``checkpointing`` has ``full`` or
    ``selective`` by block, ``activations`` the blocks whose saved tensors, or checkpointed inputs, are offloaded.
    ``in_backward``: each block is updated in the last backward pass, as soon as its gradients
    exist. ``states`` and ``gradients`` are the places where those rest; with ``brief_buffer`` states on disk are
    loaded to RAM one at a time, into a buffer that exists only during the update. ``gpu_sixteenths``: so many
    sixteenths of offloaded states have room in VRAM, where the GPU updates them; with 0 the CPU does. ``streaming``
    has ``stream:ram`` or ``stream:disk`` by block; other blocks are resident.
    """

    precision: str = "fp32"
    micro_batch: int = 1
    block_rows: int = 0
    chunk_tokens: int = 0
    in_place: bool = False
    checkpointing: Mapping[str, str] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    in_backward: bool = False
    states: Place = "keep"
    gradients: Place = "keep"
    brief_buffer: bool = False
    gpu_sixteenths: int = 0
    streaming: Mapping[str, str] = field(default_factory=dict)
    streaming_settings: Mapping[str, int] = field(default_factory=dict)

    @property
    def offloads_optimizer(self) -> bool:
        return self.in_backward or self.states != "keep" or self.gradients != "keep"

    @property
    def streams(self) -> bool:
        return any(choice != weight_streaming.RESIDENT for choice in self.streaming.values())

    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of a Plan, in the order in which techniques are applied."""
        decisions = [Decision(technique=PRECISION, block="", choice=self.precision)]
        decisions += [Decision(technique=CHECKPOINTING, block=b, choice=c) for b, c in self.checkpointing.items()]
        decisions += [Decision(technique=weight_streaming.NAME, block=b, choice=c) for b, c in self.streaming.items()]
        decisions += [Decision(technique=ACTIVATIONS, block=b, choice=OFFLOADED) for b in self.activations]
        decisions += [Decision(technique=STATES, block="", choice=self.states)]
        decisions += [Decision(technique=GRADIENTS, block="", choice=self.gradients)]
        return tuple(decisions)

    def settings(self) -> dict[str, int]:
        return {
            **self.streaming_settings,
            MICRO_BATCH: self.micro_batch,
            CHUNK_TOKENS: self.chunk_tokens,
            IN_PLACE: int(self.in_place),
            IN_BACKWARD: int(self.in_backward),
            **({BRIEF_BUFFER: 1} if self.brief_buffer else {}),
            **({GPU_SIXTEENTHS: self.gpu_sixteenths} if self.gpu_sixteenths else {}),
            **({BLOCK_ROWS: self.block_rows} if self.block_rows else {}),
        }

    def plan(self, *, model: str, hardware: str, budget_bytes: Mapping[str, int], promise: Promise) -> Plan:
        return Plan(
            model=model,
            hardware=hardware,
            task="train",
            budget_bytes=dict(budget_bytes),
            decisions=self.decisions(),
            promise=promise,
            settings=self.settings(),
        )

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        """Return the choice of a training plan. Raises FormatError for settings that are no training's."""
        settings = dict(plan.settings)
        own = {name: settings.pop(name) for name in (MICRO_BATCH, CHUNK_TOKENS, IN_PLACE, IN_BACKWARD)}
        brief_buffer, gpu_sixteenths = bool(settings.pop(BRIEF_BUFFER, 0)), settings.pop(GPU_SIXTEENTHS, 0)
        block_rows = settings.pop(BLOCK_ROWS, 0)
        if unknown := sorted(settings.keys() - {weight_streaming.RING_SLOTS, weight_streaming.STAGING_SLOTS}):
            raise FormatError(f"The plan for {plan.model} is not valid.", f"Unknown settings: {', '.join(unknown)}.")
        return cls(
            precision=plan.choices(PRECISION)[""],
            micro_batch=own[MICRO_BATCH],
            chunk_tokens=own[CHUNK_TOKENS],
            in_place=bool(own[IN_PLACE]),
            checkpointing=plan.choices(CHECKPOINTING),
            activations=tuple(plan.choices(ACTIVATIONS)),
            in_backward=bool(own[IN_BACKWARD]),
            states=_place(plan, STATES),
            gradients=_place(plan, GRADIENTS),
            brief_buffer=brief_buffer,
            gpu_sixteenths=gpu_sixteenths,
            block_rows=block_rows,
            streaming=plan.choices(weight_streaming.NAME),
            streaming_settings=settings,
        )


def _place(plan: Plan, technique: str) -> Place:
    place = plan.choices(technique)[""]
    assert place in ("keep", "ram", "disk")
    return place  # type: ignore[return-value]


def rank(seconds: float, assignment: Assignment) -> tuple[float, int, float]:
    """Return a sort key: seconds to four digits, then the number of techniques in use."""
    frame = assignment.frame
    used = [frame.chunked, frame.in_backward, frame.states != KEEP, frame.gradients != KEEP]
    used += [kept != KEEP for kept in assignment.activations.values()]
    used += [weights != RESIDENT for weights in assignment.weights.values()]
    return float(f"{seconds:.4g}"), sum(used), seconds


def signature(assignment: Assignment) -> tuple[Any, ...]:
    kinds = frozenset((assignment.weights[name], kept) for name, kept in assignment.activations.items())
    return (replace(assignment.frame, slots=2), kinds)


def as_choice(assignment: Assignment, precision: str, compute: str) -> Choice:
    """Convert ``assignment`` to the runtime's form."""
    frame, kept = assignment.frame, assignment.activations
    streams = any(choice != RESIDENT for choice in assignment.weights.values())
    settings = {RING_SLOTS: frame.slots} if streams else {}
    if streams and compute == VRAM:
        settings[STAGING_SLOTS] = 2
    return Choice(
        precision=precision,
        chunk_tokens=TOKENS_AT_ONCE if frame.chunked else 0,
        checkpointing={b: FULL if c == FULL_OFFLOAD else c for b, c in kept.items() if c not in (KEEP, OFFLOAD)},
        activations=tuple(b for b, c in kept.items() if c in (OFFLOAD, FULL_OFFLOAD)),
        **{name: getattr(frame, name) for name in SHARED},
        streaming=dict(assignment.weights) if streams else {},
        streaming_settings=settings,
    )


def as_assignment(choice: Choice, names: Sequence[str]) -> Assignment | None:
    """Convert ``choice`` to the solver's form; None where it has other blocks than ``names``, or other chunks.

    The fields ``UNSOLVED`` are left out: they change a step's bytes, which its trace tells, and not its schedule.
    """
    blocks = {*choice.streaming, *choice.checkpointing, *choice.activations}
    if choice.chunk_tokens not in (0, TOKENS_AT_ONCE) or not blocks <= set(names):
        return None
    frame = Frame(
        **{name: getattr(choice, name) for name in SHARED},
        chunked=bool(choice.chunk_tokens),
        slots=choice.streaming_settings.get(RING_SLOTS, 2),
    )
    kept = dict.fromkeys(names, KEEP) | {n: c for n, c in choice.checkpointing.items() if c != NONE}
    return Assignment(
        frame=frame,
        weights={name: choice.streaming.get(name, RESIDENT) for name in names},
        activations=kept | {name: FULL_OFFLOAD if kept[name] == FULL else OFFLOAD for name in choice.activations},
    )
