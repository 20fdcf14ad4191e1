"""The page as a file: its size, what it allows, what it escapes, what it says of hostile names."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import EventKind, Plan, Timeline
from brim.core.plan import Decision, Promise
from brim.errors import UsageError
from brim.report.html import page as html
from brim.report.html.page import Table, View, page, write
from support.report_page import data_of, unpacked

HOSTILE = "</script><img src=x onerror=\"document.title='ran'\"><!--\u2028\u202e<script>"


def run(*sizes: int, tier: str = "vram", name: str = "a run") -> Timeline:
    """All of ``sizes`` are taken, then given back."""
    made = Timeline(name, measured=True)
    for number, size in enumerate(sizes):
        made.add(EventKind.ALLOC, tier, size, storage=number, time_s=number / 1e3, category="activation")
    for number, size in enumerate(sizes):
        made.add(EventKind.FREE, tier, size, storage=number, time_s=(len(sizes) + number) / 1e3)
    return made


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_the_file_has_the_bytes_that_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert write(path, page([View(timeline=run(100, 200))], title="A report")) == path.stat().st_size
    assert "<title>A report</title>" in path.read_text()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        write(tmp_path / "no such folder" / "report.html", page([], title="A report"))


def test_peaks_are_those_of_the_timeline() -> None:
    timeline = run(1000, 3000, 500)
    (panel,) = data_of(page([View(timeline=timeline)], title="t"))["views"][0]["panels"]
    assert panel["peak"]["allocated_bytes"] == timeline.peak_bytes.allocated == 4500
    assert panel["peak"]["event"] == 2
    assert unpacked(panel["exact"]["bytes"]) == [1000, 3000, 500, -1000, -3000, -500]


def test_each_tier_has_a_picture_and_the_compute_tier_is_first() -> None:
    timeline = run(1000, tier="ram")
    timeline.add(EventKind.ALLOC, "vram", 7)
    panels = data_of(page([View(timeline=timeline)], title="t"))["views"][0]["panels"]
    assert [(panel["tier"], panel["peak"]["allocated_bytes"]) for panel in panels] == [("vram", 7), ("ram", 1000)]


def test_hostile_texts_make_no_element_and_no_attribute(tmp_path: Path) -> None:
    plain = page([View(timeline=run(1000, name="x"), title="x")], title="x", tables=[_table("x")], notes=["x"])
    timeline = run(1000, name=HOSTILE)
    timeline.facts[HOSTILE] = 1.0
    timeline.add(EventKind.ALLOC, "vram", 1, label=HOSTILE, category=HOSTILE, stack=HOSTILE)
    timeline.add(EventKind.OOM, "vram", 1, label=HOSTILE)
    timeline.add(EventKind.ALLOC, HOSTILE, 1)
    view = View(timeline=timeline, title=HOSTILE)
    hostile = page([view], title=HOSTILE, tables=[_table(HOSTILE)], notes=[HOSTILE])
    found, expected = _Tags(), _Tags()
    found.feed(hostile)
    expected.feed(plain)
    assert found.tags == expected.tags
    assert found.attributes == expected.attributes
    assert "\u202e" not in hostile and "\u2028" not in hostile


def _table(text: str) -> Table:
    return Table(title=text, columns=(text,), rows=((text,),), note=text)


def test_only_the_pages_own_script_and_style_are_allowed() -> None:
    document = page([View(timeline=run(1))], title="t")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', document)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1] and "http" not in policy[1]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]
    assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", document)
    assert not re.search(r'(?:src|href)="', document)


def test_the_plans_promise_budget_and_decisions_are_shown() -> None:
    plan = Plan(
        model="m", hardware="h", task="generate", budget_bytes={"vram": 9000},
        decisions=(Decision(technique="weight_streaming", block="layers.0", choice="resident", bytes=5),),
        promise=Promise(peak_bytes={"vram": 8000}), settings={"ring_slots": 3},
    )  # fmt: skip
    data = data_of(page([View(timeline=run(1000), plan=plan)], title="t"))
    lines = data["views"][0]["panels"][0]["lines"]
    assert lines == [{"name": "promised", "bytes": 8000}, {"name": "budget", "bytes": 9000}]
    rows = [row for table in data["tables"] for row in table["rows"]]
    assert ["weight_streaming", "layers.0", "resident", 5] in rows and ["ring_slots", 3] in rows


def test_without_a_plan_the_facts_give_the_lines() -> None:
    timeline = run(1000)
    timeline.facts |= {"promised_bytes.vram": 2000.0, "budget_bytes.vram": 3000.0, "total_bytes": 4000.0}
    lines = data_of(page([View(timeline=timeline)], title="t"))["views"][0]["panels"][0]["lines"]
    assert [(line["name"], line["bytes"]) for line in lines] == [
        ("promised", 2000),
        ("budget", 3000),
        ("device", 4000),
    ]


def test_facts_that_are_no_numbers_draw_no_lines() -> None:
    timeline = run(1000)
    timeline.facts |= {"promised_bytes.vram": float("nan"), "total_bytes": float("inf")}
    timeline.add(EventKind.OOM, "vram", 1, time_s=-1.7e308)
    timeline.add(EventKind.OOM, "vram", 1, time_s=1.7e308)
    assert data_of(page([View(timeline=timeline)], title="t"))["views"][0]["panels"][0]["lines"] == []


def test_cells_that_json_cannot_hold_are_texts() -> None:
    table = Table(title="t", columns=("a",), rows=((float("inf"),), (float("nan"),), (None,), (True,), (0.5,)))
    assert data_of(page([], title="t", tables=[table]))["tables"][0]["rows"] == [
        ["inf"],
        ["nan"],
        [None],
        [True],
        [0.5],
    ]


def test_a_timeline_without_events_makes_a_page() -> None:
    view = data_of(page([View(timeline=Timeline("empty", measured=False))], title="t"))["views"][0]
    assert (view["panels"], view["lanes"]) == ([], [])


def test_a_page_that_grows_too_large_keeps_less_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    timeline = run(*generator.integers(1, 1 << 30, 20_000).tolist())
    whole = page([View(timeline=timeline)], title="t")
    monkeypatch.setattr(html, "MOST_BYTES", len(whole) // 2)
    less = page([View(timeline=timeline)], title="t")
    assert len(less) <= len(whole) // 2
    peaks = [data_of(document)["views"][0]["panels"][0]["peak"] for document in (whole, less)]
    assert peaks[0] == peaks[1]


def test_a_long_table_keeps_what_the_page_shows_and_says_so() -> None:
    rows = tuple((step, 1.0 / step) for step in range(1, 500_001))
    losses = Table(title="Loss", columns=("step", "loss"), rows=rows, note="A note.", spread=True)
    blocks = Table(title="Blocks", columns=("n",), rows=tuple((number,) for number in range(1_001)))
    short = Table(title="Short", columns=("n",), rows=blocks.rows[:1_000])
    document = page([], title="t", tables=[losses, blocks, short])
    assert len(document) < 1_000_000
    spread, first, whole = data_of(document)["tables"]
    steps = [step for step, _ in spread["rows"]]
    assert (len(steps), steps[0], steps[-1]) == (1_000, 1, 500_000)
    assert set(np.diff(steps)) == {500, 501}
    assert spread["note"] == "A note. 1,000 of 500,000, evenly spread."
    assert (first["rows"][-1], first["note"]) == ([999], "The first 1,000 of 1,001.")
    assert (len(whole["rows"]), whole["note"]) == (1_000, "")


def test_many_tables_of_long_names_fit_into_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_BYTES", 1_000_000)
    rows = tuple((f"{number}{'<' * 600}",) for number in range(1_000))
    tables = [Table(title=f"t{number}", columns=("name",), rows=rows) for number in range(10)]
    document = page([View(timeline=run(1))], title="t", tables=tables)
    assert len(document) <= 1_000_000
    found = data_of(document)["tables"]
    assert [table["title"] for table in found if table["title"] != "Facts"] == [f"t{number}" for number in range(10)]
    assert found[0]["note"] == f"The first {len(found[0]['rows'])} of 1,000."


_WHOLE = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-1, 5)
_EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(EventKind),
            "tier": st.sampled_from(["vram", "ram", "", "\ud800"]),
            "bytes": _WHOLE,
            "time_s": st.floats(),
            "duration_s": st.floats(),
            "address": _WHOLE,
            "storage": _WHOLE,
            "stream": _WHOLE,
            "label": st.text(),
            "category": st.sampled_from(["", "parameter", "<b>"]),
            "stack": st.text(),
        }
    ),
    max_size=12,
)


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(events=_EVENTS, timed=st.booleans())
def test_no_event_whatever_it_says_breaks_the_page(events: list[dict], timed: bool) -> None:
    timeline = Timeline("any", measured=True)
    for number, event in enumerate(events):
        if timed:  # or hardly any run would have lanes
            event = event | {"time_s": float(number)}
        timeline.add(**event)
    document = page([View(timeline=timeline)], title="t")
    document.encode()
    (view,) = data_of(document)["views"]
    assert view["events"] == len(events)
    for panel in view["panels"]:
        assert panel["events"] == len(unpacked(panel["exact"]["event"]))
