"""Types of the training planner: the profile of a step, its limits, and the choices for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from brim.core.hardware import DISK, RAM

KEEP, SELECTIVE, FULL, OFFLOAD = "keep", "selective", "full", "offload"
FULL_OFFLOAD = "full+offload"  # checkpointed, and the saved inputs offloaded
ACTIVATIONS = (KEEP, SELECTIVE, FULL, OFFLOAD, FULL_OFFLOAD)
BACKWARD, UPDATE = "backward", "update"  # the moments
MOMENTS = (BACKWARD, UPDATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """A block in a plain pass over some rows.

    ``kept_bytes`` are its activations saved for backward under ``keep``, ``selective`` and ``full``, ``again_s`` the
    seconds of recomputation under the latter two. ``offload_bytes`` of its activations can be offloaded. Its backward
    pass needs ``backward_bytes`` beyond all its activations. A block that takes its rows in pieces needs
    ``piece_bytes`` to recompute and differentiate one.
    """

    name: str
    bytes: int
    trained_bytes: int
    forward_s: float
    backward_s: float
    kept_bytes: Mapping[str, int]
    again_s: Mapping[str, float] = field(default_factory=dict)
    offload_bytes: int = 0
    backward_bytes: int = 0
    piece_bytes: int | None = None

    def kind(self) -> tuple[object, ...]:
        """Return a key that is the same for blocks that the planner need not distinguish."""
        kept = tuple(sorted(self.kept_bytes.items()))
        return (self.bytes, self.trained_bytes, kept, self.offload_bytes, round(self.forward_s, 9))

    def again_bytes(self, activations: str) -> int:
        """Return the bytes that recomputation and the backward pass after it need under ``activations``."""
        saved = self.kept_bytes[SELECTIVE if activations == SELECTIVE else FULL]
        all_bytes = self.kept_bytes[KEEP] - saved + self.backward_bytes
        return max(0, all_bytes if self.piece_bytes is None else self.piece_bytes)

    def saved_bytes(self, activations: str) -> int:
        """Return the bytes that stay in the compute tier for backward under a choice of ``activations``."""
        if activations in (OFFLOAD, FULL_OFFLOAD):
            return self.kept_bytes[KEEP if activations == OFFLOAD else FULL] - self.moved_bytes(activations)
        return self.kept_bytes[activations]

    def moved_bytes(self, activations: str) -> int:
        """Return the bytes that leave the compute tier under a choice of ``activations``."""
        return {OFFLOAD: self.offload_bytes, FULL_OFFLOAD: self.kept_bytes.get(FULL, 0)}.get(activations, 0)

    def recompute_s(self, activations: str) -> float:
        """Return the seconds that a choice of ``activations`` adds to the backward pass."""
        return self.again_s.get(FULL if activations == FULL_OFFLOAD else activations, 0.0)

    def in_pieces(self, piece: BlockProfile, count: int) -> BlockProfile:
        """Return this block taking its rows in ``count`` pieces, each of which has the profile ``piece``."""
        more_s = count * (piece.forward_s + piece.backward_s) - self.forward_s - self.backward_s
        return replace(
            self,
            again_s={choice: count * seconds + more_s for choice, seconds in piece.again_s.items()},
            # The gradients of its output and of its input have all rows.
            piece_bytes=piece.kept_bytes[KEEP] + piece.backward_bytes + 2 * self.kept_bytes.get(FULL, 0),
        )

    def between(self, other: BlockProfile, share: float) -> BlockProfile:
        """Interpolate between this block (``share`` 0) and ``other`` (1)."""
        return replace(
            self,
            forward_s=_mix(self.forward_s, other.forward_s, share),
            backward_s=_mix(self.backward_s, other.backward_s, share),
            kept_bytes={k: _mix_bytes(n, other.kept_bytes.get(k, n), share) for k, n in self.kept_bytes.items()},
            again_s={k: _mix(s, other.again_s.get(k, s), share) for k, s in self.again_s.items()},
            offload_bytes=_mix_bytes(self.offload_bytes, other.offload_bytes, share),
            backward_bytes=_mix_bytes(self.backward_bytes, other.backward_bytes, share),
        )

    def scaled(self, share: float) -> BlockProfile:
        """Scale everything to ``share`` of the rows."""
        return replace(
            self,
            forward_s=self.forward_s * share,
            backward_s=self.backward_s * share,
            kept_bytes={k: int(n * share) for k, n in self.kept_bytes.items()},
            again_s={k: s * share for k, s in self.again_s.items()},
            offload_bytes=int(self.offload_bytes * share),
            backward_bytes=int(self.backward_bytes * share),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """A plain step over ``batch`` rows at once: its blocks in forward order, and everything outside of them.

    ``peak_bytes`` of the compute tier by moment include weights and states: before backward without gradients, in the
    update with all of them; ``early_gradient_bytes`` of those exist before backward of the blocks. ``spent_bytes``
    per tier are the program's own. ``outside_s`` are seconds (forward, backward) outside of blocks, ``update_s`` the
    optimizer's; ``launch_s`` of all seconds go into starting operations, independent of rows. Chunked logits save
    ``head_bytes`` before backward and take ``head_s`` more. ``row`` is the same step over one row.
    """

    batch: int
    blocks: Sequence[BlockProfile]
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    peak_bytes: Mapping[str, int]
    early_gradient_bytes: int = 0
    spent_bytes: Mapping[str, int] = field(default_factory=dict)
    outside_s: tuple[float, float] = (0.0, 0.0)
    update_s: float = 0.0
    launch_s: float = 0.0
    head_bytes: int = 0
    head_s: float = 0.0
    row: StepProfile | None = None

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations where backward begins."""
        return max(0, self.peak_bytes[BACKWARD] - self.weight_bytes - self.state_bytes)

    @property
    def update_bytes(self) -> int:
        """Bytes of the optimizer beside weights, gradients and states."""
        return max(0, self.peak_bytes[UPDATE] - self.weight_bytes - self.gradient_bytes - self.state_bytes)

    def passes(self, micro_batch: int) -> int:
        return -(-self.batch // micro_batch)

    def under(self, frame: Frame | Shape) -> StepProfile:
        """Return the profile of a pass under a frame: over its micro-batch, with blocks that take it in pieces."""
        micro = self.at(frame.micro_batch)
        if not frame.block_rows:
            return micro
        count = -(-frame.micro_batch // frame.block_rows)
        pairs = zip(micro.blocks, self.at(frame.block_rows).blocks, strict=True)
        return replace(micro, blocks=[block.in_pieces(piece, count) for block, piece in pairs])

    def at(self, micro_batch: int) -> StepProfile:
        """Return the profile of a pass over ``micro_batch`` rows; a step has ``passes`` of them."""
        if micro_batch >= self.batch:
            return self
        if self.row is None or self.batch == 1:
            return self._scaled(micro_batch)
        share = (micro_batch - 1) / (self.batch - 1)
        row = self.row
        return replace(
            self,
            batch=micro_batch,
            row=None,
            blocks=[a.between(b, share) for a, b in zip(row.blocks, self.blocks, strict=True)],
            peak_bytes={m: _mix_bytes(row.peak_bytes[m], n, share) for m, n in self.peak_bytes.items()},
            outside_s=(
                _mix(row.outside_s[0], self.outside_s[0], share),
                _mix(row.outside_s[1], self.outside_s[1], share),
            ),
            head_bytes=_mix_bytes(row.head_bytes, self.head_bytes, share),
            head_s=_mix(row.head_s, self.head_s, share),
        )

    def _scaled(self, micro_batch: int) -> StepProfile:
        share = micro_batch / self.batch
        peak = self.weight_bytes + self.state_bytes + int(self.activation_bytes * share)
        forward_s, backward_s = self.outside_s
        return replace(
            self,
            batch=micro_batch,
            blocks=[block.scaled(share) for block in self.blocks],
            peak_bytes={**self.peak_bytes, BACKWARD: peak},
            outside_s=(forward_s * share, backward_s * share + self.launch_s * (1 - share)),
            head_bytes=int(self.head_bytes * share),
            head_s=self.head_s * share,
        )


def _mix(low: float, high: float, share: float) -> float:
    return max(0.0, low + (high - low) * share)


def _mix_bytes(low: int, high: int, share: float) -> int:
    return max(0, int(low + (high - low) * share))


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The choices for the model as a whole; weights and activations are chosen block by block.

    ``gpu_sixteenths``: states that rest elsewhere visit the GPU to be updated, this many sixteenths of them at once;
    with 0 the CPU updates. ``block_rows``: checkpointed blocks take the micro-batch in pieces of so many rows, with 0
    as a whole.
    """

    micro_batch: int
    chunked: bool = False
    in_backward: bool = False
    states: str = KEEP
    gradients: str = KEEP
    gpu_sixteenths: int = 0
    block_rows: int = 0
    slots: int = 2

    def homes(self, compute: str) -> tuple[str, str]:
        """Return the tiers in which states and gradients rest."""
        home = {KEEP: compute, RAM: RAM, DISK: DISK}
        return home[self.states], home[self.gradients]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """All choices for a step: ``weights`` and ``activations`` have a choice for every block."""

    frame: Frame
    weights: Mapping[str, str]
    activations: Mapping[str, str]
    bound_s: float = 0.0
    gap: float = 0.0

    def same(self, other: Assignment) -> bool:
        """Return True where frame, weights and activations are equal."""
        return (self.frame, dict(self.weights), dict(self.activations)) == (
            other.frame,
            dict(other.weights),
            dict(other.activations),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """``budget_bytes`` per tier, and ``corrections``: bytes per tier by which a proof exceeded the estimate.

    ``single_pass``: nothing needs all gradients at once, and the optimizer can be stepped in parts. ``chunkable``:
    logits can be computed in chunks. ``gradients_leave``, ``states_leave``: they may be offloaded. ``fixed``: fields
    of Frame that the user set. ``activations``: their allowed choices. ``streams``: weights may be streamed.
    """

    budget_bytes: Mapping[str, int]
    corrections: Mapping[str, int] = field(default_factory=dict)
    single_pass: bool = True
    chunkable: bool = True
    gradients_leave: bool = True
    states_leave: bool = True
    fixed: Mapping[str, object] = field(default_factory=dict)
    activations: Sequence[str] = ACTIVATIONS
    streams: bool = True

    def allow(self, frame: Frame) -> bool:
        """Return True where ``frame`` is possible and agrees with the user's settings."""
        return (
            all(getattr(frame, name) == value for name, value in self.fixed.items())
            and (self.single_pass or not frame.in_backward)
            and (self.chunkable or not frame.chunked)
            and (self.states_leave or frame.states == KEEP)
            and (self.gradients_leave or frame.gradients == KEEP)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The fields of a Frame that an integer program fixes; the others are among its columns.

    ``in_backward`` None: it is among them too. A program sees how long lanes are busy, not how long they wait, so it
    cannot tell that updates in backward hide the copies of offloaded states, nor compare updates ``on_gpu`` with
    those by the CPU.
    """

    micro_batch: int
    slots: int
    states: str
    on_gpu: bool = False
    block_rows: int = 0
    in_backward: bool | None = None


def shape_of(assignment: Assignment) -> Shape:
    """Return the shape for another search; updates in backward are fixed, updates after it are not."""
    frame = assignment.frame
    return Shape(
        micro_batch=frame.micro_batch,
        slots=frame.slots,
        states=frame.states,
        on_gpu=bool(frame.gpu_sixteenths),
        block_rows=frame.block_rows,
        in_backward=frame.in_backward or None,
    )
