"""What was measured of this machine for plans is measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from brim.core.hardware import DISK, RAM
from brim.measure.probe import probe
from brim.planning.inference.warm_up import most_grown
from brim.planning.seconds import block_timing, drive_contention
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.solver.schedule import COMPUTE, UPDATE, Task, lane_of, simulate


def test_the_loop_around_a_token_takes_milliseconds_at_most_and_is_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s = block_timing.loop_seconds(300, 1)
    assert 0 <= took_s < 0.5
    monkeypatch.setattr(block_timing, "_loop_s", None)
    assert block_timing.loop_seconds(300, 1) == took_s


@pytest.mark.thorough
def test_lanes_beside_the_drive_are_measured_once_and_for_this_machine_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = probe(device="cpu")
    found = drive_contention.beside_drive(here, 1, writes=True)
    assert found is not None
    lanes = {COMPUTE, UPDATE, lane_of(DISK, RAM), lane_of(RAM, DISK)}
    assert {lane for pair in found for lane in pair} == lanes
    assert len(found) == 10 and all(0 < share <= 1 for share in found.values())
    monkeypatch.setattr(drive_contention, "beside", pytest.fail)
    monkeypatch.setattr(drive_contention, "both_ways", pytest.fail)
    assert drive_contention.beside_drive(here, 1, writes=True) == found


def test_lanes_beside_the_drive_are_measured_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        drive_contention, "beside_drive", lambda *_, **__: asked.append(1) or {(COMPUTE, lane_of(DISK, RAM)): 0.5}
    )
    rates = {(COMPUTE, lane_of(DISK, RAM)): 0.9, (UPDATE, lane_of(DISK, RAM)): 0.8}
    shares = drive_contention.SharesWhenAsked(probe(device="cpu"), 1, rates, writes=True)
    resident = simulate([Task(name="one", lane=COMPUTE, seconds=1.0)], shares)
    assert resident.end_s == [1.0] and not asked
    tasks = [Task(name="one", lane=COMPUTE, seconds=1.0), Task(name="two", lane=lane_of(DISK, RAM), seconds=4.0)]
    assert simulate(tasks, shares).end_s[0] == pytest.approx(2.0) and asked == [1]
    assert shares[UPDATE, lane_of(DISK, RAM)] == 0.8 and len(shares) == 2 and asked == [1]


@pytest.mark.thorough
def test_lanes_beside_the_drive_are_measured_again_after_a_week(cache: Path) -> None:
    here = probe(device="cpu")
    drive_contention.beside_drive(here, 1, writes=False)
    (path,) = cache.rglob("beside-drive-*.json")
    ((name, (_, at_s)),) = json.loads(path.read_text()).items()
    shares = []
    for days in (6, 8):
        path.write_text(json.dumps({name: [[0.001, 0.001], at_s - days * 24 * 3600]}))
        shares.append(drive_contention.beside_drive(here, 1, writes=False))
    assert shares[0] is not None and set(shares[0].values()) == {0.001}
    assert shares[1] is not None and min(shares[1].values()) >= 0.05


def test_the_program_s_share_is_the_most_that_was_seen_of_a_model(cache: Path) -> None:
    small, large = nn.Linear(4, 4), nn.Linear(8, 8)
    assert most_grown("train full", small, 64, 100 << 20) == 100 << 20
    assert most_grown("train full", small, 64, 3 << 20) == 100 << 20
    assert most_grown("train full", large, 64, 3 << 20) == 3 << 20


@pytest.mark.parametrize("numbers", [[0.0], [0, 0], [], [1.0, 2.0]])
def test_figures_that_say_nothing_are_measured_anew(cache: Path, numbers: list[float]) -> None:
    Remembered("x", ()).keep({"a": [1.5]})
    [file] = (cache / "brim").glob("x-*.json")
    file.write_text(json.dumps({"a": [numbers, 1.0]}))
    assert Remembered("x", ()).get("a", count=1) is None


@pytest.mark.parametrize(
    "text", ['{"a": [[-1.0], 1.0]}', '{"a": [[NaN], 1.0]}', '{"a": [[1e999], 1.0]}', "\0" * 99, '{"a": {"b": 1}}']
)
def test_figures_that_cannot_be_measured_are_a_damaged_file(cache: Path, text: str) -> None:
    Remembered("x", ()).keep({"a": [1.5]})
    [file] = (cache / "brim").glob("x-*.json")
    file.write_text(text)
    with pytest.warns(UserWarning, match="is damaged; its values are measured again"):
        assert Remembered("x", ()).get("a", count=1) is None
