"""Timelines as a trace for Perfetto: slices do not overlap in a lane, counters tell the timeline's peaks."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import threading
import time

import pytest

from brim.core import EventKind, Timeline
from brim.errors import UsageError
from brim.report import perfetto
from brim.units import MIB


def run(name: str = "step", *, measured: bool = True, seed: int = 0) -> Timeline:
    """Allocations of categories, streams that overlap, copies both ways, idle times and an OOM."""
    random_ = random.Random(seed)
    made = Timeline(name, measured=measured)
    live: list[tuple[int, int]] = []
    for storage in range(200):
        at, size = storage * 1e-3, random_.randrange(512, 8 * MIB)
        category = random_.choice(("parameter", "activation", ""))
        made.add(EventKind.ALLOC, "vram", size, time_s=at, storage=storage, address=storage * 512, category=category)
        live.append((storage, size))
        if storage % 3 == 0:
            old, bytes_ = live.pop(random_.randrange(len(live)))
            made.add(EventKind.FREE, "vram", bytes_, time_s=at, storage=old, address=old * 512)
        made.add(EventKind.COMPUTE, "vram", 0, time_s=at, duration_s=random_.uniform(0, 3e-3), stream=storage % 2)
        made.add(
            EventKind.COPY,
            "vram",
            size,
            time_s=at,
            duration_s=random_.uniform(0, 4e-3),
            source="ram",
            label="layers.3",
        )
        made.add(EventKind.IDLE, "vram", 0, time_s=at, duration_s=1e-4, label="layers.3", category="copy")
    made.add(EventKind.SEGMENT_ALLOC, "vram", 20 * MIB, time_s=0.0)
    made.add(EventKind.ALLOC, "ram", 5 * MIB, time_s=0.1)
    made.add(EventKind.OOM, "vram", 9 * MIB, time_s=0.2, label="aten.mm")
    return made


def written(path, *timelines: Timeline) -> list[dict]:
    perfetto.write(path, timelines)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


def test_slices_of_one_lane_do_not_overlap_and_times_are_microseconds(tmp_path):
    events = written(tmp_path / "trace.json", run())
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, lanes.values())) == 600
    for slices in lanes.values():
        slices.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(slices))
    compute = [event for event in events if event.get("cat") == "compute"]
    assert [event["ts"] for event in compute] == pytest.approx([index * 1e3 for index in range(200)])


def seconds(timeline: Timeline) -> float:
    """Of this process alone; the least of three, as a machine is never faster than it is."""
    took = []
    for _ in range(3):
        start_s = time.process_time()
        assert sum(1 for _ in perfetto.trace_events([timeline])) > len(timeline)
        took.append(time.process_time() - start_s)
    return min(took)


def test_work_goes_with_the_number_of_overlapping_spans():
    def overlapping(count: int) -> Timeline:
        made = Timeline("streams", measured=True)
        for number in range(count):
            made.add(EventKind.COMPUTE, "vram", 0, time_s=number * 1e-6, duration_s=1.0)
        return made

    assert seconds(overlapping(16_000)) < 9 * seconds(overlapping(4_000))  # with the square it would be 16


def test_a_row_that_became_free_is_used_again_the_first_one_first(tmp_path):
    timeline = Timeline("streams", measured=True)
    for start, took in ((0, 30), (1, 5), (2, 3), (10, 1), (10, 1), (12, 1), (31, 1)):
        timeline.add(EventKind.COMPUTE, "vram", 0, time_s=start, duration_s=took)
    slices = [event for event in written(tmp_path / "trace.json", timeline) if event["ph"] == "X"]
    assert [event["tid"] for event in slices] == [1, 2, 3, 2, 3, 2, 1]


def test_every_lane_has_a_name(tmp_path):
    events = written(tmp_path / "trace.json", run())
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == named.keys()
    assert {"compute vram stream 0", "compute vram stream 1", "copy ram to vram"} <= set(named.values())


def test_counters_reach_the_timelines_peaks_and_never_fall_below_nothing(tmp_path):
    timeline = run()
    events = [event for event in written(tmp_path / "trace.json", timeline) if event["ph"] == "C"]
    sums: dict[str, list[int]] = {}
    for event in events:
        assert all(count >= 0 for count in event["args"].values())
        sums.setdefault(event["name"], []).append(sum(event["args"].values()))
    assert max(sums["vram held"]) == timeline.peak_bytes("vram")
    assert max(sums["vram reserved"]) == timeline.peak_bytes("vram", segments=True)
    assert max(sums["ram held"]) == timeline.peak_bytes("ram")
    assert {key for e in events if e["name"] == "vram held" for key in e["args"]} == {
        "parameter",
        "activation",
        "other",
    }


def test_of_very_many_categories_the_further_ones_are_one_series(tmp_path):
    timeline = Timeline("names", measured=True)
    for number in range(500):
        timeline.add(EventKind.ALLOC, "vram", MIB, storage=number, category=f"category {number}", time_s=number)
    for number in range(500):
        timeline.add(EventKind.FREE, "vram", MIB, storage=number, time_s=500 + number)
    events = [event for event in written(tmp_path / "trace.json", timeline) if event["ph"] == "C"]
    assert max(len(event["args"]) for event in events) == 33
    assert events[499]["args"]["category 3"] == MIB
    assert events[499]["args"]["further categories"] == 468 * MIB
    assert max(sum(event["args"].values()) for event in events) == timeline.peak_bytes("vram")
    assert set(events[-1]["args"].values()) == {0}


def test_predicted_lies_beside_measured(tmp_path):
    events = written(tmp_path / "both.json.gz", run("plan", measured=False), run("run", seed=1))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "predicted: plan", 2: "measured: run"}


def test_events_without_times_keep_their_order(tmp_path):
    timeline = Timeline("plan", measured=False)
    for size in (100, 50):
        timeline.add(EventKind.ALLOC, "vram", size)
    timeline.add(EventKind.FREE, "vram", 100)
    counters = [event for event in written(tmp_path / "trace.json", timeline) if event["ph"] == "C"]
    assert [(event["ts"], event["args"]["other"]) for event in counters] == [(0, 100), (1, 150), (2, 50)]


def test_an_oom_and_what_was_waited_for_are_told(tmp_path):
    events = written(tmp_path / "trace.json", run())
    (failed,) = [event for event in events if event["ph"] == "i"]
    assert failed["name"] == "out of memory: aten.mm"
    assert failed["args"] == {"bytes": 9 * MIB}
    idle = [event for event in events if event.get("cat") == "idle"]
    assert {(event["name"], event["args"]["why"]) for event in idle} == {("layers.3", "copy")}


def test_odd_names_stay_text(tmp_path):
    timeline = Timeline('</script>"\\\n\ud7ff', measured=True)
    timeline.add(EventKind.COMPUTE, "vram", 0, label='"}]{\u2028')
    names = {event["name"] for event in written(tmp_path / "trace.json", timeline)}
    assert '"}]{\u2028' in names


def test_a_time_that_is_no_time_is_an_error(tmp_path):
    timeline = Timeline("odd", measured=True)
    timeline.add(EventKind.COMPUTE, "vram", 0, time_s=float("inf"))
    with pytest.raises(UsageError, match="not JSON compliant"):
        perfetto.write(tmp_path / "trace.json", [timeline])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_failed_write_leaves_the_old_file_whole_and_nothing_else(name, tmp_path):
    bad = run()
    bad.add(EventKind.COMPUTE, "vram", 0, time_s=1.0, duration_s=float("inf"))
    with pytest.raises(UsageError, match="not JSON compliant"):
        perfetto.write(tmp_path / name, [bad])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).write_text("before")
    with pytest.raises(UsageError, match="not JSON compliant"):
        perfetto.write(tmp_path / name, [bad])
    assert (tmp_path / name).read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path):
    (tmp_path / "real.json").touch()
    (tmp_path / "link.json").symlink_to("real.json")
    assert written(tmp_path / "link.json", run())
    assert (tmp_path / "link.json").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    taken: list[str] = []
    reader = threading.Thread(target=lambda: taken.append((tmp_path / "pipe").read_text()))
    reader.start()
    perfetto.write(tmp_path / "pipe", [run()])
    reader.join()
    assert json.loads(taken[0])["traceEvents"]


def test_nothing_to_write_and_nowhere_to_write_it_are_errors(tmp_path):
    with pytest.raises(UsageError, match="no timeline"):
        perfetto.write(tmp_path / "trace.json", [])
    with pytest.raises(UsageError, match="No such file"):
        perfetto.write(tmp_path / "gone" / "trace.json", [run()])
