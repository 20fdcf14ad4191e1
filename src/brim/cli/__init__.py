"""The command line: a file per command, the list of commands, and the mapping of exceptions to exit codes."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from brim.cli.process import OutputError, Terminated, last_signal, signals_as_exceptions, standard_streams
from brim.errors import BrimError, BudgetError, UnsupportedError, failed_import, is_out_of_memory
from brim.printable import printable
from brim.threads import patched_thread_start
from brim.version import __version__

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as shells have it

# name -> (module:function, first line of its docstring). A command is imported when it is called or asked for help,
# never for `brim --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "estimate": (
        "brim.cli.estimate.command:estimate",
        "Predict the memory and the time of a training or generation step, without a GPU.",
    ),
    "explain": (
        "brim.cli.explain.command:explain",
        "Explain the memory of a run: why it ran out, what used it, what would help.",
    ),
    "generate": ("brim.cli.generate:generate", "Generate text with a model that may be larger than memory."),
    "gpus": ("brim.cli.catalog:gpus", "List the GPUs of the catalog."),
    "mcp": (
        "brim.cli.mcp:mcp",
        "Serve estimate, plan, rehearse and explain to a program, by the Model Context Protocol.",
    ),
    "models": ("brim.cli.catalog:models", "List the model configurations of the catalog."),
    "plan": ("brim.cli.plan.command:plan", "Find the fastest plans to train or run a model that fit a machine."),
    "probe": ("brim.cli.probe:probe", "Measure this machine: memory, disk, links, matrix rates."),
    "rehearse": (
        "brim.cli.rehearse:rehearse",
        "Run an unchanged program on simulated GPUs: check whether it fits, show what uses the memory, test fixes.",
    ),
    "run": ("brim.cli.run:run", "Run a program unchanged inside a memory budget."),
    "train": ("brim.cli.train:train", "Train a model that may be larger than memory."),
}


class _Commands(click.Group):
    """The commands of ``COMMANDS``, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, function = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Commands are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)


_COMPLETION = """\b
To complete commands, options, files and models, add a line to the start-up file of your shell:
  bash (~/.bashrc)                     eval "$(_BRIM_COMPLETE=bash_source brim)"
  zsh (~/.zshrc)                       eval "$(_BRIM_COMPLETE=zsh_source brim)"
  fish (~/.config/fish/config.fish)    _BRIM_COMPLETE=fish_source brim | source
"""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_COMPLETION)
@click.version_option(__version__, prog_name="brim", message="%(prog)s %(version)s")
def brim() -> None:
    """Run PyTorch models in less memory than they need, and explain the memory that they use."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, a BrimError's own, 2 for wrong usage, 130 after Ctrl-C, 143 after
    SIGTERM, 1 where the output cannot be written. (If the output's reader has gone, click ends the program with 1.)

    Expected failures go to stderr without a traceback; any other exception is a bug and keeps its own.
    """
    try:
        with standard_streams():
            outcome = _outcome(arguments)
    except OutputError:
        return 1
    if callable(outcome):  # a user's program: signals, warnings and exceptions are its own again
        return int(outcome())
    return outcome if isinstance(outcome, int) else 0


def _outcome(arguments: Sequence[str] | None) -> Any:
    try:
        with _warnings_in_one_line(), signals_as_exceptions(), patched_thread_start():
            return brim.main(args=arguments, prog_name="brim", standalone_mode=False)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        click.echo(printable(shown.getvalue()), err=True, nl=False)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt, Terminated) as signal:
        return _ended_by(signal)
    except Exception as error:  # click.Abort is one, and handled above
        behind = _signal_behind(error)
        refusal: BrimError | None = error if isinstance(error, BrimError) else None
        if behind is None and refusal is None:
            if _lacks_proc(error):
                refusal = _NO_PROC
            elif is_out_of_memory(error):
                refusal = BudgetError(
                    "The command cannot continue.",
                    f"The system has no more memory: {' '.join(str(error).split()) or type(error).__name__:.300}",
                    "End other programs, or allow this one more memory or threads.",
                )
            elif refusal := failed_import(error):
                behind = last_signal()  # the signal that interrupted the import
            elif "torch" in sys.modules:
                from brim.predict import failures

                refusal = failures.of_model(error)
        if behind is not None:
            return _ended_by(behind, error)
        if refusal is None:  # a bug of brim's
            raise
        click.echo(f"Error: {refusal}", err=True)
        return refusal.exit_code


def _ended_by(signal: BaseException, error: Exception | None = None) -> int:
    """Report the signal and return its exit code. ``error``: the exception that replaced the signal's."""
    terminated = isinstance(signal, Terminated)
    reason = "" if error is None else printable(" ".join(str(error).split()))
    became = f" ({type(error).__name__}: {reason:.300})" if error is not None else ""
    click.echo(f"{'Terminated' if terminated else 'Interrupted'}.{became}", err=True)
    return TERMINATED if terminated else INTERRUPTED


def _signal_behind(error: BaseException | None) -> BaseException | None:
    """The signal's exception that led to ``error``: half-entered contexts raise others, such as a mode of PyTorch's
    that is left before it is in force."""
    while error is not None and not isinstance(error, KeyboardInterrupt | Terminated):
        error = error.__cause__ or error.__context__
    return error


_NO_PROC = UnsupportedError(
    "Cannot measure the memory of this machine.",
    "Linux reports it in /proc, which does not exist.",
    "Mount /proc in the container or the chroot.",
)


def _lacks_proc(error: Exception) -> bool:
    """Return whether psutil failed, itself or on a file that it opened, because ``/proc`` is missing."""
    of_psutil = type(error).__module__.startswith("psutil")
    opened = isinstance(error, FileNotFoundError) and str(error.filename).startswith("/proc/")
    return sys.platform == "linux" and (of_psutil or opened) and not Path("/proc/self").exists()


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print warnings without the source line that raised them."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"Warning: {printable(str(message))}", err=True)

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
