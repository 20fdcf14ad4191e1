"""Layouts put every byte of a file in its place, aligned as promised, and nothing overlaps."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from brim.core import Timeline
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.direct_io import DirectReader, OpenFiles, bounce_bytes
from brim.memory.layout import (
    WEIGHT_ALIGNMENT_BYTES,
    BlockLayout,
    StagedLayout,
    file_layout,
    packed_layout,
    staged_layout,
)
from brim.memory.pool import PAGE_BYTES, HostSource, Pool
from brim.memory.recorder import Recorder

FILE_BYTES = 300_000
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> tuple[str, torch.Tensor]:
    data = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("layout") / "weights.bin"
    path.write_bytes(data.numpy().tobytes())
    return str(path), data


@st.composite
def sources(draw: st.DrawFn) -> list[TensorSource]:
    """Tensors of one or several extents anywhere in the file, in any order, possibly adjacent."""
    made = []
    for index in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        counts = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=3))
        extents = []
        for count in counts:
            size = count * dtype.itemsize
            extents.append(Extent(path="", offset=draw(st.integers(0, FILE_BYTES - size)), bytes=size))
        made.append(TensorSource(name=f"t{index}", dtype=dtype, shape=(sum(counts),), extents=tuple(extents)))
    return made


def at(path: str, source: TensorSource) -> TensorSource:
    extents = tuple(Extent(path=path, offset=e.offset, bytes=e.bytes) for e in source.extents)
    return TensorSource(name=source.name, dtype=source.dtype, shape=source.shape, extents=extents)


def load(layout: BlockLayout | StagedLayout) -> torch.Tensor:
    """The buffer that its runs fill."""
    pool = Pool("ram", 1 << 30, HostSource(), Recorder(Timeline("test", measured=True)))
    files = OpenFiles()
    reader = DirectReader(lambda size: pool.allocate(size, "bounce"), files)
    buffer = pool.allocate(layout.bytes, "block")
    for run in layout.runs:
        reader.read(run, buffer.tensor, lambda: False)
    files.close()
    return buffer.tensor


@pytest.mark.parametrize("make", [file_layout, packed_layout])
@settings(max_examples=60, deadline=None)
@given(drawn=sources())
def test_every_byte_arrives_in_its_place(content, make, drawn):
    path, data = content
    wanted = [at(path, source) for source in drawn]
    layout = make(wanted)
    for source, placed, tensor in zip(wanted, layout.tensors, layout.views(load(layout)), strict=True):
        whole = torch.cat([data[e.offset : e.offset + e.bytes] for e in source.extents])
        assert torch.equal(tensor.contiguous().view(torch.uint8), whole)
        assert (tensor.dtype, tuple(tensor.shape), placed.name) == (source.dtype, source.shape, source.name)
        assert placed.bytes == source.bytes
    assert layout.bytes % PAGE_BYTES == 0


@settings(max_examples=60, deadline=None)
@given(drawn=sources())
def test_on_its_way_to_a_slot_a_block_is_read_straight_from_the_disk(content, drawn):
    """And every byte arrives in its place in the slot, which comes back through a buffer of that size."""
    path, data = content
    layout = packed_layout([at(path, source) for source in drawn])
    staged = staged_layout(layout)
    assert all(run.direct and run.at % PAGE_BYTES == run.offset % PAGE_BYTES for run in staged.runs)
    assert layout.bytes <= staged.bytes <= layout.bytes + sum(2 * PAGE_BYTES for _ in layout.runs)
    assert staged.bytes % PAGE_BYTES == 0 and bounce_bytes(staged.runs) == 0
    passing = load(staged)
    slot = torch.zeros(layout.bytes, dtype=torch.uint8)
    for move in staged.moves:
        slot[move.target : move.target + move.bytes] = passing[move.source : move.source + move.bytes]
    for source, tensor in zip(drawn, layout.views(slot), strict=True):
        whole = torch.cat([data[e.offset : e.offset + e.bytes] for e in source.extents])
        assert torch.equal(tensor.contiguous().view(torch.uint8), whole)


@settings(max_examples=60, deadline=None)
@given(drawn=sources())
def test_in_file_layouts_addresses_are_congruent_to_offsets_and_in_packed_ones_aligned(drawn):
    for source, placed in zip(drawn, file_layout(drawn).tensors, strict=True):
        if len(source.extents) == 1 and source.extents[0].offset % source.dtype.itemsize == 0:
            assert placed.offset % PAGE_BYTES == source.extents[0].offset % PAGE_BYTES
        else:
            assert placed.offset % WEIGHT_ALIGNMENT_BYTES == 0
    for placed in packed_layout(drawn).tensors:
        assert placed.offset % WEIGHT_ALIGNMENT_BYTES == 0


def test_neighbours_in_a_file_are_one_read():
    size = 4 * 1000
    drawn = [
        TensorSource(
            name=str(i),
            dtype=torch.float32,
            shape=(1000,),
            extents=(Extent(path="f", offset=72 + i * size, bytes=size),),
        )
        for i in range(5)
    ]
    layout = file_layout(drawn)
    assert [(run.offset, run.bytes, run.at, run.direct) for run in layout.runs] == [(72, 5 * size, 72, True)]
    assert bounce_bytes(layout.runs) == 0


def test_a_file_that_has_the_packed_layout_is_read_directly():
    extents = [Extent(path="f", offset=PAGE_BYTES * 3 + i * 4608, bytes=4100) for i in range(3)]
    drawn = [
        TensorSource(name=str(i), dtype=torch.float32, shape=(1025,), extents=(extent,))
        for i, extent in enumerate(extents)
    ]
    assert [run.direct for run in packed_layout(drawn).runs] == [True]
    moved = [TensorSource(name="x", dtype=torch.float32, shape=(1025,), extents=(extents[1],))]
    assert [run.direct for run in packed_layout(moved).runs] == [False]
    assert bounce_bytes(packed_layout(moved).runs) >= 4100


def test_tensors_without_a_file_take_room_and_no_read():
    layout = packed_layout([TensorSource(name="x", dtype=torch.bfloat16, shape=(3, 5), extents=())])
    assert layout.runs == () and layout.tensors[0].bytes == 30 and layout.bytes == PAGE_BYTES
