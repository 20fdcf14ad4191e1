"""The fuzz bench: every reader takes what it should, and its time grows with its input and no faster."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from brim.errors import BrimError
from support.benches import load

fuzz = load("fuzz")


@pytest.mark.parametrize("name", [name for name in fuzz.READERS if name != "gguf conversion"])
def test_what_a_campaign_begins_with_is_read(tmp_path: Path, name: str, cache: Path) -> None:
    target, seeds = fuzz.READERS[name](tmp_path)
    read = 0
    for seed in seeds:
        with contextlib.suppress(BrimError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged cache: each of its files is given the others' content too
            target(seed)
            read += 1
    assert read or name == "log"


def test_every_reader_is_given_large_inputs() -> None:
    grown = {reader for reader, _, _ in fuzz.GROWTHS.values()}
    assert fuzz.READERS.keys() - grown == {"snapshot rows"}  # read as "snapshot", and once more one by one


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("read", "linear"), [(lambda data: data.count(b"a"), True), (lambda data: _square(data), False)]
)
def test_time_that_grows_with_the_square_is_noticed(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], object], linear: bool
) -> None:
    monkeypatch.setitem(fuzz.READERS, "made up", lambda folder: (read, []))
    monkeypatch.setitem(fuzz.GROWTHS, "made up", ("made up", 3_000, lambda count: b"a" * count))
    assert fuzz.growth("made up")["linear"] is linear


def _square(data: bytes) -> int:
    return sum(one == other for one in data for other in data)


@pytest.mark.thorough
@pytest.mark.parametrize("name", fuzz.GROWTHS)
def test_twice_as_much_takes_twice_the_time(name: str, cache: Path) -> None:
    row = fuzz.growth(name, share=0.5)
    assert row["linear"], row
