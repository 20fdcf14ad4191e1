"""Attacks on every command: arguments, files, streams, signals, disks, clocks, containers and locales.

    python bench/attacks.py                  # all; a line each for what did not hold, then a table
    python bench/attacks.py --only files     # of one kind, or whose name contains this
    python bench/attacks.py --each-kind 3    # so many of each kind, evenly spread within it
    python bench/attacks.py --write          # the counts to measurements/attacks.json; with --only, of those kinds

PyTorch is loaded once; each attack is a forked process with a folder, a home and a cache of its own. It holds when
the command ends in time, without a traceback, by an exit code that the attack allows, with every file of the user's
as it was, and says what it must: an error that names what was wrong, the command's answer, or that it was
interrupted. A signal must have been sent before the command ended. Attacks that take mounts or another user need
root, and are counted as left out without it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ABOVE_BUDGET = 3  # as ``brim.errors`` has it; brim is imported later, after its cache's place is chosen
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "measurements" / "attacks.json"
SECONDS = 10.0  # of the clock, without what it waited for a processor that others used
_SHORT = ("--seq", "16")
CPU_SECONDS = 10  # of its own time
REFUSED, DONE, EITHER = (1, 2, 3), (0,), (0, 1, 2, 3)
_ERROR = r"Error: .{10}|Nothing fits\.|does not fit|can't find '__main__'"  # the last is Python's own
SIGINT_CODE = 128 + signal.SIGINT
_ENDED = {SIGINT_CODE: "Interrupted.", 143: "Terminated."}
_ANSWERS = {  # what each command prints when it is done
    "generate": "promised and measured",
    "train": "promised and measured",
    "plan": "per token|per step",
    "estimate": "allocated",
    "explain": r"tried +2 GiB|No allocation failed",
    "probe": "compute tier",
    "run": "built by the program",
    "rehearse": "process",
    "models": "llama",
    "gpus": "H100",
    "--help": "Usage: brim",
    "--version": r"brim \d",
}


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A command line, what is done to it, and the ends that are allowed.

    Attributes:
        codes: The exit codes that are allowed.
        error_names: A pattern of what an error must name; needed where ``codes`` have that of an error.
        answers: A pattern of what a success must print; the command's own answer if empty.
        before: Called in the child with the attack's folder.
        signal_after_s: The signal, and the seconds after which it is sent.
        fresh: A process of its own that imports everything, as a shell starts it.
    """

    kind: str
    name: str
    arguments: Sequence[str]
    codes: tuple[int, ...] = EITHER
    error_names: str = ""
    answers: str = ""
    before: Callable[[Path], object] | None = None
    signal_after_s: tuple[int, float] | None = None
    root: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if set(self.codes) & set(REFUSED) and not self.error_names:
            raise ValueError(f"{self.name}: it may be refused, and does not say what the error must name")

    @property
    def answer(self) -> str:
        """The pattern of what a success prints."""
        return self.answers or _ANSWERS[self.arguments[0]]


@dataclass
class Outcome:
    code: int
    text: str
    problem: str = ""
    files: dict[str, str] = field(default_factory=dict)


# -- what is attacked


