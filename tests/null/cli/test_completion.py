"""What a shell is told when a command is to be completed."""

from __future__ import annotations

import pytest

from brim.cli import brim, main


def completed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setenv("_BRIM_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit) as ended:
        brim.main(args=[], prog_name="brim")
    assert ended.value.code == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("brim gen", ["plain,generate"]),
        ("brim generate m --top-", ["plain,--top-p", "plain,--top-k"]),
        ("brim generate ./mod", ["file,./mod"]),
        ("brim estimate smollm", ["plain,smollm2-135m", "plain,smollm3-3b"]),
        ("brim estimate ./con", ["file,./con"]),
        ("brim estimate gpt2 --gpu mi3", ["plain,mi300x", "plain,mi325x", "plain,mi355x"]),
        ("brim train m --data ./t", ["file,./t"]),
        ("brim train m --schedule c", ["plain,constant", "plain,cosine"]),
        ("brim run ./trai", ["file,./trai"]),
    ],
)
def test_commands_options_models_cards_and_files_are_completed(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(line, monkeypatch, capsys) == expected


def test_the_help_tells_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert 'eval "$(_BRIM_COMPLETE=bash_source brim)"' in capsys.readouterr().out
