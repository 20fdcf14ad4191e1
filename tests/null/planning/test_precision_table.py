"""int8 or 16 bits, for each kind of block."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from brim.planning.opening import open_subject
from brim.planning.precision_table import rows_of, shown
from brim.planning.request import Machine, Request, Row, machine_of
from support.planned import LLAMA


def slower_link(machine: Machine, factor: float) -> Machine:
    links = tuple(dataclasses.replace(one, bytes_per_s=one.bytes_per_s / factor) for one in machine.hardware.links)
    return dataclasses.replace(machine, hardware=dataclasses.replace(machine.hardware, links=links))


@pytest.mark.thorough
def test_int8_moves_half_of_16_bits_and_wins_where_the_link_is_slow(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    wider = {"hidden_size": 2048, "intermediate_size": 8192}  # int8 has twice the kernels: their launches take 1.5 ms
    config.write_text(json.dumps(LLAMA | wider))
    asked = Request(model=config, gpu="RTX 3060", ram="8GiB", seq=64, new_tokens=16)

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
