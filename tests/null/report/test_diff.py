"""What changed between two runs, and what one run held at its peak."""

from __future__ import annotations

from brim.core import EventKind, Timeline
from brim.report.explain import diff, figures, live_at_peak, summary
from brim.units import MIB


def run(*blocks: tuple[str, str, int], name: str = "run", freed: int = 0) -> Timeline:
    """A run that allocates blocks of a category, a stack and a size, after ``freed`` bytes that are freed again."""
    made = Timeline(name, measured=True)
    made.add(EventKind.SEGMENT_ALLOC, "vram", 100 * MIB, address=0)
    if freed:
        made.add(EventKind.ALLOC, "vram", freed, storage=99, category="temporary", stack="gone at x.py:1")
        made.add(EventKind.FREE, "vram", freed, storage=99)
    for number, (category, stack, size) in enumerate(blocks):
        label = stack.split("\n")[0]
        made.add(
            EventKind.ALLOC, "vram", size, storage=number, category=category, stack=stack, label=label, time_s=1.0
        )
    for number, (_, _, size) in enumerate(blocks):
        made.add(EventKind.FREE, "vram", size, storage=number)
    return made


CONV = "forward at conv.py:3\nforward at model.py:9"
STEP = "step at adam.py:4\nmain at train.py:2"


def test_the_peak_is_broken_down_and_adds_up():
    timeline = run(("activation", CONV, 3 * MIB), ("activation", CONV, 2 * MIB), ("", STEP, MIB), freed=5 * MIB)
    found = summary(timeline)
    assert (found.allocated_bytes, found.reserved_bytes, found.time_s) == (6 * MIB, 100 * MIB, 1.0)
    assert [(one.name, one.bytes, one.count) for one in found.by_category] == [
        ("activation", 5 * MIB, 2),
        ("", MIB, 1),
    ]
    assert [one.name for one in found.by_stack] == [CONV, STEP]
    assert [one.name for one in found.by_module] == ["forward at conv.py:3", ""]
    assert len(live_at_peak(timeline).rows) == 3
    assert summary(timeline, most=1).by_label == summary(timeline).by_label[:1]


def test_blocks_without_storage_and_address_are_all_of_the_peak():
    made = Timeline("loose", measured=True)
    made.add(EventKind.ALLOC, "ram", 500 * MIB, label="a")
    made.add(EventKind.ALLOC, "ram", 64 * MIB, label="b")
    made.add(EventKind.ALLOC, "ram", MIB, storage=0, label="known")
    made.add(EventKind.ALLOC, "ram", 2 * MIB, address=0, label="at 0")
    found = summary(made)
    assert found.allocated_bytes == 567 * MIB
    assert {one.name: one.bytes for one in found.by_label} == {
        "a": 500 * MIB,
        "b": 64 * MIB,
        "known": MIB,
        "at 0": 2 * MIB,
    }


def test_a_predicted_stack_is_the_module_and_nothing_held_is_no_error():
    timeline = run(("activation", "model.layers.0.mlp", MIB))
    assert summary(timeline).by_module[0].name == "model.layers.0.mlp"
    empty = summary(Timeline("empty", measured=False))
    assert (empty.event, empty.allocated_bytes, empty.by_category) == (-1, 0, ())


def test_what_grew_came_and_went_is_told_the_most_first():
    before = run(("activation", CONV, 3 * MIB), ("gradient", "old at a.py:1", 2 * MIB), name="before")
    after = run(("activation", CONV, 9 * MIB), ("gradient", "new at b.py:1", 2 * MIB), name="after")
    found = diff(before, after, before_facts={"pinned_bytes": 5.0}, after_facts={"pinned_bytes": 7.0})
    assert (found.before, found.after) == ("before", "after")
    (category,) = found.by_category  # the gradients are as large as before
    assert (category.name, category.grown_bytes) == ("activation", 6 * MIB)
    assert [(one.name, one.grown_bytes) for one in found.by_stack] == [
        (CONV, 6 * MIB),
        ("new at b.py:1", 2 * MIB),
        ("old at a.py:1", -2 * MIB),
    ]
    assert (found.new_stacks, found.gone_stacks) == (1, 1)
    numbers = {one.name: (one.before, one.after) for one in found.figures}
    assert numbers["allocated_peak_bytes"] == (5 * MIB, 11 * MIB)
    assert numbers["pinned_bytes"] == (5.0, 7.0)
    assert not found.by_segment_size
    assert found.to_json()["by_category"][0]["after_bytes"] == 9 * MIB


