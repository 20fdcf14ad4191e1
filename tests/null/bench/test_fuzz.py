"""The fuzz bench: every reader takes what it should, and its time grows with its input and no faster."""

from __future__ import annotations

import contextlib
import warnings
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


@pytest.mark.parametrize(("power", "linear"), [(1, True), (2, False)])
def test_time_that_grows_with_the_square_is_noticed(
    monkeypatch: pytest.MonkeyPatch, power: int, linear: bool
) -> None:
    monkeypatch.setitem(fuzz.READERS, "made up", lambda folder: (len, []))
    monkeypatch.setitem(fuzz.GROWTHS, "made up", ("made up", 3_000, lambda count: b"a" * count))
    monkeypatch.setattr(fuzz, "_cpu_s", lambda target, data: (len(data) / 3_000) ** power)
    assert fuzz.growth("made up")["linear"] is linear


@pytest.mark.thorough
@pytest.mark.parametrize("name", fuzz.GROWTHS)
def test_twice_as_much_takes_twice_the_time(name: str, cache: Path) -> None:
    row = fuzz.growth(name, share=0.5)
    assert row["linear"], row
