"""SIGTERM as an exception of the main thread, and no signal lost on its way."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from brim import threads

_AGAIN_S = 0.01


class Terminated(BaseException):
    """SIGTERM: by default a process ends where it stands and leaves its temporary files."""


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM raises ``Terminated``, as SIGINT raises KeyboardInterrupt. Only the main thread hears signals.

    Python drops an exception that is raised while a destructor or a callback of a weak reference runs: it goes to
    ``sys.unraisablehook`` and the program goes on. So a signal whose exception ends there is sent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main = threading.get_ident()
    report = sys.unraisablehook
    numbers: dict[type[BaseException], signal.Signals] = {
        Terminated: signal.SIGTERM,
        KeyboardInterrupt: signal.SIGINT,
    }

    def raise_it(*_: object) -> None:
        raise Terminated

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        number = numbers.get(dropped.exc_type)
        if number is None:
            report(dropped)
            return
        # By another thread: sent here, it would be heard before this function is left, and be dropped once more.
        again = threading.Timer(_AGAIN_S, _send, (number, main))
        again.daemon = True
        threads.start(again)

    before = signal.signal(signal.SIGTERM, raise_it)
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGTERM, before)


def _send(number: signal.Signals, thread: int) -> None:
    if hasattr(signal, "pthread_kill"):  # ends a wait that the thread may be in
        signal.pthread_kill(thread, number)
    else:
        signal.raise_signal(number)
