"""Threads that begin or say why not, and that can be waited for whatever interrupts the wait."""

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


class NoThread(MemoryError, RuntimeError):
    """The system gave a new thread no memory, or allows no more of them (CPython: RuntimeError)."""


class _Begun(threading.Event):
    """Is set by ``thread`` when it has begun. One that is given up does nothing if it begins after all."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread, self._given_up, self._deciding = thread, False, threading.Lock()

    def set(self) -> None:
        with self._deciding:
            if self._given_up:
                vars(self._thread)["run"] = _nothing
            super().set()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None or super().wait(_START_S):
            return super().wait(timeout)
        with self._deciding:
            if not self.is_set():
                self._given_up = True
                raise NoThread(f"the thread {self._thread.name} was started, and did not begin")
        return True


def _nothing() -> None:
    pass


_start = threading.Thread.start


def start(thread: threading.Thread) -> None:
    """Start ``thread``. Raises NoThread where the system has no memory for it.

    ``Thread.start`` of CPython waits for ever for a thread to which the system gave no memory for its first frame:
    here half a minute.
    """
    if not thread.is_alive() and thread.ident is None:  # else Thread.start says what is wrong
        vars(thread)["_started"] = _Begun(thread)  # what ``Thread.start`` waits for
    try:
        _start(thread)
    except RuntimeError as error:
        if isinstance(error, NoThread) or thread.ident is not None or "new thread" not in str(error):
            raise
        raise NoThread(f"the thread {thread.name} was not started: {error}") from error


@contextlib.contextmanager
def starts_that_end() -> Iterator[None]:
    """While open, all threads of the process start by ``start``, those of other libraries too."""
    before, threading.Thread.start = threading.Thread.start, start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = before  # type: ignore[method-assign]


class Worker(threading.Thread):
    """A thread whose ``join`` returns only when its work is over.

    ``Thread.join`` of CPython 3.11 takes a thread that is still at work for one that has ended, once an exception of
    a signal handler has left the wait (``Thread._wait_for_tstate_lock``). The interpreter then ends under a thread in
    PyTorch's code, which aborts the process.
    """

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._over = Flag()

    def start(self) -> None:
        with interrupts_held():
            try:
                start(self)
            except NoThread:
                self._over.set()
                raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        assert timeout is None, "to its end"
        self._over.wait()
        if self.ident is not None:  # it has begun
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
    handlers = {number: handler for number, handler in before.items() if handler is not None}  # None: not Python's
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