def test_a_run_does_not_differ_from_itself():
    timeline = run(("activation", CONV, 3 * MIB))
    found = diff(timeline, timeline)
    assert not (found.by_category or found.by_stack or found.by_label or found.by_segment_size)
    assert all(one.before == one.after for one in found.figures)


def test_figures_of_trees_are_put_side_by_side():
    left = {"busy_s": 1.0, "idle_by_cause": {"copy": 0.5}, "name": "a", "odd": [1, {"x": 2}], "ok": True}
    right = {"busy_s": 2.0, "idle_by_cause": {"cpu": 0.25}}
    found = {one.name: (one.before, one.after) for one in figures(left, right)}
    assert found == {"busy_s": (1.0, 2.0), "idle_by_cause.copy": (0.5, None), "idle_by_cause.cpu": (None, 0.25)}


def test_lists_of_named_figures_are_put_side_by_side_by_name():
    """A profile's kernels and copies: their order is that of their times, which is another one in each run."""
    left = {
        "kernels": [{"name": "gemm", "count": 3, "seconds": 2.0}, {"name": "add", "count": 1, "seconds": 1.0}],
        "copies": [
            {"kind": "H2D", "unified": False, "count": 1, "bytes": 8, "seconds": 1.0, "sizes": {"< 4 KiB": 1}},
            {"kind": "H2D", "unified": True, "count": 2, "bytes": 9, "seconds": 1.0, "sizes": {}},
        ],
    }
    right = {
        "kernels": [{"name": "add", "count": 1, "seconds": 4.0}, {"name": "gemm", "count": 3, "seconds": 2.5}],
        "copies": [{"kind": "H2D", "unified": False, "count": 5, "bytes": 80, "seconds": 3.0, "sizes": {}}],
    }
    found = {one.name: (one.before, one.after) for one in figures(left, right)}
    assert found == {
        "kernels.add.count": (1, 1),
        "kernels.add.seconds": (1.0, 4.0),
        "kernels.gemm.count": (3, 3),
        "kernels.gemm.seconds": (2.0, 2.5),
        "copies.H2D.count": (1, 5),
        "copies.H2D.bytes": (8, 80),
        "copies.H2D.seconds": (1.0, 3.0),
        "copies.H2D.sizes.< 4 KiB": (1, None),
        "copies.H2D unified.count": (2, None),
        "copies.H2D unified.bytes": (9, None),
        "copies.H2D unified.seconds": (1.0, None),
    }


def test_gaps_are_put_side_by_side_by_what_was_waited_for():
    def gap(label: str, seconds: float) -> dict[str, object]:
        return {"start_s": 5.0, "duration_s": seconds, "causes": {"cpu": seconds}, "label": label}

    left = {"gaps": [gap("aten::item", 3.0), gap("Python", 2.0), gap("aten::item", 1.0)], "empty": []}
    right = {"gaps": [gap("aten::item", 2.0), gap("aten::mm", 1.0)]}
    right["kernels"] = [{"name": "gemm", "count": 3}]
    found = {one.name: (one.before, one.after) for one in figures(left, right)}
    assert list(found)[-1] == "kernels.gemm.count"  # what is new stays with its kind
    assert found == {
        "kernels.gemm.count": (None, 3),
        "gaps.aten::mm.duration_s": (None, 1.0),
        "gaps.aten::item.duration_s": (4.0, 2.0),
        "gaps.Python.duration_s": (2.0, None),
    }


def test_of_long_lists_those_are_told_whose_time_changed_most():
    left = {"waits": [{"label": f"a{n}", "cause": "cpu", "seconds": 1.0 * n, "count": 1} for n in range(40)]}
    right = {"waits": [{"label": f"a{n}", "cause": "cpu", "seconds": 2.0 * n, "count": 1} for n in range(40)]}
    found = [one.name for one in figures(left, right) if one.name.endswith("seconds")]
    assert found == [f"waits.a{n} (cpu).seconds" for n in range(39, 31, -1)]
