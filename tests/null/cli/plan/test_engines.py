"""``brim plan --for``: the settings of another engine, printed and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim.cli import main
from brim.errors import BudgetError
from support.planned import LLAMA

CARD = ("--gpu", "RTX 3060", "--seq", "64", "--new-tokens", "16")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "model")


@pytest.mark.parametrize("engine", ["accelerate", "llama.cpp", "vllm"])
def test_the_file_is_what_the_document_has_and_the_command_names_it(
    llama: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "written"
    for _ in range(2):  # its own file is written anew
        assert main(["plan", llama, "--for", engine, *CARD, "--vram", "400MiB", "--output", str(file)]) == 0
        printed = capsys.readouterr().out
    assert main(["plan", llama, "--for", engine, *CARD, "--vram", "400MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert file.read_text() == (document["file"] or f"# by brim\n{document['command']}\n")
    assert (str(file) if document["file"] else document["command"]) in printed.splitlines()[-1]
    assert document["peak_bytes"]["vram"] <= document["machine"]["budget_bytes"]["vram"] == 400 << 20


def test_what_does_not_fit_has_its_exit_code_and_the_least_budget(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", llama, "--for", "accelerate", *CARD, "--vram"]
    assert main([*arguments, "5MiB"]) == BudgetError.exit_code
    least = capsys.readouterr().err.partition("--vram ")[2].partition(",")[0]
    assert main([*arguments, least]) == 0


def test_an_option_without_effect_is_refused(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--for", "accelerate", "--top", "2"]) == 2
    assert "--top was given beside --for.\nIt would have no effect.\n" in capsys.readouterr().err
