"""What is told of a snapshot without events is what an allocator in its state would tell."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import Timeline
from brim.recordings.history import STATES, BlockRecord, Columns, DeviceHistory, SegmentRecord
from brim.recordings.replay import recorded_start
from brim.recordings.stacks import StackTexts
from brim.recordings.timeline import INFERRED, _Writing, recorded_run
from brim.units import MIB

STACKS = (
    ("step at train.py:7", "main at train.py:9"),
    ("__init__ at model.py:3",),
    ("at::native::empty()", "backward at /torch/autograd/graph.py:8"),
)
PAGE = 2 * MIB
KINDS = [(0, False, (0, 0), True), (0, True, (0, 0), False), (7, False, (0, 1), False)]


@st.composite
def histories(draw: st.DrawFn) -> DeviceHistory:
    """Segments side by side and apart, of several streams and pools, some of them ranges of expandable ones."""
    made: list[SegmentRecord] = []
    at = 1 << 40
    for _ in range(draw(st.integers(0, 6))):
        stream, small, pool, expandable = draw(st.sampled_from(KINDS))
        at += PAGE * draw(st.integers(int(expandable), 2))  # ranges of one that touch are one range
        cuts = sorted({0, PAGE, *(512 * cut for cut in draw(st.lists(st.integers(1, PAGE // 512 - 1), max_size=6)))})
        blocks = []
        for begin, end in pairwise(cuts):
            state, stack = draw(st.sampled_from(STATES)), draw(st.integers(-1, len(STACKS) - 1))
            blocks.append(BlockRecord(at + begin, end - begin, end - begin, state, stack))
        made.append(
            SegmentRecord(
                address=at, size=PAGE, stream=stream, small=small, pool=pool, expandable=expandable, blocks=blocks
            )
        )
        at += PAGE
    return DeviceHistory(device=1, segments=tuple(made))


@settings(max_examples=200, deadline=None)
@given(histories())
def test_it_is_what_a_replay_of_nothing_tells(history: DeviceHistory) -> None:
    timeline = Timeline("run", measured=True, facts={"device": 1.0, INFERRED: 1.0})
    columns = Columns(history)
    run = _Writing(columns, *recorded_start(columns))
    run.prepare(timeline, StackTexts(STACKS))
    run.keep_moment("end", 0)
    found = recorded_run(history, "run", stacks=STACKS)
    assert found.timeline == timeline
    assert found.replay == run.result()
    assert list(found.moments) == run.moments
    assert found.capacity_bytes is None
