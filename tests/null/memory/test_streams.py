"""Host memory for a GPU is touched by processors of its node."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from brim.memory.streams import near, processors_near

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity to set")
GPU = "0000:3b:00.0"


def system(folder: Path, node: str, listed: str) -> Path:
    """What Linux says of a GPU of that node, and of that node's processors."""
    device, place = folder / "bus/pci/devices" / GPU, folder / f"devices/system/node/node{node}"
    device.mkdir(parents=True)
    place.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (place / "cpulist").write_text(f"{listed}\n")
    return folder


@pytest.mark.parametrize(
    ("node", "listed", "processors"),
    [("1", "4", {4}), ("0", "0-2,8", {0, 1, 2, 8}), ("-1", "0-3", set()), ("0", "", set()), ("x", "0-3", set())],
)
def test_processors_of_a_node(node: str, listed: str, processors: set[int], tmp_path: Path) -> None:
    assert processors_near(GPU, system(tmp_path, node, listed)) == processors
    assert processors_near("0000:00:00.0", tmp_path) == set()


def test_within_the_thread_is_there_and_then_where_it_was(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor is allowed")
    one = min(before)
    with near(GPU, system(tmp_path, "1", str(one))):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    with pytest.raises(KeyError), near(GPU, tmp_path):
        raise KeyError
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("listed", ["", "100000", None])
def test_nothing_changes_where_the_node_is_of_no_use(listed: str | None, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    every = ",".join(map(str, before))
    with near(GPU, system(tmp_path, "0", every if listed is None else listed)), near(None):
        assert os.sched_getaffinity(0) == before


def test_other_threads_stay_where_they_are(tmp_path: Path) -> None:
    before, found = os.sched_getaffinity(0), []
    go, done = threading.Event(), threading.Event()

    def look() -> None:
        go.wait()
        found.append(os.sched_getaffinity(0))
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    with near(GPU, system(tmp_path, "1", str(min(before)))):
        go.set()
        done.wait()
    thread.join()
    assert found == [before]
