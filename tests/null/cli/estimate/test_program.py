"""``brim estimate train.py``: which words are whose, and what is refused before the program runs.

``tests/rehearsal/test_rehearse.py`` has estimates of programs.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest

import brim
from brim.cli import main
from brim.cli.estimate import command
from brim.cli.estimate.program import environment_for
from brim.errors import UsageError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, in the folder that commands run in. No CUDA build of PyTorch is there."""
    monkeypatch.setattr("brim.device.environment.find", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')\n")
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--batch", "2", "--seq=16", "a", "--fused", "-x"], ["--batch", "2", "--seq=16", "a", "--fused", "-x"]),
        (["--", "--batch", "2"], ["--batch", "2"]),
        (["--lr", "3", "--gpu", "RTX 4090", "--json", "b"], ["--lr", "3", "b"]),
        (["--lr", "3", "--", "--gpu", "mine", "--", "--json"], ["--lr", "3", "--gpu", "mine", "--", "--json"]),
        (["--vram=8GiB", "--gpus", "2"], ["--gpus", "2"]),
    ],
)
def test_words_after_a_program_are_its_own(
    program: Path,
    words: list[str],
    own: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(command, "_report_program", reported.append)
    assert main(["estimate", "train.py", *words]) == 0
    assert list(reported[0].arguments) == own
    assert ("Arguments of the program: " in capsys.readouterr().err) == (words[0] != "--")


def test_options_before_a_program_are_estimate_s(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--batch", "3"], "--batch was given for"), (["--lr", "3"], "go after its name")):
        assert main(["estimate", *words, "train.py"]) == 2
        assert message in capsys.readouterr().err


def test_only_programs_take_arguments_and_they_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2", "more"]) == 2
    assert "Only programs take arguments" in capsys.readouterr().err
    assert main(["estimate", "nowhere.py"]) == 2
    assert "There is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "and none is given.\nName one with --gpu."),
        (["--vram", "8GiB"], "and none is given.\nName one with --gpu."),
        (["--gpu", "MI300X"], "The rehearsal device simulates CUDA"),
        (["--gpu", "RTX 4090"], "a download of about 530 MB"),
    ],
)
def test_a_program_that_cannot_be_rehearsed_is_not_run(
    program: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "train.py", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out and "Traceback" not in captured.err


def test_nothing_is_downloaded_that_nobody_allowed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.estimation.simulation import place_of

    questions: list[str] = []
    monkeypatch.setattr("brim.device.environment._fetch", lambda *_: pytest.fail("it was downloaded"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda text, **_: questions.append(text))
    with pytest.raises(UsageError, match="530 MB"):
        environment_for(place_of("RTX 4090", None))
    (question,) = questions
    assert "530 MB" in question and question.endswith("Download it?")


def test_a_function_of_a_file_imports_what_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside_sizes", raising=False)
    (tmp_path / "beside_sizes.py").write_text("WIDTH = 8\n")
    text = """
    import torch
    def build():
        from beside_sizes import WIDTH
        return torch.nn.Linear(WIDTH, WIDTH), torch.zeros(1, WIDTH)
    """
    (tmp_path / "model.py").write_text(textwrap.dedent(text))
    assert brim.estimate(f"{tmp_path / 'model.py'}:build").at_peak_bytes["parameters"] == 4 * (8 * 8 + 8)


@pytest.mark.parametrize("words", [["estimate"], ["plan", "--task", "train", "--gpu", "RTX 4090", "--top", "1"]])
def test_what_the_users_file_prints_is_no_part_of_the_answer(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "printing.py").write_text("""
import torch
print("imported")
class Net(torch.nn.Linear):
    def forward(self, x):
        print("called")
        return super().forward(x).sum()
def build():
    print("built")
    return Net(8, 8), (torch.zeros(2, 8),)
""")
    assert main([*words, f"{tmp_path / 'printing.py'}:build", "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "imported" in captured.err and "built" in captured.err
