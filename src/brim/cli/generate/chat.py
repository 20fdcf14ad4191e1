"""``brim generate MODEL`` on a terminal: a conversation, line by line."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.loading import loading_bar
from brim.errors import UsageError
from brim.requests.generate import Request
from brim.units import format_seconds

_PROMPT = "> "
_HINT = "Ctrl-C stops an answer, Ctrl-D ends."


def run(request: Request, context: int | None) -> None:
    """Ask and answer until the end of the input."""
    from brim.run.generate.chat import Turn, chat

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    last: Turn | None = None
    with contextlib.ExitStack() as stack:
        with console.status("starting", spinner="dots") as status:
            loading = loading_bar(status)
            talk = stack.enter_context(chat(request, context=context, on_stage=status.update, on_loaded=loading))
        console.print(f"{request.model}, {talk.context:,} tokens of context. {_HINT}")
        console.print(verdict.of_precision(*talk.precision))
        for text in _messages(console):
            with _interrupts() as stopped:
                try:
                    last = talk.answer(text, _write, stopped=stopped)
                except UsageError as error:
                    console.print(f"Error: {error}")
                    continue
            _write("\n")
            if last.forgotten:
                console.print(f"(the oldest {last.forgotten} messages are left out: they do not fit)")
    if last is not None and last.s_per_token is not None:
        console.print(f"{format_seconds(last.s_per_token)} per token")


def _messages(console: Console) -> Iterator[str]:
    """Yield typed lines, without blank ones; an interrupt discards the current line."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # which gives ``input`` its line editing and history
    while True:
        try:
            text = input(_PROMPT)
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\n{_HINT}")
            continue
        except UnicodeDecodeError as error:
            console.print(f"\nThat is not text: {error.reason}.")
            continue
        if text.strip():
            yield text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[Any]:
    """Yield a function that tells if an interrupt has come: the first ends the answer between two tokens, a second
    raises KeyboardInterrupt."""
    came = False

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