def make_world(world: Path) -> None:
    """A tiny model, its GGUF-like kin, data, a plan, recordings and logs."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from safetensors.torch import load_file, save_file

    from support import synthetic_snapshot
    from support.tiny_model import save_llama

    torch.set_num_threads(1)
    model = save_llama(world / "model", layers=2, hidden=64)
    (world / "data.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 40)
    (world / "prompts.txt").write_text("one\ntwo\n")
    (world / "oom.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
        "GiB "
        "of which 1.00 GiB is free.\n"
    )
    synthetic_snapshot.write(world / "run.pickle", 300)
    synthetic_snapshot.write(world / "long.pickle", 500_000)
    (world / "build.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.ones(1, 4)\n"
        "print('built by the program')\n"
    )
    (world / "empty").write_bytes(b"")
    (world / "noise").write_bytes(bytes(range(256)) * 16)
    damages = {
        "no-config": lambda d: (d / "config.json").unlink(),
        "config-empty": lambda d: (d / "config.json").write_bytes(b""),
        "config-list": lambda d: (d / "config.json").write_text("[]"),
        "config-deep": lambda d: (d / "config.json").write_text("[" * 100_000),
        "config-nan": lambda d: _edit(d / "config.json", hidden_size=float("nan")),
        "config-negative": lambda d: _edit(d / "config.json", num_hidden_layers=-1),
        "config-zero": lambda d: _edit(d / "config.json", num_attention_heads=0),
        "config-text": lambda d: _edit(d / "config.json", hidden_size="64"),
        "config-huge": lambda d: _edit(d / "config.json", vocab_size=10**12),
        "config-other": lambda d: _edit(d / "config.json", model_type="nothing"),
        "config-code": lambda d: _edit(d / "config.json", model_type="own", auto_map={"AutoModel": "x.Y"}),
        "config-null": lambda d: _edit(d / "config.json", hidden_act=None),
        "config-utf16": lambda d: (d / "config.json").write_bytes((d / "config.json").read_text().encode("utf-16")),
        "no-weights": lambda d: (d / "model.safetensors").unlink(),
        "weights-empty": lambda d: (d / "model.safetensors").write_bytes(b""),
        "weights-cut": lambda d: os.truncate(d / "model.safetensors", 5000),
        "weights-long": lambda d: os.truncate(d / "model.safetensors", (d / "model.safetensors").stat().st_size + 4),
        "weights-header": lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62)),
        "weights-loop": lambda d: _replace(d / "model.safetensors", lambda p: p.symlink_to(p.name)),
        "weights-pipe": lambda d: _replace(d / "model.safetensors", os.mkfifo),
        "weights-folder": lambda d: _replace(d / "model.safetensors", Path.mkdir),
        "weights-device": lambda d: _replace(d / "model.safetensors", lambda p: p.symlink_to("/dev/zero")),
        "weights-pickle": lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "weights-fewer": lambda d: save_file(
            dict(list(load_file(d / "model.safetensors").items())[1:]), d / "model.safetensors"
        ),
        "tokenizer-empty": lambda d: (d / "tokenizer.json").write_bytes(b""),
        "tokenizer-pipe": lambda d: _replace(d / "tokenizer.json", os.mkfifo),
        "no-tokenizer": lambda d: [path.unlink() for path in d.glob("tokenizer*")],
        "config-pipe": lambda d: _replace(d / "config.json", os.mkfifo),
        "generation-bad": lambda d: (d / "generation_config.json").write_text("{"),
        "index-outside": lambda d: _replace(
            d / "model.safetensors",
            lambda p: (d / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../../etc/passwd"}}'),
        ),
    }
    for name, damage in damages.items():
        folder = world / "damaged" / name
        shutil.copytree(model, folder)
        damage(folder)
    ggufs = world / "gguf"
    ggufs.mkdir()
    text = struct.pack("<Q", 3) + b"key"
    for name, content in {
        "count": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<IIQ", 9, 8, 1 << 60),
        "tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "magic": b"GGML" + bytes(64),
        "empty": b"",
        "plain": b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        "string": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63),
    }.items():
        (ggufs / f"{name}.gguf").write_bytes(content)
    os.mkfifo(world / "pipe")
    (world / "loop").symlink_to("loop")
    (world / "nowhere").symlink_to("missing")
    (world / "folder").mkdir()
    for path in world.rglob("*"):  # transformers lets nobody else read weights
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


# -- the attacks


def attacks(world: Path) -> Iterator[Attack]:
    yield from _of_arguments(world)
    yield from _of_files(world)
    yield from _of_plans(world)
    yield from _of_data(world)
    yield from _of_templates(world)
    yield from _of_sizes(world)
    yield from _of_streams(world)
    yield from _of_signals(world)
    yield from _of_disks(world)
    yield from _of_machines(world)
    yield from _of_clocks_and_locales(world)


def _good(world: Path) -> dict[str, list[str]]:
    model = str(world / "model")
    return {
        "generate": ["generate", model, "--prompt", "hi", "--max-new-tokens", "2"],
        "train": ["train", model, "--data", str(world / "data.jsonl"), "--output", "out", "--steps", "1", *_SHORT],
        "plan": ["plan", model, "--task", "generate"],
        "estimate": ["estimate", model, *_SHORT],
        "explain": ["explain", str(world / "oom.log")],
        "probe": ["probe"],
        "run": ["run", str(world / "build.py")],
    }  # fmt: skip


# Of a number: never meant. Whoever takes one of these does something that nobody asked for.
_NO_NUMBERS = ("abc", "", "nan", "-1", "1.5.5", "0x10", "1e999", "\N{FULLWIDTH DIGIT ONE}x")
_NO_BYTES = ("abc", "", "-1", "nan", "1e999GiB", "12 parsecs", "-5%", "nan%", "\N{ARABIC-INDIC DIGIT ONE}GiBB")


def _of_arguments(world: Path) -> Iterator[Attack]:
    import click

    from brim.cli import COMMANDS, brim

    context = click.Context(brim)
    for command in COMMANDS:
        found = brim.get_command(context, command)
        assert found is not None
        good = _good(world).get(command, [command])
        for parameter in found.params:
            if not isinstance(parameter, click.Option) or parameter.is_flag or parameter.is_eager:
                continue
            option = parameter.opts[-1]
            for value in _nasty(parameter):
                if command == "run":
                    arguments = ["run", option, value, *good[1:]]
                else:
                    arguments = [*good, f"{option}={value}"]
                yield Attack(
                    kind="arguments", name=f"{command} {option}={value!r:.24}", arguments=arguments, codes=REFUSED,
                    error_names=f"{re.escape(option)}|{_spoken(option)}",
                )  # fmt: skip
        takes_nothing = command in ("probe", "models", "gpus")
        yield Attack(
            kind="arguments", name=f"{command} of nothing", arguments=[command],
            codes=DONE if takes_nothing else REFUSED, error_names="Missing (argument|option)|Give (a|one)|Name a",
        )  # fmt: skip
        is_the_programs = command == "run"
        yield Attack(
            kind="arguments", name=f"{command} --unknown", arguments=[*good, "--unknown"],
            codes=DONE if is_the_programs else REFUSED, error_names="--unknown",
        )  # fmt: skip
        yield Attack(
            kind="arguments", name=f"{command} ''", arguments=[command, ""],
            codes=DONE if command in ("models", "gpus") else REFUSED,  # every name contains it
            error_names="''|unexpected extra argument|no such file|empty|is a directory"
            "|cannot (read|open|run|use|find)|Missing option|Give --prompt|can't find '__main__'",
        )  # fmt: skip


def _spoken(option: str) -> str:
    """The option as a sentence names it: a batch, the new tokens."""
    return option.removeprefix("--").replace("-", "[ -]")


def _nasty(option: Any) -> Sequence[str]:
    import click

    kind = option.type
    if option.multiple or option.nargs != 1:
        return ()
    if isinstance(kind, click.Choice):
        return ("bogus",)
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        limited = getattr(kind, "min", None) is not None and kind.min >= 0
        return (*_NO_NUMBERS[:2], *(("nan", "-1") if limited else ("nan",) if "Int" in type(kind).__name__ else ()))
    if kind.name.startswith("bytes"):
        return _NO_BYTES[:6]
    if kind.name == "auto or number":
        return ("0", "-1", "abc")
    return ()


def _of_files(world: Path) -> Iterator[Attack]:
    good = _good(world)
    for folder in sorted((world / "damaged").iterdir()):
        fine = {"no-tokenizer": ("plan", "estimate"), "tokenizer-empty": ("plan", "estimate")}.get(folder.name, ())
        weights = folder.name.startswith(("weights", "no-weights", "index", "generation"))
        for command in ("generate", "train", "estimate", "plan"):
            arguments = [str(folder) if word == str(world / "model") else word for word in good[command]]
            lenient = (
                command in fine or (command in ("estimate", "plan") and weights) or folder.name == "generation-bad"
            )
            lenient |= command in ("estimate", "plan") and folder.name in ("config-huge",)
            yield Attack(
                kind="files",
                name=f"{command} {folder.name}",
                arguments=arguments,
                codes=EITHER if lenient else REFUSED,
                error_names=re.escape(folder.name),
            )
    for file in sorted((world / "gguf").iterdir()):
        for command in ("generate", "plan"):
            arguments = [str(file) if word == str(world / "model") else word for word in good[command]]
            yield Attack(kind="files", name=f"{command} {file.name}", arguments=arguments, codes=REFUSED,
                         error_names=re.escape(file.name))  # fmt: skip
    for name in ("pipe", "loop", "nowhere", "folder", "empty", "noise", "missing"):
        path = str(world / name)
        yield Attack(kind="files", name=f"explain {name}", arguments=["explain", path], codes=REFUSED,
                     error_names=re.escape(path))  # fmt: skip
        yield Attack(
            kind="files",
            name=f"explain --diff {name}",
            arguments=["explain", str(world / "run.pickle"), "--diff", path],
            codes=REFUSED,
            error_names=re.escape(path),
        )
        if name == "pipe":  # a program may come out of one, as in python <(...): it is waited for, as by python
            yield Attack(
                kind="files",
                name="run pipe, and Ctrl-C",
                arguments=["run", path],
                codes=(130,),
                signal_after_s=(signal.SIGINT, 1.0),
            )
        elif name != "empty":  # an empty program does nothing, which shows nothing
            yield Attack(
                kind="files",
                name=f"run {name}",
                arguments=["run", path],
                codes=REFUSED,
                error_names=f"{re.escape(path)}|null bytes|can't find '__main__'",
            )
        for command in ("generate", "train", "estimate", "plan"):
            arguments = [path if word == str(world / "model") else word for word in good[command]]
            yield Attack(
                kind="files",
                name=f"{command} {name}",
                arguments=arguments,
                codes=REFUSED,
                error_names=re.escape(path),
            )
        yield Attack(
            kind="files",
            name=f"generate --prompts {name}",
            arguments=["generate", str(world / "model"), "--prompts", path],
            codes=REFUSED,
            error_names=re.escape(path),
        )
        yield Attack(
            kind="files",
            name=f"train --data {name}",
            arguments=[path if word == str(world / "data.jsonl") else word for word in good["train"]],
            codes=REFUSED,
            error_names=re.escape(path),
        )
    for html in ("/dev/full", str(world / "folder"), str(world / "missing" / "a.html"), "/proc/1/x.html"):
        yield Attack(
            kind="files",
            name=f"explain --html {html[-12:]}",
            arguments=["explain", str(world / "run.pickle"), "--html", html],
            codes=REFUSED,
            error_names=f"{re.escape(html)}|{re.escape(str(Path(html).parent))}' is not a folder",
        )
        yield Attack(
            kind="files",
            name=f"plan --output {html[-12:]}",
            arguments=[*good["plan"], "--output", html],
            codes=REFUSED,
            error_names=f"{re.escape(html)}|{re.escape(str(Path(html).parent))}' is not a folder",
        )


def _plan_of(world: Path) -> dict[str, Any]:
    path = world / "plan.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _of_plans(world: Path) -> Iterator[Attack]:
    plan = _plan_of(world)
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "negative budget": lambda p: p["plan"]["budget_bytes"].update(ram=-1),
        "no budget": lambda p: p["plan"]["budget_bytes"].clear(),
        "huge budget": lambda p: p["plan"]["budget_bytes"].update(ram=1 << 62),
        "negative peak": lambda p: p["plan"]["promise"]["peak_bytes"].update(ram=-5),
        "nan seconds": lambda p: p["plan"]["promise"].update(step_s=float("nan")),
        "endless seconds": lambda p: p["plan"]["promise"].update(step_s=float("inf")),
        "negative decision": lambda p: p["plan"]["decisions"][0].update(bytes=-1),
        "unknown choice": lambda p: p["plan"]["decisions"][0].update(choice="nowhere"),
        "unknown technique": lambda p: p["plan"]["decisions"][0].update(technique="magic"),
        "unknown block": lambda p: p["plan"]["decisions"][0].update(block="model.layers.99"),
        "no decisions": lambda p: p["plan"].update(decisions=[]),
        "twice": lambda p: p["plan"]["decisions"].append(p["plan"]["decisions"][0]),
        "negative slots": lambda p: p["plan"]["settings"].update(ring_slots=-1),
        "many slots": lambda p: p["plan"]["settings"].update(ring_slots=1 << 40),
        "negative batch": lambda p: p["plan"]["settings"].update(batch=-1),
        "zero prompt": lambda p: p["plan"]["settings"].update(prompt_tokens=0),
        "no settings": lambda p: p["plan"]["settings"].clear(),
        "other task": lambda p: p["plan"].update(task="train"),
        "other machine": lambda p: p["hardware"].update(name="another"),
        "other version": lambda p: p.update(brim="9"),
        "format": lambda p: p.update(version=99),
        "unknown key": lambda p: p.update(more=1),
        "text for bytes": lambda p: p["plan"]["budget_bytes"].update(ram="8GiB"),
        "bool for bytes": lambda p: p["plan"]["budget_bytes"].update(ram=True),
        "negative rate": lambda p: p["hardware"]["links"][0].update(bytes_per_s=-1.0),
        "no links": lambda p: p["hardware"].update(links=[]),
    }
    for name, change in changes.items():

        def write(folder: Path, change: Callable[[dict[str, Any]], object] = change) -> None:
            document = json.loads(json.dumps(plan))
            change(document)
            (folder / "plan.json").write_text(json.dumps(document))

        arguments = [
            "generate",
            str(world / "model"),
            "--prompt",
            "hi",
            "--max-new-tokens",
            "2",
            "--plan",
            "plan.json",
        ]
        yield Attack(
            kind="plans",
            name=name,
            arguments=arguments,
            codes=EITHER if name in ("zero prompt", "no links", "negative rate", "no settings") else REFUSED,
            error_names=r"plan\.json|Cannot use the plan|A budget of",
            before=write,
        )


def _of_data(world: Path) -> Iterator[Attack]:
    contents = {
        "not json": b"{not json}\n",
        "list": b"[1, 2]\n",
        "number": b"7\n",
        "deep": b"[" * 100_000 + b"\n",
        "no text": b'{"other": 1}\n',
        "text of number": b'{"text": 5}\n',
        "empty text": b'{"text": ""}\n',
        "empty messages": b'{"messages": []}\n',
        "message of text": b'{"messages": ["hello"]}\n',
        "roles": b'{"messages": [{"role": 5, "content": "x"}]}\n',
        "latin-1": '{"text": "é"}\n'.encode("latin-1"),
        "nul": b'{"text": "\\u0000"}\n',
        "surrogate": b'{"text": "\\ud800"}\n',
        "mixed": b'{"text": "a"}\n{"messages": [{"role": "user", "content": "x"}]}\n',
        "only blank": b"\n\n\n",
        "huge number": b'{"text": 1' + b"0" * 5000 + b"}\n",
    }
    good = _good(world)["train"]
    for name, content in contents.items():

        def write(folder: Path, content: bytes = content) -> None:
            (folder / "bad.jsonl").write_bytes(content)

        arguments = ["bad.jsonl" if word == str(world / "data.jsonl") else word for word in good]
        odd = name in ("nul", "surrogate", "empty text")
        yield Attack(
            kind="data", name=f"train {name}", arguments=arguments, codes=EITHER if odd else REFUSED, before=write,
            error_names=r"bad\.jsonl",
        )  # fmt: skip
        arguments = ["generate", str(world / "model"), "--prompts", "bad.jsonl", "--max-new-tokens", "1"]
        yield Attack(
            kind="data", name=f"prompts {name}", arguments=arguments, codes=REFUSED, before=write,
            error_names=r"bad\.jsonl",
        )  # fmt: skip
    for name, prompt in {
        "empty": "",
        "blank": " ",
        "surrogate": "\udcff",
        "long": "word " * 20_000,
        "control": "\x1b[2J",
    }.items():
        yield Attack(
            kind="data",
            name=f"prompt {name}",
            arguments=["generate", str(world / "model"), "--prompt", prompt, "--max-new-tokens", "1"],
            error_names="prompt",
        )


def _of_templates(world: Path) -> Iterator[Attack]:
    for name, template in {
        "a huge range": "{% for n in range(10 ** 18) %}x{% endfor %}",
        "ranges in ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "a huge text": "{{ 'x' * 10 ** 9 }}",
        "a huge number": "{{ 9 ** (9 ** 9) }}",
        "a long text": "{{ 'x' * 14000000 }}",
        "division by zero": "{{ 1 // 0 }}",
        "no syntax": "{% for %}",
        "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "an attack": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "raises": "{{ raise_exception('no') }}",
        "nothing": "",
    }.items():

        def write(folder: Path, template: str = template) -> None:
            shutil.copytree(world / "model", folder / "model")
            (folder / "model" / "chat_template.jinja").write_text(template)
            (folder / "chat.jsonl").write_text(
                '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
            )

        for command, more in (
            ("generate", ["--prompt", "hi", "--max-new-tokens", "1"]),
            ("train", ["--data", "chat.jsonl", "--output", "out", "--steps", "1", *_SHORT]),
        ):
            yield Attack(
                kind="templates",
                name=f"{command} {name}",
                arguments=[command, "model", *more],
                codes=EITHER if name in ("an attack", "nothing") else REFUSED,
                error_names="template",
                before=write,
            )


def _of_sizes(world: Path) -> Iterator[Attack]:
    """Numbers that are meant by nobody: refused while there is still memory."""
    model = str(world / "model")
    for command, arguments in {
        "generate": ["generate", model, "--prompt", "hi"],
        "train": _good(world)["train"],
        "estimate": ["estimate", model],
        "plan generate": ["plan", model],
        "plan train": ["plan", model, "--task", "train"],
    }.items():
        for option in ("--batch", "--seq", "--max-new-tokens", "--new-tokens", "--steps", "--lr", "--warmup"):
            for value in ("1000000000", "1000000000000000000", "1" + "0" * 400):
                if (option in ("--steps", "--lr", "--warmup")) != (command == "train" and option != "--batch"):
                    continue
                bounded = option in ("--batch", "--seq") and command != "generate"
                codes = REFUSED if bounded and len(value) < 100 else EITHER
                if option == "--steps":
                    continue  # it is taken, and goes on for as long
                yield Attack(
                    kind="sizes",
                    name=f"{command} {option} 1e{len(value) - 1}",
                    arguments=[*arguments, option, value],
                    codes=codes,
                    error_names=f"{option}|{_spoken(option)}|token|sequence|memory|fits|budget",
                )

    many = [
        "generate",
        model,
        "--prompts",
        str(world / "prompts.txt"),
        "--batch",
        "1000000000",
        "--max-new-tokens",
        "1",
    ]
    yield Attack(kind="sizes", name="generate --prompts --batch 1e9", arguments=many, codes=DONE)
    large = ["plan", "llama-3.2-1b", "--batch", "1000000"]
    yield Attack(kind="sizes", name="plan llama-3.2-1b --batch 1e6", arguments=large, codes=REFUSED,
                 error_names="batch|fits")  # fmt: skip


def _redirected(descriptor: int, path: str, flags: int) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)

    return before


def _closed(*descriptors: int) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return before


def _of_streams(world: Path) -> Iterator[Attack]:
    quick = {
        "explain": ["explain", str(world / "oom.log")],
        "explain snapshot": ["explain", str(world / "run.pickle")],
        "probe": ["probe"],
        "help": ["--help"],
        "version": ["--version"],
        "generate": [*_good(world)["generate"], "--json"],
        "estimate": _good(world)["estimate"],
    }
    answers = {"generate": '"token_ids"'}  # the table goes to stderr, which may be gone
    for name, arguments in quick.items():
        yield Attack(
            kind="streams",
            name=f"{name} >/dev/full",
            arguments=arguments,
            codes=(1,),
            error_names="output",
            before=_redirected(1, "/dev/full", os.O_WRONLY),
        )
        yield Attack(kind="streams", name=f"{name} >&-", arguments=arguments, codes=(1,),
                     error_names="output", before=_closed(1))  # fmt: skip
        yield Attack(
            kind="streams",
            name=f"{name} 2>/dev/full",
            arguments=arguments,
            codes=DONE,
            answers=answers.get(name, ""),
            before=_redirected(2, "/dev/full", os.O_WRONLY),
        )
        yield Attack(
            kind="streams", name=f"{name} 2>&- <&-", arguments=arguments, codes=DONE, before=_closed(2, 0),
            answers=answers.get(name, ""),
        )  # fmt: skip
    for content, name in (
        (b"", "nothing"),
        (b"\x80", "a byte"),
        (b"\x00" * 70_000, "zeros"),
        (b"{" * 70_000, "braces"),
    ):

        def pipe(folder: Path, content: bytes = content) -> None:
            (folder / "in").write_bytes(content)
            os.dup2(os.open(folder / "in", os.O_RDONLY), 0)

        yield Attack(
            kind="streams", name=f"explain - of {name}", arguments=["explain", "-"], codes=REFUSED, before=pipe,
            error_names="stdin|standard input",
        )  # fmt: skip
        yield Attack(
            kind="streams",
            name=f"generate --prompt - of {name}",
            arguments=["generate", str(world / "model"), "--prompt", "-", "--max-new-tokens", "1"],
            error_names="prompt|stdin|standard input",
            before=pipe,
        )


def _of_signals(world: Path) -> Iterator[Attack]:
    """Commands that take longer than any of the moments, in a process that has everything loaded and in a new one."""
    model, data = str(world / "model"), str(world / "data.jsonl")
    long = {
        "generate": ["generate", model, "--prompt", "hi", "--max-new-tokens", "100000"],
        "train": ["train", model, "--data", data, "--output", "out", "--steps", "1000000", *_SHORT],
        "estimate": ["estimate", "llama-3-70b", "--seq", "2048"],
        "plan": ["plan", "llama-3.2-1b", "--task", "train", "--gpu", "RTX 4090"],
        "explain": ["explain", str(world / "long.pickle")],
        "probe": ["probe"],
    }
    for command, arguments in long.items():
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            for after_s, fresh in ((0.1, False), (0.4, False), (0.8, True), (2.0, True)):
                yield Attack(
                    kind="signals",
                    name=f"{command} {signal.Signals(number).name} after {after_s} s" + ", everything new" * fresh,
                    arguments=arguments, codes=(code,), signal_after_s=(number, after_s), fresh=fresh,
                    before=_without_cache,
                )  # fmt: skip
    yield Attack(
        kind="signals", name="generate SIGPIPE", arguments=_good(world)["generate"], codes=(0, 1),
        error_names="output", signal_after_s=(signal.SIGPIPE, 0.1),
    )  # fmt: skip
    yield Attack(
        kind="signals", name="generate SIGCHLD", arguments=_good(world)["generate"], codes=DONE,
        signal_after_s=(signal.SIGCHLD, 0.1),
    )  # fmt: skip


def _without_cache(folder: Path) -> None:
    """Nothing that was measured before, so that every command has something to do."""
    shutil.rmtree(folder / "cache")


def _mounted(kind: str, options: str, place: str = "cache") -> Callable[[Path], None]:
    """A file system of the child's own, and full: it has left the mount namespace of its parent."""

    def before(folder: Path) -> None:
        (folder / place).mkdir(exist_ok=True)
        subprocess.run(
            ["mount", "-t", kind, "-o", options, kind, str(folder / place)], check=True, capture_output=True
        )
        with contextlib.suppress(OSError):
            (folder / place / "filled").write_bytes(bytes(1 << 12))

    return before


