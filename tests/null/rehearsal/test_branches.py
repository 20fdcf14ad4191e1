"""What hangs on a number that a line reads is found in the source."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.rehearsal.branches import branches_of, keeping_lines
from brim.rehearsal.made_up import Reads

# `read()` stands for what gives a number; `# <-` marks the branches that hang on it.
STORED = """
def run(best):
    loss = read()
    other = 1
    if other:
        pass
    if loss < best:  # <-
        best = loss
    while best > 3:  # <-
        best = 0
    if loss is not None:
        pass
"""
IN_THE_CONDITION = """
def run(best):
    if (
        read() < best
        and best > 2
    ):
        pass
"""
SUMMED = """
def run(best):
    losses, total, count = [], 0.0, 0
    for _ in range(2):
        losses.append(read())
        count += 1
    total += sum(losses) / count
    if count > 1 or len(losses) > 2:
        pass
    worse = [one for one in losses if one > 3]  # <-
    for one in losses:
        if one > 3:  # <-
            pass
    return 1 if total > 3 else 2  # <-
"""
RETURNED = """
def inner():
    value = read() + 1
    return value
def middle():
    return max(inner(), 0)
def run(best):
    found = {"loss": middle()}
    if best:
        pass
    assert found["loss"] > 0  # <-
"""
ATTRIBUTES = """
class Trainer:
    def __init__(self):
        self.best, self.steps = 0, 0
    def step(self):
        self.last = read()
        self.steps += 1
    def stop(self):
        return False if self.steps > 3 else self.last_is_best()
    def last_is_best(self):
        while self.last > self.best:  # <-
            self.best = self.last
def run(best):
    Trainer().step()
"""
MATCHED = """
def run(best):
    found = (value := read())
    match value:  # <-
        case 1:
            pass
    for _ in range(int(found)):  # <-
        pass
"""
OF_A_MODULE = """
loss = read()
if loss > 3:  # <-
    pass
def elsewhere(loss):
    if loss:
        pass
"""
UNUSED = """
def run(best):
    print(read())
    for step in range(3):
        if step == best:
            pass
"""


def found(text: str, folder: Path) -> tuple[list[int], list[int]]:
    """Lines of the branches that are found, and of those marked."""
    file = folder / "program.py"
    file.write_text(text)

    def read() -> float:
        lines.update((branch.line, branch.reads) for branch in branches_of(sys._getframe().f_back))
        return 1.0

    lines: dict[int, bool] = {}
    names: dict[str, object] = {"read": read}
    exec(compile(text, str(file), "exec"), names)
    if "run" in names:
        names["run"](2.0)  # type: ignore[operator]
    marked = [number for number, line in enumerate(text.splitlines(), 1) if "# <-" in line]
    return sorted(line for line, reads in lines.items() if not reads), marked


@pytest.mark.parametrize(
    "text",
    [STORED, SUMMED, RETURNED, ATTRIBUTES, MATCHED, OF_A_MODULE, UNUSED],
    ids=["stored", "summed", "returned", "attributes", "matched", "of a module", "unused"],
)
def test_branches_that_hang_on_a_number_are_found(text: str, tmp_path: Path) -> None:
    lines, marked = found(text, tmp_path)
    assert lines == marked


def test_a_condition_is_told_though_a_function_beside_it_reads_the_number(tmp_path: Path) -> None:
    text = "def value():\n    return read()\ndef run():\n    if value() or True:\n        return 1\n"
    file, reads = tmp_path / "program.py", Reads()
    file.write_text(text)
    names: dict[str, Any] = {"read": functools.partial(reads.note, "a number", False)}
    exec(compile(text, str(file), "exec"), names)
    names["run"]()
    told = {(one["line"], one["decides"]) for one in reads.to_json() if one["file"] == str(file)}
    assert told == {(4, True), (2, False)}


def test_a_condition_that_reads_it_is_told_as_such(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(IN_THE_CONDITION)
    seen: list[tuple[int, bool]] = []

    def read() -> float:
        seen.extend((branch.line, branch.reads) for branch in branches_of(sys._getframe().f_back))
        return 1.0

    names: dict[str, object] = {"read": read}
    exec(compile(IN_THE_CONDITION, str(file), "exec"), names)
    names["run"](2.0)  # type: ignore[operator]
    assert seen == [(4, True)]


KEEPING = """
def train(net, x):
    out = net(x)
    out = out + x
    return out.mean()

class Trainer:
    def run(self):
        for batch in data:
            loss = train(net, batch)
            loss.backward()
            self.total += loss
            count = 1
            seen.append(count)
            last = loss

def hidden(net, x):
    cache[len(cache)] = out = net(x)
    return 3
"""


@pytest.mark.parametrize(
    ("lines", "kept_by"),
    [
        ([3, 10], ["train.py:12: self.total += loss"]),
        ([10], ["train.py:12: self.total += loss"]),
        ([18, 10], ["train.py:18: cache[len(cache)] = out = net(x)"]),
        ([13], ["train.py:14: seen.append(count)"]),
        ([9], ["train.py:12: self.total += loss"]),
    ],
)
def test_the_lines_that_keep_what_a_line_makes_are_found(
    tmp_path: Path, lines: list[int], kept_by: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(KEEPING)
    assert keeping_lines([f"f at {path}:{line}" for line in lines]) == kept_by


@pytest.mark.parametrize("place", ["", "aten::mm", "f at /nowhere/train.py:3"])
def test_of_what_has_no_source_no_line_is_told(place: str) -> None:
    assert keeping_lines([place]) == []
