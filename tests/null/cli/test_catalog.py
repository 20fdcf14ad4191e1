"""``brim models`` and ``brim gpus``: every name of the catalog, as other commands take it."""

import json

import pytest

from brim import catalog
from brim.cli import main


@pytest.mark.parametrize(
    ("command", "names"), [("models", catalog.model_names()), ("gpus", catalog.gpu_names())], ids=["models", "gpus"]
)
def test_the_catalog_is_listed_a_name_a_line(command, names, capsys):
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [next(name for name in names if line.startswith(f"{name}  ")) for line in lines] == list(names)
    assert main([command, "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)[command]] == list(names)


def test_words_pick_lines(capsys):
    assert main(["models", "qwen", "7B"]) == 0
    assert "Qwen/Qwen2.5-7B" in capsys.readouterr().out
    assert main(["gpus", "no such card"]) == 2
    assert "Run brim gpus." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["estimate", "qwen-9-8b"], "Or give a folder with its config.json; `brim models` lists all names."),
        (["plan", "gpt2", "--gpu", "RTX 9090"], "Or give its memory by --vram; `brim gpus` lists all names."),
    ],
)
def test_an_unknown_name_says_where_names_are_listed(arguments, told, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "Nearest: " in error and told in error
