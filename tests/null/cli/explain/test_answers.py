"""``brim.explain``: what ``brim explain`` prints, of an exception, a message or a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import brim
from brim.cli import main
from brim.core import EventKind, Timeline
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


def run(name: str = "run") -> Timeline:
    timeline = Timeline(name, measured=True)
    timeline.add(EventKind.ALLOC, "vram", 3 << 30, label="<b>\x1b[31m", category="parameter")
    return timeline


def test_a_timeline_is_explained_like_its_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run().to_json()))
    assert brim.explain(run()).lines == brim.explain(path).lines


def test_results_read_as_the_command_prints_them(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run().to_json()))
    assert main(["explain", str(path)]) == 0
    printed = capsys.readouterr().out.rstrip("\n")
    assert run().summary() == brim.explain(path).summary() == printed
    assert "\\u001b[31m" in printed
    assert repr(run()) == "<Timeline: run>"
    assert repr(brim.explain(run())) == "<Explained: run>"
    shown = run()._repr_html_()
    assert shown.startswith("<pre>Measured: 3 GiB allocated") and "&lt;b&gt;" in shown and "<b>" not in shown
    assert not capsys.readouterr().out


def test_a_trace_reads_as_its_simulation():
    def build():
        weight = torch.empty(1 << 20, requires_grad=True)
        return lambda: (weight * 2).sum().backward()

    trace = brim.trace(build, model="doubled")
    assert repr(trace) == "<Trace: doubled>"
    assert trace.summary() == brim.simulate(trace).summary()
    assert trace.summary().startswith("Predicted: ")


def test_the_page_is_that_of_the_command(tmp_path):
    path, page = tmp_path / "run.json", tmp_path / "run.html"
    path.write_text(json.dumps(run().to_json()))
    assert main(["explain", str(path), "--html", str(page)]) == 0
    assert page.read_text() == brim.explain(path).plot()
