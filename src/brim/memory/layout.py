"""Where each tensor of a block lies in the block's one flat buffer, and which file ranges fill it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.pool import PAGE_BYTES, round_up

# Reading a small hole between two tensors is cheaper than a second request.
_LARGEST_GAP_BYTES = 64 << 10
# What torch's CPU allocator gives, and four times what most CUDA kernels want.
PACKED_ALIGNMENT_BYTES = 64
# What torch's CUDA allocator gives. cublasLt chooses its kernels by the alignment of a weight, up to 256 bytes
# (PyTorch, aten/src/ATen/cuda/CUDABlas.cpp, _getAlignment): with less a streamed layer might round otherwise.
WEIGHT_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A tensor at byte ``offset`` of its block's buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRun:
    """``bytes`` at ``offset`` of a file go to ``at`` in the buffer.

    ``direct``: ``at`` and ``offset`` are congruent modulo the page, so the device can write into the buffer itself.
    """

    path: str
    offset: int
    bytes: int
    at: int
    direct: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    tensors: tuple[Placed, ...]
    runs: tuple[ReadRun, ...]
    bytes: int  # of the buffer: a multiple of the page

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as views of ``buffer`` (uint8, at least ``bytes`` long), in the order of ``tensors``."""
        # A view made in inference mode could not become a Parameter's data.
        with torch.inference_mode(False):
            return [buffer[t.offset : t.offset + t.bytes].view(t.dtype).view(t.shape) for t in self.tensors]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """``bytes`` at ``source`` of a buffer go to ``target`` of another."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedLayout:
    """A block on its way from disk to its slot: ``runs`` fill a buffer of ``bytes`` in RAM, ``moves`` empty it."""

    runs: tuple[ReadRun, ...]
    moves: tuple[Move, ...]
    bytes: int  # a multiple of the page, and not less than the slot's, which comes back through it


def staged_layout(layout: BlockLayout) -> StagedLayout:
    """The form of a block in RAM that a disk can write straight into, where the slot wants another one.

    What its offset in the file is off from a page, its place in the buffer is too; the copy to the slot, which goes
    piece by piece anyhow, takes up the difference.
    """
    if all(run.direct for run in layout.runs):
        same = tuple(Move(source=run.at, target=run.at, bytes=run.bytes) for run in layout.runs)
        return StagedLayout(runs=layout.runs, moves=same, bytes=layout.bytes)
    runs: list[ReadRun] = []
    moves: list[Move] = []
    cursor = 0
    for run in sorted(layout.runs, key=lambda run: (run.path, run.offset)):
        last = runs[-1] if runs else None
        gap = run.offset - last.offset - last.bytes if last and last.path == run.path else -1
        if last and 0 <= gap <= min(_LARGEST_GAP_BYTES, max(PAGE_BYTES, last.bytes)):
            runs[-1] = last = replace(last, bytes=last.bytes + gap + run.bytes)
        else:
            at = cursor + run.offset % PAGE_BYTES
            last = ReadRun(path=run.path, offset=run.offset, bytes=run.bytes, at=at, direct=True)
            runs.append(last)
        moves.append(Move(source=last.at + run.offset - last.offset, target=run.at, bytes=run.bytes))
        cursor = round_up(last.at + last.bytes, PAGE_BYTES)
    return StagedLayout(runs=tuple(runs), moves=tuple(moves), bytes=max(cursor, layout.bytes))


def file_layout(sources: Sequence[TensorSource]) -> BlockLayout:
    """The layout that lets a disk write straight into the buffer: every address congruent to its file offset.

    It also gives each tensor the alignment it has in the memory-mapped file, so that kernels whose rounding depends
    on alignment compute what they compute on the mapped checkpoint.
    """
    whole = [s for s in sources if s.is_mappable]
    pieced = [s for s in sources if s not in whole]
    runs: list[ReadRun] = []
    offsets: dict[str, int] = {}
    cursor = 0
    for group in _adjacent(whole):
        first = group[0].extents[0]
        at = cursor + first.offset % PAGE_BYTES
        length = _end(group) - first.offset
        runs.append(ReadRun(path=first.path, offset=first.offset, bytes=length, at=at, direct=True))
        offsets |= {s.name: at + s.extents[0].offset - first.offset for s in group}
        cursor = round_up(at + length, PAGE_BYTES)
    packed = packed_layout(pieced, start=cursor)
    offsets |= {t.name: t.offset for t in packed.tensors}
    return _finish(sources, offsets, [*runs, *packed.runs], packed.bytes)


def packed_layout(sources: Sequence[TensorSource], start: int = 0) -> BlockLayout:
    """Tensors one after the other, aligned for kernels.

    What is read from disk goes through a bounce buffer, unless the file has the very same layout.
    """
    runs: list[ReadRun] = []
    offsets: dict[str, int] = {}
    cursor = start
    for source in sources:
        cursor = round_up(cursor, WEIGHT_ALIGNMENT_BYTES)
        offsets[source.name] = cursor
        for extent in source.extents:
            _append_run(runs, extent, cursor)
            cursor += extent.bytes
        if not source.extents:  # not in any file: the bytes are already in memory
            cursor += source.bytes
    if len(runs) == 1 and start == 0 and (runs[0].offset - runs[0].at) % PAGE_BYTES == 0:
        runs = [replace(runs[0], direct=True)]
    return _finish(sources, offsets, runs, round_up(cursor, PAGE_BYTES))


def equal_layouts(blocks: Sequence[Sequence[TensorSource]], *, in_files: bool) -> list[BlockLayout]:
    """The layouts of blocks of the same shapes whose slots are to be one tensor: the same offsets in all of them.

    As in their files where that is so (``in_files``: where it would be of use), else packed.
    """
    if in_files:
        layouts = [file_layout(block) for block in blocks]
        if len({tuple(t.offset for t in layout.tensors) for layout in layouts}) == 1:
            return layouts
    return [packed_layout(block) for block in blocks]


def _finish(
    sources: Sequence[TensorSource], offsets: dict[str, int], runs: Iterable[ReadRun], total: int
) -> BlockLayout:
    tensors = tuple(Placed(name=s.name, dtype=s.dtype, shape=s.shape, offset=offsets[s.name]) for s in sources)
    return BlockLayout(tensors=tensors, runs=tuple(runs), bytes=total)


def _append_run(runs: list[ReadRun], extent: Extent, at: int) -> None:
    """Add what fills ``at``, to the last run where the file continues like the buffer does (padding included)."""
    last = runs[-1] if runs else None
    gap = extent.offset - last.offset - last.bytes if last else -1
    if last and last.path == extent.path and 0 <= gap == at - last.at - last.bytes < WEIGHT_ALIGNMENT_BYTES:
        runs[-1] = replace(last, bytes=last.bytes + gap + extent.bytes)
    else:
        runs.append(ReadRun(path=extent.path, offset=extent.offset, bytes=extent.bytes, at=at, direct=False))


def _adjacent(sources: Sequence[TensorSource]) -> list[list[TensorSource]]:
    """Sources grouped into what one sequential read covers."""
    groups: list[list[TensorSource]] = []
    for source in sorted(sources, key=lambda s: (s.extents[0].path, s.extents[0].offset)):
        extent = source.extents[0]
        last = groups[-1][-1].extents[0] if groups else None
        if last and last.path == extent.path and extent.offset - _end(groups[-1]) <= _bridged(groups[-1]):
            groups[-1].append(source)
        else:
            groups.append([source])
    return groups


def _end(group: Sequence[TensorSource]) -> int:
    """Where the bytes of ``group`` end in their file; several tensors may be made of the same bytes."""
    return max(source.extents[0].offset + source.extents[0].bytes for source in group)


def _bridged(group: Sequence[TensorSource]) -> int:
    """The largest gap to what follows: it takes memory too, so no more than there is of use, or than a page."""
    return min(_LARGEST_GAP_BYTES, max(PAGE_BYTES, sum(source.bytes for source in group)))
