"""The four nouns survive JSON unchanged, and refuse what they do not know."""

import json

import pytest

from brim.core import (
    Category,
    Decision,
    Event,
    EventKind,
    Hardware,
    Link,
    Op,
    Phase,
    Plan,
    Promise,
    Storage,
    Tier,
    Timeline,
    Trace,
)
from brim.errors import FormatError, UsageError


def hardware() -> Hardware:
    return Hardware(
        name="two cores",
        compute="ram",
        tiers=(
            Tier(name="ram", capacity_bytes=24 << 30, bytes_per_s=1.5e10),
            Tier(name="disk", capacity_bytes=1 << 40),
        ),
        links=(Link(source="disk", target="ram", bytes_per_s=3e9, latency_s=1e-4),),
        flops_per_s={"float32": 1e11},
        source="measured",
    )


def trace() -> Trace:
    return Trace(
        model="tiny",
        target="cpu",
        ops=(Op(name="aten.mm", module="layers.0", phase=Phase.FORWARD, step=0, at=1, flops=8),),
        storages=(
            Storage(id=0, bytes=64, category=Category.PARAMETER, module="layers.0", born=0),
            Storage(id=1, bytes=32, category=Category.TEMPORARY, module="layers.0", born=2, died=3),
        ),
        step_starts=(1,),
        notes={"routing": "balanced"},
    )


def plan() -> Plan:
    return Plan(
        model="tiny",
        hardware="two cores",
        task="generate",
        budget_bytes={"ram": 100},
        decisions=(Decision(technique="weight_streaming", block="layers.0", choice="resident", bytes=64),),
        promise=Promise(peak_bytes={"ram": 90}, step_s=0.5, bound_s=0.4, limited_by="disk -> ram"),
        settings={"ring_slots": 2},
    )


def timeline() -> Timeline:
    made = Timeline("run", measured=True, facts={"peak_rss_bytes": 12.0})
    made.add(EventKind.ALLOC, "ram", 64, storage=0, label="layers.0")
    made.add(EventKind.COPY, "ram", 64, source="disk", time_s=0.5, duration_s=0.25, label="layers.0")
    made.add(EventKind.ALLOC, "ram", 32, storage=1)
    made.add(EventKind.FREE, "ram", 64, storage=0)
    made.add(EventKind.ALLOC, "vram", 1000)
    return made


@pytest.mark.parametrize("make", [hardware, trace, plan, timeline])
def test_a_noun_is_the_same_after_json_text_and_after_a_file(make, tmp_path):
    noun = make()
    text = json.dumps(noun.to_json())
    assert type(noun).from_json(json.loads(text)) == noun
    (tmp_path / "noun.json").write_text(text)
    assert type(noun).read(tmp_path / "noun.json") == noun


@pytest.mark.parametrize("make", [hardware, trace, plan, timeline])
@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d | {"surprise": 1},
        lambda d: d | {"version": 99},
        lambda d: d | {"kind": "Other"},
        lambda d: {k: v for i, (k, v) in enumerate(d.items()) if i != 2},
        lambda d: [d],
        lambda d: None,
        lambda d: d | {list(d)[2]: 17.5},
    ],
    ids=["unknown key", "version", "kind", "missing key", "list", "null", "wrong type"],
)
def test_a_damaged_document_is_refused(make, damage):
    with pytest.raises(FormatError):
        type(make()).from_json(damage(make().to_json()))


def test_unknown_keys_are_refused_at_depth_and_named():
    document = plan().to_json()
    document["decisions"][0]["chioce"] = "resident"
    with pytest.raises(FormatError, match=r"decisions\[0\].*\n.*chioce"):
        Plan.from_json(document)


