"""``brim.explain``: what ``brim explain`` prints, of an exception, a message or a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import brim
from brim.cli import main
from brim.errors import FormatError, UsageError

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 22.65 GiB memory in use. Of the allocated memory 21.00 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)


def raised() -> torch.OutOfMemoryError:
    def forward() -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    try:
        forward()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError


def test_an_exception_is_explained_with_its_stack():
    explained = brim.explain(raised())
    assert explained.body["numbers_bytes"]["tried"] == 2 << 30
    assert explained.body["source"] == "OutOfMemoryError"
    assert "in the phase: forward" in explained.lines[0]


@pytest.mark.parametrize("text", [MESSAGE, f"torch.OutOfMemoryError: {MESSAGE}", f"step 3\n{MESSAGE}\nend"])
def test_a_text_is_explained(text):
    assert brim.explain(text).body["numbers_bytes"]["tried"] == 2 << 30


def test_a_file_is_explained_as_the_command_does(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(f"torch.OutOfMemoryError: {MESSAGE}\n")
    explained = [brim.explain(log), brim.explain(str(log))]
    assert main(["explain", str(log)]) == 0
    assert explained[0].lines == explained[1].lines == capsys.readouterr().out.splitlines()
    assert main(["explain", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(explained[0].body))


def test_a_snapshot_is_replayed_under_other_settings(tmp_path):
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert brim.explain(path, ["expandable_segments:True"]).body["kind"] == "snapshot"


@pytest.mark.parametrize("source", [raised(), MESSAGE + "\n", MESSAGE])
def test_only_a_snapshot_can_be_replayed(source, tmp_path, monkeypatch):
    with pytest.raises((UsageError, FormatError)):
        brim.explain(source, ["best"])


def test_other_exceptions_texts_and_files_are_refused(tmp_path):
    with pytest.raises(FormatError, match="in ValueError"):
        brim.explain(ValueError("shape"))
    with pytest.raises(FormatError, match="in the text"):
        brim.explain("loss 1.5\nloss 1.4")
    with pytest.raises(FormatError, match=r"missing\.log"):
        brim.explain(Path("missing.log"))
    with pytest.raises(FormatError, match=r"missing\.log"):
        brim.explain("missing.log")