def _of_disks(world: Path) -> Iterator[Attack]:
    good = _good(world)
    for command in ("generate", "train", "estimate", "plan", "probe", "explain"):
        for name, before in {
            "full cache": _mounted("tmpfs", "size=4k"),
            "read-only cache": _mounted("tmpfs", "size=1m,ro"),
            "no inodes in cache": _mounted("tmpfs", "nr_inodes=1"),
        }.items():
            yield Attack(
                kind="disks",
                name=f"{command} {name}",
                arguments=good[command],
                codes=DONE if command != "train" else (0,),
                before=before,
                root=True,
            )
    for command in ("train", "plan", "explain"):
        extra = {"train": [], "plan": ["--output", "out/plan.json"], "explain": ["--html", "out/page.html"]}[command]
        arguments = [*(good[command] if command != "explain" else ["explain", str(world / "run.pickle")]), *extra]
        for name, options in {"full": "size=4k", "read-only": "size=1m,ro"}.items():
            yield Attack(
                kind="disks",
                name=f"{command} into a {name} folder",
                arguments=arguments,
                codes=REFUSED,
                error_names="out",
                before=_mounted("tmpfs", options, "out"),
                root=True,
            )


def _environment(**values: str | None) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return before


def _limited(kind: int, count: int) -> Callable[[Path], None]:
    return lambda folder: resource.setrlimit(kind, (count, count))


