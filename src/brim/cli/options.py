"""What several commands share: amounts of memory as options, and JSON alone on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from brim.errors import UsageError
from brim.units import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


class _Bytes(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """``8GiB``, ``512MB`` or plain bytes, given to the command as a number of bytes."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except UsageError as error:
            self.fail(" ".join(str(error).split("\n")), param, ctx)


BYTES = _Bytes()


def json_option(command: F) -> F:
    """``--json``, given to the command as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")(command)


def device_option(command: F) -> F:
    """``--device``, given to the command as ``device``."""
    choice = click.Choice(["auto", "cuda", "cpu"])
    text = "Where to compute; auto takes CUDA where torch sees it."
    return click.option("--device", type=choice, default="auto", show_default=True, help=text)(command)


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))
