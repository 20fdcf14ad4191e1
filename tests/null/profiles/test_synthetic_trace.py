"""The traces that other tests and the benches read say what real ones say."""

from __future__ import annotations

import json

from brim.core import EventKind
from brim.profiles import profiler as profile
from brim.report.explain import summary
from support import synthetic_trace


def memory(count: int) -> list[dict[str, int]]:
    return [event["args"] for event in synthetic_trace.events(count) if event["name"] == "[memory]"]


def test_live_blocks_have_addresses_of_their_own_and_are_freed_where_they_were_given():
    live: dict[int, int] = {}
    end = 0
    for event in memory(20_000):
        where, size = event["Addr"], event["Bytes"]
        if size > 0:
            assert where not in live
            live[where] = size
        else:
            assert live.pop(where) == -size
        end = max(end, where + abs(size))
    assert len(live) > 100
    places = sorted(live.items())
    assert all(at + size <= after for (at, size), (after, _) in zip(places, [*places[1:], (end, 0)], strict=True))


def test_what_is_held_at_the_peak_is_the_sum_of_its_blocks(tmp_path):
    path = tmp_path / "trace.json"
    synthetic_trace.write(path, 20_000)
    (device,) = profile.read(path).devices
    kinds = device.timeline.column("kind")
    assert kinds.count(EventKind.FREE) > 1000
    found = summary(device.timeline, most=None)
    assert found.allocated_bytes == sum(one.bytes for one in found.by_category)
    totals = [event["Total Allocated"] for event in memory(20_000)]
    assert found.allocated_bytes == max(totals)
    assert json.loads(path.read_text())["traceEvents"]