def _hidden(*places: str) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        for place in places:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True, capture_output=True)

    return before


def _as_nobody(folder: Path) -> None:
    """A user that no file knows, and who may read this Python, which may lie in the home of another."""
    folder.chmod(0o777)
    for home in {Path(sys.base_prefix).resolve(), ROOT.resolve(), Path(sys.prefix).resolve()}:
        closed = next((p for p in reversed(home.parents) if not p.stat().st_mode & 0o001), None)
        if closed is not None:  # in this child's own mounts, what lies there is all that is there
            aside = folder / "aside"
            aside.mkdir()
            subprocess.run(["mount", "--bind", str(home), str(aside)], check=True, capture_output=True)
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed)], check=True, capture_output=True
            )
            home.mkdir(parents=True)
            subprocess.run(["mount", "--bind", str(aside), str(home)], check=True, capture_output=True)
    _environment(HOME=None, XDG_CACHE_HOME=None)(folder)
    os.setgid(54321)
    os.setuid(54321)


def _without_threads(folder: Path) -> None:
    """As where a container's limit of tasks is reached."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    vars(threading)["_start_new_thread"] = vars(threading)["_start_joinable_thread"] = refuse


def _without_module(name: str) -> Callable[[Path], None]:
    return lambda folder: vars(sys)["modules"].update({name: None})


def _gone(folder: Path) -> None:
    place = folder / "gone"
    place.mkdir()
    os.chdir(place)
    place.rmdir()


# Of a terminal one letter wide, where tables say nothing.
_NARROW = {command: r"\s*".join(word) for command, word in
           {"generate": "precision:", "estimate": "precision:", "probe": "computetier"}.items()}  # fmt: skip
_LACKS = {  # machines without which a command may not go on, and what its error must name
    "no /proc": "/proc",
    "a working folder that is gone": "folder|directory",
    "files of 1 MiB at most": "large|writ",
    "64 open files": "open files",
    "no more threads": "thread",
    "4 GiB of addresses": "memory",
}


def _of_machines(world: Path) -> Iterator[Attack]:
    good = _good(world)
    homes: dict[str, tuple[Callable[[Path], object], bool]] = {
        "HOME=/dev/null": (_environment(HOME="/dev/null", XDG_CACHE_HOME=None), False),
        "HOME=''": (_environment(HOME="", XDG_CACHE_HOME="/dev/null/x"), False),
        "XDG_CACHE_HOME of a file": (_environment(XDG_CACHE_HOME=str(world / "empty")), False),
        "a user without a name": (_as_nobody, True),
        "a working folder that is gone": (_gone, False),
        "64 open files": (_limited(resource.RLIMIT_NOFILE, 64), False),
        "no more threads": (_without_threads, False),
        "4 GiB of addresses": (_limited(resource.RLIMIT_AS, 4 << 30), False),
        "no SQLite": (_without_module("sqlite3"), False),
        "no core files": (_limited(resource.RLIMIT_CORE, 0), False),
        "files of 1 MiB at most": (_limited(resource.RLIMIT_FSIZE, 1 << 20), False),
        "no /sys": (_hidden("/sys"), True),
        "no /proc": (_hidden("/proc"), True),
        "no /dev/shm": (_hidden("/dev/shm"), True),
        "one thread": (_environment(OMP_NUM_THREADS="1"), False),
        "OMP_NUM_THREADS=abc": (_environment(OMP_NUM_THREADS="abc"), False),
        "PYTORCH_ALLOC_CONF of nonsense": (
            _environment(PYTORCH_ALLOC_CONF="a:b,,:", PYTORCH_CUDA_ALLOC_CONF="x"),
            False,
        ),
        "TERM=dumb, COLUMNS=1": (_environment(TERM="dumb", COLUMNS="1"), False),
        "COLUMNS=abc": (_environment(COLUMNS="abc", LINES="-1"), False),
    }
    for name, (before, root) in homes.items():
        for command in ("generate", "estimate", "plan", "explain", "probe"):
            yield Attack(
                kind="machines",
                name=f"{command}: {name}",
                arguments=good[command],
                codes=EITHER if name in _LACKS else DONE,
                error_names=_LACKS.get(name, ""),
                answers=_NARROW.get(command, "") if "COLUMNS=1" in name else "",
                before=before,
                root=root,
            )


def _of_clocks_and_locales(world: Path) -> Iterator[Attack]:
    good = _good(world)
    locales = {
        "LC_ALL=C": _environment(LC_ALL="C", PYTHONIOENCODING="ascii:strict"),
        "latin-1": _environment(PYTHONIOENCODING="latin-1"),
        "utf-16": _environment(LANG="xx_YY.UTF-16"),
        "TZ of nonsense": _environment(TZ="Nowhere/Nothing"),
        "SOURCE_DATE_EPOCH=-1": _environment(SOURCE_DATE_EPOCH="-1"),
    }
    for name, before in locales.items():
        for command in ("generate", "estimate", "plan", "explain", "probe"):
            yield Attack(
                kind="clocks and locales",
                name=f"{command}: {name}",
                arguments=good[command],
                codes=DONE,
                before=before,
            )
    for name, at_s in {"1970": 0.0, "2200": 7_258_118_400.0, "negative": -1.0}.items():

        def clock(folder: Path, at_s: float = at_s) -> None:
            now = time.time
            start_s = now()
            time.time = lambda: at_s + now() - start_s

        def aged(folder: Path, at_s: float = at_s) -> None:
            for path in (folder / "cache").rglob("*"):
                os.utime(path, (max(at_s, 0), max(at_s, 0)))

        for command in ("generate", "estimate", "plan", "probe"):
            yield Attack(
                kind="clocks and locales",
                name=f"{command}: clock of {name}",
                arguments=good[command],
                codes=DONE,
                before=clock,
            )
            yield Attack(
                kind="clocks and locales",
                name=f"{command}: files of {name}",
                arguments=good[command],
                codes=DONE,
                before=aged,
            )


# -- trying one


def digest(world: Path) -> dict[str, str]:
    """Every file of the user's."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(world.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24
    }


