"""Names, messages and tokens that a terminal would obey reach none, whatever command prints them."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from pathlib import Path

import pytest
import rich.table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from brim.cli.console import Console
from brim.processes import python_command
from support.terminal import on_terminal
from support.tiny_model import save_llama

# Writes the clipboard (OSC 52), sets the title, clears the screen (by ESC and by C1), turns text around.
ORDERS = "\x1b]52;c;aGk=\x07\x1b]0;t\x07\x1b[2J\x9b2J\u202e"
HOSTILE = f"a{ORDERS}[red]z"
ALLOWED = re.compile(rb"\x1b\[(?:[0-9;]*m|\?25[lh]|[0-9]*[AK]|2K)")  # rich's colours and bars
TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 23.64 GiB of which 1.2 GiB is free."


def is_harmless(written: bytes) -> bool:
    """Whether colours and bars are all that a terminal obeys in it."""
    text = ALLOWED.sub(b"", written).decode()
    return not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, programs and recordings with such names in them."""
    here = tmp_path_factory.mktemp("names")
    save_llama(here / HOSTILE, hidden=64, layers=1)
    tokens = {"<s>": 0, **{f"{ORDERS}{number}": number for number in range(1, 300)}}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<s>"))
    save_llama(here / "talks", hidden=64, layers=1)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<s>").save_pretrained(
        here / "talks"
    )
    save_llama(here / "template", hidden=64, layers=1)
    (here / "template" / "chat_template.jinja").write_text(f"{{{{ raise_exception({ORDERS!r}) }}}}")
    for name in ("kind", "wrong"):
        (here / name).mkdir()
    (here / "kind" / "config.json").write_text(json.dumps({"model_type": HOSTILE, "architectures": [HOSTILE]}))
    (here / "wrong" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": "' + json.dumps(HOSTILE)[1:-1] + '"}'
    )
    (here / "model.py").write_text(
        f"import torch\nNAME = {HOSTILE!r}\n"
        "def make():\n    model = torch.nn.Sequential()\n    model.add_module(NAME, torch.nn.Linear(512, 512))\n"
        "    return model, (torch.ones(2, 512),)\n"
        "def fails():\n    raise ValueError(NAME)\n"
    )
    (here / f"{HOSTILE}.py").write_text(f"raise SystemExit({HOSTILE!r})\n")
    (here / f"{HOSTILE}.log").write_text(f"{HOSTILE} torch.OutOfMemoryError: {TOLD} {HOSTILE}\n")
    frames = [{"filename": f"/{HOSTILE}.py", "line": 1, "name": HOSTILE}]
    event = {"action": "alloc", "addr": 1 << 20, "size": 1 << 20, "stream": 0, "time_us": 1, "frames": frames}
    events = [
        event,
        event | {"action": "segment_alloc", "size": 2 << 20},
        event | {"action": "oom", "device_free": 0},
    ]
    with (here / f"{HOSTILE}.pickle").open("wb") as file:
        pickle.dump(
            {"segments": [], "device_traces": [[events[1], events[0], events[2]]], "allocator_settings": {}}, file
        )
    (here / "text.txt").write_text("some text to learn, and no more. " * 20)
    return here


WALK = [
    "HOSTILE", "--HOSTILE", "estimate HOSTILE?", "estimate HOSTILE --seq 16", "estimate HOSTILE --seq 16 --json",
    "estimate HOSTILE --seq 16 --gpu HOSTILE", "estimate kind",
    "estimate wrong", "estimate model.py:make", "estimate model.py:fails", "estimate model.py:HOSTILE",
    "estimate HOSTILE.py", "estimate HOSTILE.py --gpu H100", "estimate HOSTILE --precision HOSTILE",
    "estimate HOSTILE --gpus 2 --gpu H100 --seq 16", "estimate text.txt", "plan HOSTILE --seq 16 --ram 900MiB",
    "plan kind", "plan HOSTILE --ram HOSTILE", "plan model.py:make --ram 900MiB", "generate kind --prompt a",
    "generate HOSTILE?", "generate HOSTILE --prompt a --max-new-tokens 2 --no-chat",
    "generate talks --prompt a --max-new-tokens 3 --no-chat", "generate template --prompt a --chat",
    "generate HOSTILE --plan HOSTILE.log --prompt a", "generate HOSTILE --prompts HOSTILE?",
    "train HOSTILE --data text.txt --output out-HOSTILE --seq 8 --batch 1 --steps 1",
    "train HOSTILE --data HOSTILE?", "train kind --data text.txt --output o",
    "train HOSTILE --data HOSTILE.log --output o --seq 8 --optimizer HOSTILE", "run HOSTILE?",
    "run --mode HOSTILE x", "rehearse --gpu HOSTILE HOSTILE.py", "rehearse --gpu H100 HOSTILE?",
    "rehearse --gpu H100 --vary HOSTILE HOSTILE.py", "rehearse --gpu H100 --python HOSTILE? HOSTILE.py",
    "explain HOSTILE?", "explain HOSTILE.log", "explain HOSTILE.pickle", "explain HOSTILE.pickle HOSTILE.pickle",
    "explain HOSTILE.py", "explain HOSTILE.log --html HOSTILE.html", "probe --device HOSTILE",
    "explain HOSTILE.pickle --what-if HOSTILE",
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("words", WALK)
def test_no_command_lets_a_name_reach_the_terminal(
    words: str, folder: Path, probed_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, written = on_terminal([word.replace("HOSTILE", HOSTILE) for word in words.split()])
    assert is_harmless(written), written
    assert b"Traceback" not in written and code != 99, written.decode()


@pytest.mark.thorough
def test_a_file_gets_the_tokens_as_they_are(folder: Path, probed_home: Path) -> None:
    words = ["generate", folder / "talks", "--prompt", "a", "--max-new-tokens", "3", "--no-chat"]
    done = subprocess.run(python_command("-m", "brim", *words), capture_output=True, cwd="/", env=os.environ)
    assert ORDERS.encode() in done.stdout, done.stderr


def test_the_search_finds_orders() -> None:
    for written in (ORDERS, *ORDERS, "\x1b[3;4H", "\x1b]8;;http://x\x1b\\"):
        if written.isprintable():
            continue
        assert not is_harmless(written.encode())
    assert is_harmless("\x1b[1;31mred\x1b[0m\r\n\x1b[2K\x1b[1Aüber".encode())


def test_texts_on_a_console_are_no_markup_and_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    table = rich.table.Table(f"[red]{ORDERS}", title="[/red]")
    table.add_row(f"[/]{ORDERS}")
    console = Console()
    console.print(table)
    console.print("[/x]", ORDERS, style="bold")
    with console.status("[/x]") as status:
        status.update("[/y]")
    told = capsys.readouterr().out
    assert all(text in told for text in ("[red]", "[/]", "[/red]", "[/x]")) and is_harmless(told.encode())


def test_all_commands_print_by_that_console() -> None:
    source = Path(__file__).parents[3] / "src" / "brim"
    users = [
        path
        for path in source.rglob("*.py")
        if re.search(r"rich\.console|rich import print", path.read_text("utf-8"))
    ]
    assert users == [source / "cli" / "console.py"]
