"""Threads that can be waited for whatever interrupts the wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LOOK_S = 1.0  # how long a waiter may sleep on where an exception has kept another one from waking it
_START_S = 30.0
_HELD = (signal.SIGINT, signal.SIGTERM)


class Flag:
    """Is set once; many wait. Unlike ``threading.Event``'s, its lock cannot stay taken by a waiter whom Ctrl-C's
    exception has torn out of the wait, where the one who sets it would wait for ever."""

    def __init__(self) -> None:
        self._is_set, self._closed = False, threading.Lock()
        self._closed.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Once."""
        self._is_set = True
        self._closed.release()

    def wait(self) -> None:
        while not self._is_set:
            if self._closed.acquire(timeout=_LOOK_S):
                self._closed.release()


class _Begun(threading.Event):
    """Is set by a thread that has begun."""

    given_up = False

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_START_S if timeout is None else timeout) and timeout is None:
            self.given_up = True
            raise MemoryError("a thread was started, and did not begin")
        return self.is_set()


class Worker(threading.Thread):
    """A thread whose ``join`` returns only when its work is over.

    ``Thread.join`` of CPython 3.11 takes a thread that is still at work for one that has ended, once an exception of
    a signal handler has left the wait (``Thread._wait_for_tstate_lock``). The interpreter then ends under a thread in
    PyTorch's code, which aborts the process. And ``Thread.start`` waits for ever for a thread to which the system
    gave no memory for its first frame: here it raises MemoryError after half a minute.
    """

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._over = Flag()
        self._started = self._begun = _Begun()  # what ``Thread.start`` waits for

    def start(self) -> None:
        with interrupts_held():
            super().start()

    def run(self) -> None:
        try:
            if not self._begun.given_up:
                super().run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        assert timeout is None, "to its end"
        self._over.wait()
        super().join()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """What SIGINT and SIGTERM do, they do when the block has ended: for moments in which an exception would leave a
    lock taken or a thread without anyone who knows of it."""
    if threading.current_thread() is not threading.main_thread():  # only that one hears signals
        yield
        return
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _HELD}
    held = {number: handler for number, handler in before.items() if handler is not None}  # None: not Python's
    for number in held:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