def tried(attack: Attack, cache: Path, scratch: Path) -> Outcome:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    folder.chmod(0o755)
    shutil.copytree(cache, folder / "cache")
    out = folder.parent / f"{folder.name}.txt"
    pid = os.fork()
    if pid == 0:
        _child(attack, folder, out)
    began_s = time.monotonic()
    sent, problem, status = False, "", 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        now_s = time.monotonic()
        if attack.signal_after_s and not sent and now_s - began_s >= attack.signal_after_s[1]:
            os.kill(pid, attack.signal_after_s[0])
            sent = True
        if now_s - began_s > SECONDS and now_s - began_s > SECONDS + _waited_s(pid):
            problem = "it hangs"
            os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    text = out.read_bytes().decode("utf-8", "replace") if out.exists() else ""
    code = os.waitstatus_to_exitcode(status)
    out.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if not problem and attack.signal_after_s and not sent:
        problem = "it ended before its signal"
    return Outcome(code=code, text=text, problem=problem or judged(attack, code, text))


def _waited_s(pid: int) -> float:
    """How long the process, or one that it waits for, was ready to run, and others ran (schedstat of Linux)."""
    waited_s = []
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            waited_s.append(int((thread / "schedstat").read_text().split()[1]) / 1e9)
            children += map(int, (thread / "children").read_text().split())
    return max(waited_s, default=0.0) + sum(map(_waited_s, children))


