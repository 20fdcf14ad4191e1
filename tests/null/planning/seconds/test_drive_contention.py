"""What a processor and a drive leave each other of their speeds is a share of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import UsageError
from brim.planning.seconds.drive_contention import READ, WRITE, beside, both_ways


@pytest.mark.thorough
@pytest.mark.parametrize("way", [READ, WRITE])
def test_each_keeps_a_share_of_its_speed(way: str, tmp_path: Path) -> None:
    compute, drive = beside(way, 1, tmp_path)
    assert 0 < compute <= 1 and 0 < drive <= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_reads_and_writes_share_a_drive(tmp_path: Path) -> None:
    assert all(0 < share <= 1 for share in both_ways(tmp_path))


def test_another_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sideways"):
        beside("sideways", 1, tmp_path)
