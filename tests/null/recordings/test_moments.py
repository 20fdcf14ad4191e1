"""What lies free and what pins it, at the moments that tell; and what recorded blocks probably were."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from brim.allocator.out_of_memory import OutOfMemory
from brim.core import EventKind
from brim.core.trace import Category
from brim.recordings import snapshot
from brim.recordings.moments import Moment
from brim.recordings.stacks import Phase, informative_frames, label_of, phases_of
from brim.recordings.timeline import RecordedRun, recorded_run
from brim.units import KIB, MIB
from support.simulated_recording import Recording

ROOT = Path(__file__).parents[3]
SNAPSHOTS = Path(os.environ.get("BRIM_GROUND_TRUTH", ROOT.parent / "shared" / "ground_truth")) / "snapshots"
FILES = sorted(SNAPSHOTS.glob("*.pickle"))
FORWARD = ["forward at model.py:3", "_call_impl at /x/torch/nn/modules/module.py:1750", "<module> at train.py:9"]
BACKWARD = ["at::_ops::mm::redispatch()", "torch::autograd::Engine::evaluate_function()"]
STEP = ["zeros_like at /x/torch/_refs.py:7", "step at /x/torch/optim/adamw.py:120", "<module> at train.py:12"]
BUILD = ["convert at /x/torch/nn/modules/module.py:1355", "_apply at /x/torch/nn/modules/module.py:928"]


def recorded(made: Recording) -> RecordedRun:
    (history,) = snapshot.parse(made.dump()).devices
    return recorded_run(history, "run")


def at(run: RecordedRun, what: str) -> Moment:
    return next(one for one in run.moments if one.what == what)


def test_small_blocks_pin_the_segments_that_they_are_in():
    made = Recording("", 200 * MIB)
    pairs = [(made.malloc(12 * MIB), made.malloc(4 * MIB)) for _ in range(5)]
    for large, _ in pairs:
        made.free(large)
    with pytest.raises(OutOfMemory):
        made.malloc(150 * MIB)
    run = recorded(made)
    failed = at(run, "oom")
    assert failed.requested_bytes == 150 * MIB
    assert failed.allocated_bytes == 20 * MIB
    assert failed.free_bytes == failed.reserved_bytes - 20 * MIB
    assert failed.pinned_bytes + failed.cached_bytes == failed.free_bytes
    assert failed.cached_bytes == 0  # a failing request gave it back
    assert {pin.bytes for one in failed.segments for pin in one.pins} == {4 * MIB}
    assert all(one.allocated_bytes + one.free_bytes == one.bytes for one in failed.segments)
    assert sum(one.free_bytes for one in failed.segments) == failed.pinned_bytes
    assert max(one.largest_free_bytes for one in failed.segments) == failed.largest_free_bytes < 150 * MIB
    assert sum(size.bytes for size in failed.free_by_size) == failed.free_bytes
    event = failed.segments[0].pins[0].event
    assert made.events[event]["action"] == "alloc"


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_peak_and_the_end_agree_with_the_allocator(settings):
    made = Recording(settings, 400 * MIB)
    blocks = [made.malloc(size * 700 * KIB) for size in range(1, 12)]
    for block in blocks[1::2]:
        made.free(block)
    run = recorded(made)
    end = at(run, "end")
    assert end.allocated_bytes == made.stats.allocated_bytes
    assert end.reserved_bytes == made.stats.reserved_bytes
    peak = at(run, "peak")
    assert peak.reserved_bytes == made.stats.reserved_peak_bytes
    assert run.timeline.peak_bytes("vram", segments=True) == peak.reserved_bytes
    assert peak.pinned_bytes + peak.cached_bytes == peak.free_bytes


@pytest.mark.thorough
@pytest.mark.skipif(not FILES, reason=f"no recorded snapshots under {SNAPSHOTS}")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_real_run_adds_up_at_every_moment(path):
    found = snapshot.read(path)
    for history in found.devices:
        run = recorded_run(history, path.stem, stacks=found.stacks)
        assert at(run, "peak").reserved_bytes == run.replay.peak_reserved_measured_bytes
        assert at(run, "end").reserved_bytes == sum(segment.size for segment in history.segments)
        assert sum(one.what == "oom" for one in run.moments) == run.replay.ooms
        for one in run.moments:
            assert one.pinned_bytes + one.cached_bytes == one.free_bytes
            assert sum(size.bytes for size in one.free_by_size) == one.free_bytes
        assert set(run.timeline.texts("category")[1])  # what is known is known by name
        named = {event.category for event in run.timeline if event.kind is EventKind.ALLOC}
        assert named <= {"", *map(str, Category)}
        assert len(named) > 1


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (FORWARD, Phase.FORWARD),
        (BACKWARD, Phase.BACKWARD),
        ([*FORWARD, *BACKWARD], Phase.BACKWARD),  # recomputed in backward
        (STEP, Phase.OPTIMIZER),
        (["step at mine/optimizers.py:82", "main at train.py:3"], Phase.OPTIMIZER),
        (["_init_group at /x/torch/optim/adam.py:160", *STEP], Phase.STATES),
        (["_multi_tensor_adam at /x/torch/optim/adam.py:700", *STEP], Phase.LISTS),
        ([*FORWARD[:2], "recompute_fn at /x/torch/utils/checkpoint.py:1500"], Phase.BACKWARD),  # autograd's thread
        (["cross_entropy at /x/torch/nn/functional.py:3500", "<module> at train.py:10"], Phase.FORWARD),
        (BUILD, Phase.BUILD),
        (["update at /x/transformers/cache_utils.py:99", *FORWARD], Phase.CACHE),
        (["collate at /x/torch/utils/data/_utils/collate.py:5"], Phase.INPUT),
        (["at::cuda::getNewWorkspace()", *FORWARD], Phase.WORKSPACE),
        (["main at train.py:3"], Phase.UNKNOWN),
        ([], Phase.UNKNOWN),
    ],
)
def test_a_stack_tells_the_phase(frames, phase):
    assert phases_of([frames]) == [phase]


ALLOC, FREE = ("alloc",), ("free_requested", "free_completed")
ZERO, OTHER = ["zero_grad at train.py:13"], ["main at train.py:20"]
# One step: what happens, to which block, from where, and what the block is if it is allocated.
TRAINING = (
    (ALLOC, 0, BUILD, "parameter"),
    (ALLOC, 1, FORWARD, "activation"),
    (ALLOC, 2, FORWARD, "temporary"),
    (FREE, 2, FORWARD, ""),
    (ALLOC, 3, BACKWARD, "gradient"),
    (ALLOC, 4, BACKWARD, "temporary"),
    (FREE, 1, BACKWARD, ""),
    (FREE, 4, BACKWARD, ""),
    (ALLOC, 5, STEP, "optimizer_state"),
    (ALLOC, 6, STEP, "optimizer_temporary"),
    (FREE, 6, STEP, ""),
    (FREE, 3, ZERO, ""),
    (ALLOC, 7, OTHER, ""),
)
START, SIZE = 1 << 40, MIB // 2


@cache
def frame(text: str) -> dict[str, Any]:
    """A frame, which stacks share as those of PyTorch do."""
    name, _, where = text.partition(" at ")
    file, _, line = where.rpartition(":")
    return {"name": name, "filename": file or "??", "line": int(line) if line else 0}


def training(events: Sequence[tuple[tuple[str, ...], int, list[str], str]] = TRAINING) -> dict[str, Any]:
    """A snapshot of ``events``: each block lies in a segment of its own."""
    trace: list[dict[str, Any]] = []
    live = set()
    for actions, number, frames, _ in events:
        live ^= {number}
        for action in actions:
            row = {"addr": START + number * 2 * MIB, "size": SIZE, "stream": 0, "time_us": len(trace)}
            trace.append({"action": action, "frames": [frame(text) for text in frames]} | row)
    segments = []
    for number in sorted({number for _, number, _, _ in events}):
        used = {"size": SIZE, "requested_size": SIZE, "state": "active_allocated"}
        rest = {"size": 2 * MIB - SIZE * (number in live), "requested_size": 0, "state": "inactive"}
        row = {"device": 0, "address": START + number * 2 * MIB, "total_size": 2 * MIB, "stream": 0}
        segments.append(row | {"segment_type": "small", "blocks": [used, rest] if number in live else [rest]})
    return {"segments": segments, "device_traces": [trace]}


def test_stacks_and_lifetimes_tell_what_blocks_were():
    found = snapshot.parse(pickle.dumps(training()))
    run = recorded_run(found.devices[0], "run", stacks=found.stacks)
    allocated = [event for event in run.timeline if event.kind is EventKind.ALLOC]
    assert [event.category for event in allocated] == [kind for actions, _, _, kind in TRAINING if actions == ALLOC]
    assert run.timeline.facts["categories_inferred"] == 1
    assert allocated[1].stack.split("\n")[0] == "forward at model.py:3"
    assert allocated[1].label == "forward at model.py:3"
    assert allocated[3].label == "at::_ops::mm::redispatch()"


INIT = ["_init_group at /x/torch/optim/adam.py:160", *STEP]
LISTS = ["_multi_tensor_adam at /x/torch/optim/adam.py:700", *STEP]
LOSS = ["cross_entropy at /x/torch/nn/functional.py:3500", "<module> at train.py:10"]
# The optimizer's step runs out of memory; autograd's own thread has no frames.
IN_THE_STEP = (
    (ALLOC, 0, BUILD, "parameter"),
    (ALLOC, 1, FORWARD, "activation"),
    (ALLOC, 2, LOSS, "activation"),
    (ALLOC, 3, [], "temporary"),
    (FREE, 3, [], ""),
    (ALLOC, 4, [], "gradient"),
    (FREE, 2, [], ""),
    (FREE, 1, [], ""),
    (ALLOC, 5, INIT, "optimizer_state"),
    (ALLOC, 6, STEP, "optimizer_temporary"),
    (FREE, 6, STEP, ""),
    (ALLOC, 7, STEP, "optimizer_temporary"),  # of the stack of one that was freed in the step
    (ALLOC, 8, ["step at mine/lion.py:7"], "optimizer_state"),
    (ALLOC, 9, LISTS, "optimizer_temporary"),
)


def test_what_an_optimizer_holds_for_a_while_is_not_its_state():
    found = snapshot.parse(pickle.dumps(training(IN_THE_STEP)))
    run = recorded_run(found.devices[0], "run", stacks=found.stacks)
    allocated = [event for event in run.timeline if event.kind is EventKind.ALLOC]
    assert [event.category for event in allocated] == [kind for act, _, _, kind in IN_THE_STEP if act == ALLOC]


def test_frames_of_python_are_what_people_read():
    frames = ["torch::unwind::unwind()", "at::native::empty()", *STEP]
    assert informative_frames(frames) == STEP
    assert label_of(frames) == "<module> at train.py:12"
    assert informative_frames(frames[:2]) == ["at::native::empty()"]
    assert label_of([]) == ""


def test_segments_without_events_are_described_too():
    segment = {"device": 0, "address": 0, "total_size": 20 * MIB, "stream": 0, "segment_type": "large"}
    blocks = [{"size": 2 * MIB, "state": "active_allocated"}, {"size": 18 * MIB, "state": "inactive"}]
    (history,) = snapshot.parse(pickle.dumps([segment | {"blocks": blocks}])).devices
    run = recorded_run(history, "old")
    assert [one.what for one in run.moments] == ["peak", "end"]
    assert {(one.allocated_bytes, one.largest_free_bytes) for one in run.moments} == {(2 * MIB, 18 * MIB)}
    assert run.timeline.peak_bytes("vram") == 2 * MIB


def test_a_request_for_nothing_is_no_peak():
    trace = [
        {"action": action, "addr": 0, "size": size, "stream": 0, "time_us": 1}
        for action, size in (("segment_alloc", 2 * MIB), ("alloc", 0))
    ]
    (history,) = snapshot.parse(pickle.dumps({"segments": [], "device_traces": [trace]})).devices
    assert [one.what for one in recorded_run(history, "run").moments] == ["peak", "end"]
