"""Options are stated once: in the dataclass of their command."""

from __future__ import annotations

import inspect
import re
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

import brim
from brim.cli import brim as group
from brim.cli.generate import GenerateOptions
from brim.core.options import build, option_fields, words
from brim.estimation.workload import Workload
from brim.requests.plan import Request as Planning
from brim.requests.sampling import Sampling

CLI = Path(brim.__file__).parent / "cli"


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: str(path.relative_to(CLI)))
def test_no_command_states_an_option_outside_of_its_dataclass(path: Path) -> None:
    stated = re.findall(r"click\.(?:option|argument|Option|Argument)\(", path.read_text(encoding="utf-8"))
    assert not stated or path == CLI / "options.py"


@pytest.mark.parametrize(("verb", "request_type"), [(brim.plan, Planning), (brim.estimate, Workload)])
def test_the_arguments_of_a_verb_are_the_fields_of_its_request(verb: Any, request_type: type) -> None:
    parameters, hints = inspect.signature(verb).parameters, typing.get_type_hints(verb)
    fields = typing.get_type_hints(request_type)
    for field in option_fields(request_type):
        given = parameters[field.name]
        assert hints[field.name] in (fields[field.name], Sequence[str] | None), field.name
        assert field.required if given.default is inspect.Parameter.empty else given.default == field.default


def parsed(command: str, line: list[str]) -> dict[str, Any]:
    parser = group.get_command(click.Context(group), command)
    assert parser is not None
    return dict(parser.make_context(command, line).params)


@pytest.mark.parametrize("name", ["plan"])
def test_a_printed_command_asks_for_the_same(name: str) -> None:
    request = Planning(
        model="gpt2", task="train", vram="3GiB", ram="50%", ram_gb_per_s=2.5, batch=3, precision="bf16",
        method="lora", prefer="memory", lossless=True, host_compute=False, top=1,
    )  # fmt: skip
    program, command, *line = shlex.split(request.command())
    assert (program, command) == ("brim", name)
    values = parsed(command, line)
    assert build(Planning, values) == build(Planning, vars(request) | {"vram": 3 << 30})
    assert words(build(Planning, values)) == words(request)


def test_what_ranks_are_started_with_asks_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.models.location.local", lambda model: model)
    options = GenerateOptions(
        model="m", prompt="a b", prefill_chunk=4, ram=3 << 30, max_new_tokens=4, gpus=2, split="tensors",
        sampling=Sampling(temperature=0.5, seed=3), stop=("x", "y"), chat=False, host_compute=False, as_json=True,
    )  # fmt: skip
    values = parsed("generate", words(options))
    sampling = build(Sampling, values)
    assert build(GenerateOptions, {**values, "sampling": sampling}) == options
