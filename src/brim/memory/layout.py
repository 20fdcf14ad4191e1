"""The layout of a block's tensors in its flat buffer, and the file ranges that fill it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.pool import PAGE_BYTES, round_up

# Reading a small hole between two tensors is cheaper than a second request.
_LARGEST_GAP_BYTES = 64 << 10
# The alignment of torch's CPU allocator, and four times that of most CUDA kernels.
PACKED_ALIGNMENT_BYTES = 64
# The alignment of torch's CUDA allocator. cublasLt chooses kernels by the alignment of a weight, up to 256 bytes
# (PyTorch, aten/src/ATen/cuda/CUDABlas.cpp, _getAlignment): with less, a streamed layer might round differently.
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
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRun:
    """A read of ``bytes`` at ``offset`` of a file into ``at`` of the buffer.

    ``direct``: ``at`` and ``offset`` are congruent modulo the page, so the disk can write directly into the buffer.
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
        """Return the tensors as views of ``buffer`` (uint8, at least ``bytes`` long)."""
        # A view created in inference mode cannot become a Parameter's data.
        with torch.inference_mode(False):
            return [buffer[t.offset : t.offset + t.bytes].view(t.dtype).view(t.shape) for t in self.tensors]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A copy of ``bytes`` at ``source`` of a buffer to ``target`` of another."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedLayout:
    """The layout of a block in RAM between disk and slot: ``runs`` fill the buffer, ``moves`` copy it to the slot."""

    runs: tuple[ReadRun, ...]
    moves: tuple[Move, ...]
    bytes: int  # a multiple of the page, and at least the slot's, which is saved through it


def staged_layout(layout: BlockLayout) -> StagedLayout:
    """Return a layout in RAM that the disk can write into directly, for a slot with another layout.

    Offsets in the buffer are congruent to those in the file modulo the page; the copy to the slot, piece by piece,
    corrects the difference.
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
    """Return the layout that the disk can write into directly: every address congruent to its file offset.

    Each tensor has its alignment in the memory-mapped file, so that kernels whose rounding depends on alignment give
    the results of the mapped checkpoint.
    """
    mappable = [s for s in sources if s.is_mappable]
    pieced = [s for s in sources if s not in mappable]
    runs: list[ReadRun] = []
    offsets: dict[str, int] = {}
    cursor = 0
    for group in _adjacent(mappable):
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
    """Return the layout of consecutive tensors, aligned for kernels.

    Reads from disk pass through a bounce buffer, unless the file has the same layout.
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
        if not source.extents:  # in memory already
            cursor += source.bytes
    if len(runs) == 1 and start == 0 and (runs[0].offset - runs[0].at) % PAGE_BYTES == 0:
        runs = [replace(runs[0], direct=True)]
    return _finish(sources, offsets, runs, round_up(cursor, PAGE_BYTES))


def equal_layouts(blocks: Sequence[Sequence[TensorSource]], *, in_files: bool) -> list[BlockLayout]:
    """Return layouts with equal offsets for blocks of equal shapes, whose slots form one tensor.

    With ``in_files``, they are the layouts of their files if those are equal, else packed.
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
    """Add a read into ``at``, joined with the last run if file and buffer continue alike (padding included)."""
    last = runs[-1] if runs else None
    gap = extent.offset - last.offset - last.bytes if last else -1
    if last and last.path == extent.path and 0 <= gap == at - last.at - last.bytes < WEIGHT_ALIGNMENT_BYTES:
        runs[-1] = replace(last, bytes=last.bytes + gap + extent.bytes)
    else:
        runs.append(ReadRun(path=extent.path, offset=extent.offset, bytes=extent.bytes, at=at, direct=False))


def _adjacent(sources: Sequence[TensorSource]) -> list[list[TensorSource]]:
    """Group sources that one sequential read covers."""
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
    """Return the end of the group's bytes in their file; tensors may share bytes."""
    return max(source.extents[0].offset + source.extents[0].bytes for source in group)


def _bridged(group: Sequence[TensorSource]) -> int:
    """Return the largest gap to read over. It takes memory, so it is at most the group's bytes, or a page."""
    return min(_LARGEST_GAP_BYTES, max(PAGE_BYTES, sum(source.bytes for source in group)))
