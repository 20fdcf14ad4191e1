"""Which way is the fastest, by how many times the memory a model needs; and int8 or 16 bits."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from brim.errors import UsageError
from brim.planning.opening import open_subject
from brim.planning.precision_table import rows_of, shown
from brim.planning.regimes import BOTH, PAGING, PROCESSOR, STREAMING, Regimes, regimes
from brim.planning.request import Machine, Request, Row, machine_of
from support.planned import LLAMA

pytestmark = pytest.mark.slow  # every plan is a search and several traces


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Request:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return Request(model=path, gpu="RTX 3060", ram="8GiB", seq=64, new_tokens=16)


@pytest.fixture(scope="module")
def found(asked: Request) -> Regimes:
    return regimes(asked, machine_of(asked))


def slower_link(machine: Machine, factor: float) -> Machine:
    links = tuple(dataclasses.replace(one, bytes_per_s=one.bytes_per_s / factor) for one in machine.hardware.links)
    return dataclasses.replace(machine, hardware=dataclasses.replace(machine.hardware, links=links))


def test_all_ways_are_equal_or_ordered_as_they_must_be(found: Regimes) -> None:
    assert [point.ratio for point in found.points] == [1.0, 1.5, 2.0, 4.0]
    first = found.points[0].token_s
    assert first[STREAMING] == pytest.approx(first[PAGING], rel=0.03)  # it fits: nothing moves
    for point in found.points[1:]:
        seconds: Any = point.token_s
        assert seconds[BOTH] <= min(seconds[STREAMING], seconds[PROCESSOR]) * (1 + 1e-9)
        assert seconds[STREAMING] < seconds[PAGING]
    streamed = [point.token_s[STREAMING] for point in found.curve]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(streamed))  # type: ignore[operator]
    assert len({point.token_s[PROCESSOR] for point in found.points}) == 1


def test_crossings_are_where_the_lines_cross(found: Regimes) -> None:
    for crossing in found.crossings:
        before = [p for p in found.curve if p.ratio < crossing.ratio][-1]
        after = next(p for p in found.curve if p.ratio > crossing.ratio)
        assert before.token_s[crossing.first] <= before.token_s[crossing.second]  # type: ignore[operator]
        assert after.token_s[crossing.first] >= after.token_s[crossing.second]  # type: ignore[operator]


def test_the_answer_follows_the_machine(asked: Request, found: Regimes) -> None:
    assert "rule of thumb" in found.answer()
    slow = regimes(asked, slower_link(machine_of(asked), 8))
    ways = (STREAMING, PROCESSOR)
    lost = [c.ratio for c in slow.crossings if (c.first, c.second) == ways]
    assert len(lost) == 1
    assert f"{lost[0]:.2f} times the VRAM" in slow.answer()
    assert all(c.ratio > lost[0] for c in found.crossings if (c.first, c.second) == ways)


def test_json_table_and_picture_tell_the_same(found: Regimes) -> None:
    document = json.loads(json.dumps(found.to_json()))
    assert document["points"][3]["token_s"][STREAMING] == found.points[3].token_s[STREAMING]
    assert document["answer"] == found.answer()
    text = io.StringIO()
    Console(file=text, width=200).print(found.table())
    assert all(way in text.getvalue() for way in found.ways) and "4 x" in text.getvalue()
    picture = ElementTree.fromstring(found.svg())
    lines = [node for node in picture.iter() if node.tag.endswith("polyline")]
    assert len(lines) >= len(found.ways)
    assert not re.search(r"href|script|nan|inf", found.svg())


def test_without_a_gpu_streaming_is_compared_with_the_page_cache(asked: Request) -> None:
    here = dataclasses.replace(asked, gpu=None, ram=None, seq=16, new_tokens=4)
    found = regimes(here, machine_of(here), ratios=(1, 1.15))
    assert found.ways == [STREAMING, PAGING]
    assert "no GPU" in found.answer()
    assert found.points[1].token_s[STREAMING] is not None


def test_a_ratio_below_one_is_refused(asked: Request) -> None:
    with pytest.raises(UsageError):
        regimes(asked, machine_of(asked), ratios=(0.5,))


def test_int8_moves_half_of_16_bits_and_wins_where_the_link_is_slow(asked: Request) -> None:
    def in_both(machine: Machine) -> list[Row]:
        return rows_of([open_subject(asked, machine, precision) for precision in ("fp16", "int8")])

    rows = in_both(machine_of(asked))
    (layers,) = (row for row in rows if row.kind.endswith("layers.*"))
    assert layers.count == LLAMA["num_hidden_layers"]
    assert layers.forms["int8"].bytes < 0.55 * layers.forms["fp16"].bytes
    assert layers.streamed == "int8"
    fast = in_both(slower_link(machine_of(asked), 1e-4))
    (quick,) = (row for row in fast if row.kind.endswith("layers.*"))
    assert quick.forms["int8"].move_s < quick.forms["int8"].compute_s
    text = io.StringIO()
    Console(file=text, width=200).print(shown(rows))
    assert "int8" in text.getvalue()
    assert json.loads(json.dumps(layers.to_json()))["count"] == layers.count
