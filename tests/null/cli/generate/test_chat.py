"""``brim generate`` with a prompt out of a pipe, and as a conversation on a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from brim.cli import generate as generate_chat
from brim.cli import main
from brim.run.generate.request import Request, generate
from support.tiny_model import save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """What a user types, line by line or as exceptions; returns what stdout shows."""

    def type_in(*lines: str | type[BaseException]) -> io.StringIO:
        left: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

        def answer(prompt: str) -> str:
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        shown = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setattr("builtins.input", answer)
        return shown

    return type_in


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.thorough
def test_a_prompt_comes_out_of_a_pipe(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, "two\nlines é\n".encode())
    assert main(["generate", str(folder), "--prompt", "-", "--max-new-tokens", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["token_ids"]
    assert said == generate(Request(model=folder, prompt="two\nlines é", max_new_tokens=4)).token_ids


@pytest.mark.parametrize(("content", "says"), [(b"\n \n", "empty"), (b"t\xe9t\xe9", "not UTF-8")])
def test_a_pipe_without_a_prompt_is_one_clear_error(
    content: bytes, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, content)
    assert main(["generate", "model", "--prompt", "-"]) == 2
    assert says in capsys.readouterr().err


def test_a_conversation_goes_on_until_the_end_of_the_input(
    folder: Path, cache: Path, typed: Callable[..., io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = typed("hi", "", KeyboardInterrupt, "more")
    assert main(["generate", str(folder), "--max-new-tokens", "4", "--context", "100", "--system", "s"]) == 0
    first = generate(Request(model=folder, prompt="hi", max_new_tokens=4, system="s"))
    assert shown.getvalue().startswith(first.text + "\n")
    told = capsys.readouterr().err
    assert "100 tokens of context" in told and "Ctrl-D ends" in told and "per token" in told


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    folder: Path, cache: Path, typed: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = typed("hi", "hi")
    written = generate_chat._write

    def write(text: str) -> None:
        written(text)
        if len(shown.getvalue()) == len(text):  # the first piece
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(generate_chat, "_write", write)
    before = signal.getsignal(signal.SIGINT)
    assert main(["generate", str(folder), "--max-new-tokens", "60", "--context", "300"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    first, second = shown.getvalue().split("\n")[0], shown.getvalue()
    assert len(first) < len(second) / 2, "the second answer is whole"


def test_a_conversation_takes_no_page_no_json_and_no_ranks(
    typed: Callable[..., io.StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    typed()
    for options in (["--json"], ["--html", "page.html"], ["--gpus", "2"], ["--batch", "2"]):
        assert main(["generate", "model", *options]) == 2
        assert "Error" in capsys.readouterr().err
