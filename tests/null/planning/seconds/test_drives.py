"""The rate at which a model's weights are read: that of the file they are in, measured once a day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.measure.disk import file_rates
from brim.planning.seconds import drives, measurement_cache
from brim.units import MIB


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """What looks find, one after the other."""
    coming: list[tuple[float, float]] = []
    monkeypatch.setattr(drives, "file_rates", lambda path: coming.pop(0))
    yield coming
    assert not coming


def write(path: Path, size_bytes: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return path


def test_weights_come_as_fast_as_their_largest_file_does_and_nothing_else_of_the_machine_changes(
    known_machine: Hardware, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model" / "a.safetensors", MIB)
    largest = write(tmp_path / "model" / "b.safetensors", 65 * MIB)
    monkeypatch.setattr(drives, "file_rates", {largest: (123e6, 100e6)}.get)
    found = drives.reading_from(known_machine, tmp_path / "model")
    assert found.link(DISK, RAM).seconds(123 * MIB) == pytest.approx(MIB / 1e6, rel=1e-2)
    assert found.link(DISK, RAM).seconds(16 * MIB) == pytest.approx(16 * MIB / 100e6)
    assert found.link(RAM, RAM) == known_machine.link(RAM, RAM)
    assert replace(found, links=()) == replace(known_machine, links=())


def test_a_file_is_looked_at_anew_when_it_was_written_anew(
    known_machine: Hardware, tmp_path: Path, cache: Path, rates: list[tuple[float, float]]
) -> None:
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    rates += [(2e9, 1e9), (4e9, 3e9)]
    first = drives.reading_from(known_machine, file.parent).link(DISK, RAM)
    assert (first.bytes_per_s, first.single_bytes_per_s) == (2e9, 1e9)
    write(file, 66 * MIB)
    assert drives.reading_from(known_machine, file.parent).link(DISK, RAM).bytes_per_s == 4e9


def test_a_rate_is_measured_once_a_day(
    known_machine: Hardware, tmp_path: Path, cache: Path, rates: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The rates of a shared drive alternate: with several samples a plan that is made twice was not the same plan."""
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    now_s = 1e9
    monkeypatch.setattr(measurement_cache.time, "time", lambda: now_s)
    rates += [(3e9, 2e9), (1e9, 1e9)]
    for later_s, rate in ((0.0, 3e9), (20 * 3600.0, 3e9), (5 * 3600.0, 1e9)):
        now_s += later_s
        assert drives.reading_from(known_machine, file.parent).link(DISK, RAM).bytes_per_s == rate


def test_a_real_file_is_read(known_machine: Hardware, tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    large, small = file_rates(file) or (0.0, 0.0)
    assert large >= small > 0
    link = drives.reading_from(known_machine, file.parent).link(DISK, RAM)
    assert link.bytes_per_s >= link.single_bytes_per_s > 0


@pytest.mark.parametrize("name", ["nothing", "small", "gone"])
def test_what_cannot_tell_leaves_the_machine_as_it_is_known(
    name: str, known_machine: Hardware, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path / "small" / "model.safetensors", MIB)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "model.safetensors").symlink_to(tmp_path / "no such file")
    assert drives.reading_from(known_machine, tmp_path / name) is known_machine
