"""The rate at which a model's weights come: that of the file they are in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.measure.disk import file_rate
from brim.run import drives
from brim.units import MIB


def write(path: Path, size_bytes: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return path


def test_weights_come_as_fast_as_their_largest_file_does_and_nothing_else_of_the_machine_changes(
    known_machine: Hardware, tmp_path: Path, cache: Path
) -> None:
    largest = write(tmp_path / "model" / "b.safetensors", 65 * MIB)
    drives.remember(known_machine, write(tmp_path / "model" / "a.safetensors", MIB), 1e6)
    drives.remember(known_machine, largest, 123e6)
    found = drives.reading_from(known_machine, tmp_path / "model")
    assert found.link(DISK, RAM).bytes_per_s == 123e6
    assert found.link(RAM, RAM) == known_machine.link(RAM, RAM)
    assert replace(found, links=()) == replace(known_machine, links=())


def test_a_file_is_measured_once_and_again_when_it_was_written_anew(
    known_machine: Hardware, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    asked = []

    def counted(path: Path) -> float | None:
        asked.append(path)
        return file_rate(path)

    monkeypatch.setattr(drives, "file_rate", counted)
    first, second = (drives.reading_from(known_machine, file.parent).link(DISK, RAM) for _ in range(2))
    assert asked == [file] and first == second and first.bytes_per_s > 0
    write(file, 66 * MIB)
    drives.reading_from(known_machine, file.parent)
    assert asked == [file, file]


def kept_earlier(cache: Path, by_s: float) -> None:
    """All rates of files in the cache, as if they had been measured ``by_s`` seconds before they were."""
    for path in cache.rglob("file-rates-*.json"):
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({name: [rates, at_s - by_s] for name, (rates, at_s) in kept.items()}))


@pytest.mark.parametrize(("hours", "is_known"), [(23, True), (25, False), (-2, False)])
def test_a_rate_is_good_for_a_day_and_measured_again_after_it(
    hours: float, is_known: bool, known_machine: Hardware, tmp_path: Path, cache: Path
) -> None:
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    drives.remember(known_machine, file, 123.0)
    kept_earlier(cache, hours * 3600)
    found = drives.reading_from(known_machine, file.parent).link(DISK, RAM).bytes_per_s
    assert (found == 123.0) == is_known
    assert drives.reading_from(known_machine, file.parent).link(DISK, RAM).bytes_per_s == found


def test_a_rate_of_unknown_age_is_measured_again(known_machine: Hardware, tmp_path: Path, cache: Path) -> None:
    """As files of before have them: rates alone."""
    file = write(tmp_path / "model" / "model.safetensors", 65 * MIB)
    drives.remember(known_machine, file, 123.0)
    (path,) = cache.rglob("file-rates-*.json")
    path.write_text(json.dumps({name: rates for name, (rates, _) in json.loads(path.read_text()).items()}))
    assert drives.reading_from(known_machine, file.parent).link(DISK, RAM).bytes_per_s != 123.0


@pytest.mark.parametrize("name", ["nothing", "small", "gone"])
def test_what_cannot_tell_leaves_the_machine_as_it_is_known(
    name: str, known_machine: Hardware, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path / "small" / "model.safetensors", MIB)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "model.safetensors").symlink_to(tmp_path / "no such file")
    assert drives.reading_from(known_machine, tmp_path / name) is known_machine