def judged(attack: Attack, code: int, text: str) -> str:
    """What is wrong with this end; empty if the attack held."""
    if "left out" in text and code == 99:
        return "left out"
    if "Traceback (most recent call last)" in text or "Fatal Python error" in text:
        return "a traceback"
    # A forked process maps libraries anew, which no promise for a process that was started has in it.
    if code == ABOVE_BUDGET and 0 in attack.codes and "above the promise" in text:
        code = 0
    if code == -signal.SIGINT:  # a shell makes 130 of it
        code = SIGINT_CODE
    if code not in attack.codes:
        if code < 0:
            return f"signal {-code}" + (" (more than its time of the processor)" if -code == signal.SIGXCPU else "")
        return f"exit code {code}, not {attack.codes}"
    if code in REFUSED:
        wanted = (_ERROR, attack.error_names)
    else:
        # A program that is interrupted says so itself, as under python.
        ended = "KeyboardInterrupt" if attack.arguments[0] == "run" and code == SIGINT_CODE else _ENDED.get(code, "")
        wanted = (attack.answer,) if code == 0 else (re.escape(ended),)
    missing = [pattern for pattern in wanted if not re.search(pattern, text, re.IGNORECASE)]
    return f"it does not say {missing[0]!r}" if missing else ""


def _child(attack: Attack, folder: Path, out: Path) -> None:
    code = 98
    try:
        os.setpgid(0, 0)
        opened = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        os.environ.update(XDG_CACHE_HOME=str(folder / "cache"), HOME=str(folder), TMPDIR=str(folder))
        tempfile.tempdir = None
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        if attack.root and (os.geteuid() != 0 or not _own_mounts()):
            os.write(2, b"left out")
            os._exit(99)
        if attack.before is not None:
            attack.before(folder)
        for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            try:
                encoding = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")[0]
                stream = open(descriptor, "r" if descriptor == 0 else "w", encoding=encoding, closefd=False)  # noqa: SIM115
            except OSError:
                stream = None  # type: ignore[assignment]
            setattr(sys, name, stream)
        if attack.fresh:
            from brim.processes import python_command

            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would this
            os.execv(sys.executable, python_command("-m", "brim", *attack.arguments))
        from brim.cli import main

        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main(list(attack.arguments))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):  # as the interpreter does it
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # as the interpreter does it, whose hook a program's own end may have replaced
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if 0 <= code < 256 else 97)