@pytest.mark.parametrize("content", [None, "", "{", "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_noun_is_a_format_error(content, tmp_path):
    path = tmp_path / "noun.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError):
        Plan.read(path)


def test_hardware_names_what_it_has_when_asked_for_something_else():
    assert hardware().tier("ram").capacity_bytes == 24 << 30
    assert hardware().link("disk", "ram").bytes_per_s == 3e9
    with pytest.raises(UsageError, match="ram"):
        hardware().tier("vram")
    with pytest.raises(UsageError, match="disk -> ram"):
        hardware().link("ram", "vram")


def test_timeline_iterates_as_events_and_adds_up():
    events = list(timeline())
    assert len(timeline()) == 5
    assert events[1] == Event(
        kind=EventKind.COPY,
        tier="ram",
        bytes=64,
        time_s=0.5,
        duration_s=0.25,
        source="disk",
        label="layers.0",
    )
    assert timeline().peak_bytes("ram") == 96
    assert timeline().peak_bytes("vram") == 1000
    assert timeline().peak_bytes("disk") == 0
    assert timeline().peak_bytes("ram", segments=True) == 0
    assert timeline().copied_bytes("disk", "ram") == 64
    indices, texts = timeline().texts("label")
    assert [texts[i] for i in indices] == ["layers.0", "layers.0", "", "", ""]


@pytest.mark.parametrize(
    "damage",
    [
        {"bytes": [1, 2, 3]},
        {"kind": [99] * 5},
        {"tier": [7] * 5},
        {"tier": [-1] * 5},
        {"bytes": [1 << 80] * 5},
        {"time_s": ["x"] * 5},
        {"time_s": [0.0] * 4 + [float("nan")]},
        {"duration_s": [0.0] * 4 + [float("-inf")]},
        {"duration_s": [0.0] * 4 + [1e300]},
        {"time_s": [10**400] * 5},
    ],
)
def test_timeline_columns_are_checked(damage):
    document = timeline().to_json()
    document["columns"] |= damage
    with pytest.raises(FormatError):
        Timeline.from_json(document)


@pytest.mark.parametrize("fact", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "-" + "9" * 400])
def test_facts_of_a_timeline_are_finite(fact):
    text = json.dumps(timeline().to_json() | {"facts": {"context_bytes": 0.5}}).replace("0.5}", fact + "}", 1)
    assert fact in text
    with pytest.raises(FormatError, match="context_bytes"):
        Timeline.from_json(json.loads(text))


def test_plan_choices_by_technique():
    assert plan().choices("weight_streaming") == {"layers.0": "resident"}
    assert plan().choices("checkpointing") == {}


def test_events_added_as_columns_are_those_added_one_by_one():
    one_by_one, at_once = timeline(), timeline()
    for size in (1, 2):
        one_by_one.add(EventKind.ALLOC, "ram", size, time_s=0.5, label="new" if size == 2 else "")
    numbers = {"bytes": [1, 2], "time_s": [0.5, 0.5]}
    at_once.extend([0, 0], numbers, {"tier": ([0, 0], ["ram"]), "label": ([0, 1], ["", "new"])})
    assert list(at_once) == list(one_by_one)
    with pytest.raises(ValueError, match="lengths"):
        at_once.extend([0, 0], {"bytes": [1]}, {})


def test_copies_too_small_for_several_requests_at_once_are_made_one_after_the_other() -> None:
    link = Link(
        source="disk", target="ram", bytes_per_s=200.0, single_bytes_per_s=100.0, latency_s=0.1, chunk_bytes=50,
        concurrency=2,
    )  # fmt: skip
    assert [link.seconds(count) for count in (0, 25, 50, 75, 100, 400)] == [0.1, 0.3, 0.5, 0.75, 0.6, 2.1]
    alike = Link(source="ram", target="vram", bytes_per_s=200.0, latency_s=0.1)
    assert [alike.seconds(count) for count in (0, 25, 400)] == [0.1, 0.225, 2.1]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), -1e-300])
def test_amounts_are_numbers_from_0_on(value):
    plan = Plan(
        model="m", hardware="h", task="train", budget_bytes={"ram": 8}, decisions=(), promise=Promise(peak_bytes={})
    )
    document = plan.to_json()
    for wrong in (
        document | {"budget_bytes": {"ram": value}},
        document | {"promise": document["promise"] | {"step_s": value}},
        document | {"decisions": [{"technique": "t", "block": "", "choice": "c", "bytes": value}]},
    ):
        with pytest.raises(FormatError):
            Plan.from_json(wrong)
    assert Plan.from_json(document) == plan


def test_a_plan_tells_what_was_measured_above_it() -> None:
    promise = Promise(peak_bytes={"ram": 3 << 20, "vram": 5 << 20, "disk": 1 << 20})
    budget = {"ram": 4 << 20, "vram": 6 << 20}
    plan = Plan(model="m", hardware="h", task="train", budget_bytes=budget, decisions=(), promise=promise)
    assert plan.exceeded({"ram": 3 << 20, "vram": 5 << 20, "disk": 1 << 20}) == []
    assert plan.exceeded({"ram": 5 << 20, "vram": (5 << 20) + 1, "disk": 2 << 20}) == [
        "5 MiB of RAM were measured: 1 MiB above the budget of 4 MiB.",
        "5 MiB of VRAM were measured: 1 B above the promise of 5 MiB.",
        "2 MiB of DISK were measured: 1 MiB above the promise of 1 MiB.",
    ]
