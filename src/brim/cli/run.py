"""Run a program unchanged inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from brim.cli.options import Command, command
from brim.core.options import build, option
from brim.run.script.settings import Settings


class ProgramCommand(Command):
    """Options end with the script's name, or with ``-m MODULE``, as they do for python."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {opt for p in self.params if isinstance(p, click.Option) and p.is_flag for opt in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            word = args[at]
            if word.startswith("-m"):
                end = at + (2 if word == "-m" else 1)
                if end > len(args):
                    raise click.BadOptionUsage("module", "Option '-m' requires an argument.", ctx)
                return super().parse_args(ctx, [*args[:end], "--", *args[end:]])
            alone = "=" in word or word in flags or word in ctx.help_option_names
            at += 1 if alone or word == "--" else 2
        return super().parse_args(ctx, args)


def module_field() -> Any:
    """``-m MODULE``."""
    return option(None, "Run a module, as python -m does.", flags=("-m",), metavar="MODULE")


def program_field() -> Any:
    """The script and its arguments; with ``-m`` arguments alone."""
    return option((), kind="program", argument=True, metavar="[SCRIPT] [ARGS]...")


def program_of(module: str | None, words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The program and its arguments. Raises click's UsageError where there is none."""
    if module is not None:
        return module, words
    if not words:
        raise click.UsageError("Name a script, or a module with -m.")
    if not Path(words[0]).exists():
        raise click.UsageError(f"There is no file {words[0]!r}.")
    return words[0], words[1:]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Settings):
    """The options of ``brim run``: its settings, and the program."""

    module: str | None = module_field()
    arguments: tuple[str, ...] = program_field()


@command(RunOptions, cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
def run(options: RunOptions) -> Callable[[], int]:
    """Run a program unchanged inside a memory budget.

    Options after SCRIPT (or -m MODULE) are the program's own. Its output, exit code, signals and tracebacks are those
    of python SCRIPT. Models that fit are not changed; other models are planned and fitted at their first call.
    """
    from brim.run.script.run import run as launch
    from brim.run.script.script import Program

    target, arguments = program_of(options.module, options.arguments)
    program = Program(target=target, arguments=arguments, is_module=options.module is not None)
    settings = build(Settings, vars(options))
    if options.ram is not None:
        from brim.core.hardware import RAM
        from brim.measure.capacity import amount_bytes, check_room  # not for a program without a budget

        check_room(amount_bytes(options.ram, RAM))  # and again at the first model, with all that is loaded by then
    return lambda: launch(program, settings)