def _own_mounts() -> bool:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0  # private, all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose kind and name contain this")
    parser.add_argument("--each-kind", type=int, metavar="N", help="so many of each kind, evenly spread")
    parser.add_argument("--write", action="store_true", help="keep the counts")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="print what was kept")
    options = parser.parse_args()
    if options.table:
        _print_table(json.loads(RESULTS.read_text()))
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="brim-attacks-"))
    scratch.chmod(0o755)
    world = scratch / "world"
    world.mkdir()
    make_world(world)
    cache = scratch / "cache"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    _warm(world)
    offered = list(attacks(world))
    chosen = [a for a in offered if options.only in f"{a.kind} {a.name}"]
    if options.each_kind:
        kinds = dict.fromkeys(attack.kind for attack in chosen)
        chosen = [a for kind in kinds for a in _spread([a for a in chosen if a.kind == kind], options.each_kind)]
    if options.list:
        print("\n".join(f"{a.kind}: {a.name}" for a in chosen))
        return 0
    before = digest(world)
    held, lost, left_out = Counter[str](), Counter[str](), Counter[str]()
    for attack in chosen:
        outcome = tried(attack, cache, scratch)
        if outcome.problem != "left out" and (now := digest(world)) != before:
            outcome.problem = f"files of the user's changed: {sorted(set(before.items()) ^ set(now.items()))[0][0]}"
            before = now
        if outcome.problem == "left out":
            left_out[attack.kind] += 1
        elif outcome.problem:
            lost[attack.kind] += 1
            print(f"{attack.kind}: {attack.name}: {outcome.problem}\n    {outcome.text[-600:]!r}", flush=True)
        else:
            held[attack.kind] += 1
    kinds = list(dict.fromkeys(attack.kind for attack in chosen))
    rows = [{"kind": k, "tried": held[k] + lost[k], "held": held[k], "left_out": left_out[k]} for k in kinds]
    _print_table(rows)
    if options.write:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        counts = [Counter(a.kind for a in some) for some in (offered, chosen)]
        whole = [row for row in rows if counts[0][row["kind"]] == counts[1][row["kind"]]]
        merged = {row["kind"]: row for row in [*known, *whole]}  # a kind of which all were tried is counted anew
        RESULTS.write_text(json.dumps(list(merged.values()), indent=1) + "\n")
    shutil.rmtree(scratch, ignore_errors=True)
    return int(bool(lost))


def _spread(some: list[Attack], count: int) -> list[Attack]:
    """So many of them, each from the middle of a part of equal length; all where there are no more."""
    count = min(count, len(some))
    return [some[(2 * number + 1) * len(some) // (2 * count)] for number in range(count)]


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("| attacks | tried | held |\n|---|---:|---:|")
    for row in [*rows, {"kind": "all"} | {n: sum(row[n] for row in rows) for n in ("tried", "held")}]:
        print(f"| {row['kind']} | {row['tried']} | {row['held']} |")


def _warm(world: Path) -> None:
    """What every child would load, and measure, anew."""
    import importlib

    for name in (
        "brim.run.generate.request",
        "brim.run.train.loop",
        "brim.run.plan.search",
        "brim.estimation.estimate",
    ):
        importlib.import_module(name)
    import brim
    from brim.cli import main as command

    brim.probe(device="cpu")
    good = _good(world)
    with contextlib.chdir(world), contextlib.redirect_stdout(None):
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            os.chdir(world)
            code = command([*good["plan"], "--output", "plan.json"])
            # What a drive gives beside work is measured by the first training's plan.
            code = code or command(["plan", str(world / "model"), "--task", "train"])
            os._exit(code or command(good["generate"]))
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
