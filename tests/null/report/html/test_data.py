"""What a page is given of a timeline: nothing that it shows may differ from a plain walk through the events."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from brim.core import EventKind, Timeline
from brim.report.html.data import Detail, lanes, levels, view_data
from brim.report.html.memory import (
    MOST_GROUPS,
    Segments,
    frames_of,
    module_of,
    moments,
    ranked,
    tier_events,
    tiers_of,
)
from brim.report.html.packing import integers, plain, script_json
from support.report_page import unpacked

CATEGORIES = ("parameter", "gradient", "activation", "temporary")


def random_run(count: int, seed: int, *, storages: bool = True, addresses: bool = True) -> Timeline:
    """Blocks come and go at random; addresses and, without storages, names are used again. Ends in an OOM."""
    chosen = random.Random(seed)
    made = Timeline("random", measured=True)
    made.add(EventKind.SEGMENT_ALLOC, "vram", 1 << 30, address=0)
    live: list[tuple[int, int, int]] = []
    free = list(range(400))
    now_s = 0.0
    for number in range(count):
        now_s += chosen.choice((1e-6, 1e-5, 0.3 if number % 97 == 0 else 1e-6))
        if free and (not live or chosen.random() < 0.53):
            place = free.pop(chosen.randrange(len(free)))
            size = 512 * chosen.randint(1, 4000)
            key = {"storage": number if storages else -1, "address": place << 21 if addresses else -1}
            made.add(
                EventKind.ALLOC, "vram", size, time_s=now_s, category=chosen.choice(CATEGORIES),
                stack=f"model.layers.{place % 5}.mlp", label=f"op{place % 3}", **key,
            )  # fmt: skip
            live.append((key["storage"], place, size))
        else:
            storage, place, size = live.pop(chosen.randrange(len(live)))
            free.append(place)
            address = place << 21 if addresses else -1
            made.add(EventKind.FREE, "vram", size, time_s=now_s, storage=storage, address=address)
    made.add(EventKind.OOM, "vram", 1 << 31, time_s=now_s, label="aten.mm")
    return made


def walked(timeline: Timeline) -> list[Counter[str]]:
    """Bytes by category after each event, by a plain walk."""
    live: dict[tuple[int, int], str] = {}
    now: Counter[str] = Counter()
    found = []
    for event in timeline:
        key = (event.storage, -1) if event.storage >= 0 else (-1, event.address)
        if event.kind is EventKind.ALLOC:
            live[key] = event.category
            now[event.category] += event.bytes
        elif event.kind is EventKind.FREE:
            now[live.pop(key)] -= event.bytes
        found.append(now.copy())
    return found


@pytest.mark.parametrize(("storages", "addresses"), [(True, True), (True, False), (False, True)])
def test_every_sample_of_every_level_is_what_was_held_then(storages: bool, addresses: bool) -> None:
    timeline = random_run(6000, seed=3, storages=storages, addresses=addresses)
    truth = walked(timeline)
    detail = Detail(buckets=(20, 100), exact_events=1000)
    (panel,) = view_data(timeline, "t", None, detail)["panels"]
    assert len(panel["levels"]) == 2
    for level in panel["levels"]:
        columns = [unpacked(column) for column in level["groups"]]
        for row, event in enumerate(unpacked(level["event"])):
            assert {name: column[row] for name, column in zip(panel["groups"], columns, strict=True)} == {
                name: truth[event][name] for name in panel["groups"]
            }


def test_no_level_loses_the_peak_or_any_buckets_extremes() -> None:
    found = tier_events(random_run(6000, seed=4), "vram")
    allocated, reserved = np.cumsum(found.delta), np.cumsum(found.reserved_delta)
    coarse, fine = levels(found.time_ns, allocated, reserved, (20, 100))
    assert len(coarse) < len(fine) < len(found)
    for positions in (coarse, fine):
        assert int(np.argmax(allocated)) in positions
        assert allocated[positions].max() == allocated.max()
    for start in range(0, len(found), len(found) // 100 + 1):
        inside = fine[(fine >= start) & (fine < start + len(found) // 100 + 1)]
        assert len(inside) >= 2
    assert levels(found.time_ns, allocated, reserved, (10_000,)) == []


def test_a_pause_is_seen_with_what_was_held_during_it() -> None:
    """A hundred thousand short events, then a second in which only the last of them is held."""
    count = 100_000
    time_ns = np.append(np.arange(count), [1_000_000_000, 1_000_000_001])
    allocated = np.append(np.tile([5, 9], count // 2), [2, 0])
    allocated[count - 1] = 7
    (level,) = levels(time_ns, allocated, np.zeros_like(allocated), (50,))
    before = level[np.searchsorted(time_ns[level], 500_000_000) - 1]
    assert allocated[before] == 7


def test_moments_hold_what_a_walk_holds() -> None:
    timeline = random_run(3000, seed=5)
    truth = walked(timeline)
    found = tier_events(timeline, "vram")
    _, rank = ranked(found, 100, 1000)
    for most_blocks in (1000, 10):
        for made in moments(found, [-1, 1, 1000, 2999], most_blocks, rank):
            sizes, rest = (unpacked(made[rows]["bytes"]) for rows in ("blocks", "loose"))
            expected = sum(truth[made["event"]].values()) if made["event"] >= 0 else 0
            assert sum(sizes) + sum(rest) == expected
            kinds = list(timeline.column("kind"))[: made["event"] + 1]
            live = kinds.count(EventKind.ALLOC) - kinds.count(EventKind.FREE)
            assert len(sizes) == min(live, most_blocks)
            assert bool(rest) == (live > most_blocks)


def test_frees_of_what_nobody_saw_taken_are_counted_as_peaks_count_them() -> None:
    timeline = Timeline("cut", measured=True)
    timeline.add(EventKind.FREE, "vram", 100, storage=1)
    timeline.add(EventKind.ALLOC, "vram", 1000, storage=2, category="input")
    (panel,) = view_data(timeline, "t", None, Detail())["panels"]
    assert panel["peak"]["allocated_bytes"] == timeline.peak_bytes.allocated == 900


def test_without_categories_the_modules_are_stacked_and_the_smallest_are_others() -> None:
    timeline = Timeline("plain", measured=True)
    for number in range(30):
        timeline.add(EventKind.ALLOC, "vram", 100 + number, storage=number, label=f"part{number}")
        timeline.add(EventKind.ALLOC, "vram", 1000, storage=100 + number, label=f"model.layers.{number}")
    owners = tier_events(timeline, "vram").owners
    assert owners.grouped_by == "module"
    assert len(owners.groups) == MOST_GROUPS and owners.groups[-1] == "others"
    assert owners.groups[:2] == ["model.layers.*", "part29"]


def test_what_stays_is_stacked_below_what_comes_and_goes() -> None:
    timeline = Timeline("plain", measured=True)
    for number, category in enumerate(("temporary", "odd", "activation", "parameter", "")):
        timeline.add(EventKind.ALLOC, "vram", 100 - number, storage=number, category=category)
    assert tier_events(timeline, "vram").owners.groups == ["parameter", "activation", "temporary", "odd", "not known"]


def test_owners_beyond_the_limit_are_added_up_by_category() -> None:
    timeline = random_run(500, seed=6)
    (panel,) = view_data(timeline, "t", None, Detail(owners=3))["panels"]
    assert panel["owners"]["group"]["n"] == 3 + len(panel["groups"])
    assert max(unpacked(panel["exact"]["owner"])) < 3 + len(panel["groups"])


def test_module_paths_and_stacks_are_told_apart() -> None:
    assert frames_of("model.layers.0") == ["model.layers.0", "model.layers", "model"]
    assert frames_of("f at a.py:1\ng at b.py:2") == ["f at a.py:1", "g at b.py:2"]
    assert module_of("aten.mm", "model.layers.0") == "model.layers.0"
    assert module_of("ring slot", "f at a.py:1") == "ring slot"
    assert module_of("", "f at a.py:1\ng at b.py:2") == "f at a.py:1"


def test_a_freed_part_of_a_segment_leaves_the_rest() -> None:
    segments = Segments()
    segments.add(0, 100, 7)
    segments.add(100, 50, 7)
    segments.add(300, 10, 0)
    segments.remove(90, 30)
    assert segments.rows() == [(0, 90, 7), (120, 30, 7), (300, 10, 0)]
    segments.remove(20, 10)
    assert segments.rows() == [(0, 20, 7), (30, 60, 7), (120, 30, 7), (300, 10, 0)]
    segments.remove(200, 50)
    segments.remove(0, 1000)
    assert segments.rows() == []


def test_lanes_keep_every_busy_second_however_few_spans_are_kept() -> None:
    timeline = Timeline("copies", measured=True)
    for number in range(1000):
        timeline.add(
            EventKind.COPY, "vram", 10, time_s=number / 10, duration_s=0.05, source="ram", label=f"layer{number % 7}"
        )
        timeline.add(EventKind.IDLE, "vram", 0, time_s=number / 10, duration_s=0.001, label="copy")
    copies, idle = lanes(timeline, 100)
    assert (copies.name, copies.kind, len(copies.start_ns)) == ("copy ram → vram", "copy", 100)
    assert int(copies.busy_ns.sum()) == 50_000_000_000 and int(copies.bytes.sum()) == 10_000
    assert int(copies.count.sum()) == 1000 and copies.start_ns[0] == 0
    assert idle.name == "idle vram" and len(idle.label) == 100


def test_a_runs_phases_are_the_spans_of_its_model_and_tokens_are_none() -> None:
    def run(*spans: tuple[str, float]) -> Timeline:
        timeline = Timeline("run", measured=True)
        timeline.add(EventKind.ALLOC, "vram", 100, time_s=0.0, storage=0)
        for label, time_s in spans:  # as they become known: not in order of time
            timeline.add(EventKind.COMPUTE, "vram", 0, time_s=time_s, duration_s=0.5, label=label, stream=0)
            timeline.add(EventKind.COMPUTE, "vram", 0, time_s=time_s, duration_s=0.1, label="layers.0", stream=1)
        return timeline

    told = view_data(run(("backward", 2.0), ("forward", 1.0), ("update", 3.0)), "a run", None, Detail())["phases"]
    assert [(one["name"], one["time_ns"] / 1e9, one["duration_ns"] / 1e9) for one in told] == [
        ("forward", 1, 0.5),
        ("backward", 2, 0.5),
        ("update", 3, 0.5),
    ]
    assert view_data(run(("forward", 1.0), ("forward", 2.0)), "a text", None, Detail())["phases"] == []


def test_without_times_there_are_no_lanes_and_events_are_the_axis() -> None:
    timeline = Timeline("predicted", measured=False)
    timeline.add(EventKind.ALLOC, "vram", 10, storage=0)
    timeline.add(EventKind.COPY, "vram", 10, source="ram", duration_s=1.0)
    view = view_data(timeline, "t", None, Detail())
    assert (view["axis"], view["lanes"]) == ("event", [])


def test_a_failed_request_is_marked_where_it_failed() -> None:
    timeline = random_run(100, seed=7)
    (panel,) = view_data(timeline, "t", None, Detail())["panels"]
    (oom,) = panel["ooms"]
    assert (oom["event"], oom["bytes"], oom["label"]) == (101, 1 << 31, "aten.mm")


def test_the_compute_tier_comes_first() -> None:
    timeline = Timeline("two", measured=True)
    timeline.add(EventKind.ALLOC, "ram", 10, storage=0)
    timeline.add(EventKind.COPY, "disk", 10, source="ram")
    assert tiers_of(timeline) == ["ram"]
    timeline.add(EventKind.ALLOC, "vram", 1, storage=1)
    assert tiers_of(timeline) == ["vram", "ram"]


def test_numbers_survive_packing() -> None:
    values = [0, -1, 1 << 47, -(1 << 50), 3, (1 << 53) - 1]
    assert unpacked(integers(values)) == values
    assert integers([])["n"] == 0


def test_texts_are_one_readable_line() -> None:
    assert plain("a\nb\tc\x00\u202ed\ud800") == "a b c\\u0000\\u202ed\\ud800"
    assert len(plain("x" * 10_000)) == 500
    assert script_json({"a": "</script><!--&"}) == '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
