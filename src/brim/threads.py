"""Threads whose start fails with an error instead of hanging, and whose ``join`` survives interrupts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_POLL_S = 1.0  # a waiter interrupted before it passed on the lock does not wake the others
_START_S = 30.0
_DEFERRED = (signal.SIGINT, signal.SIGTERM)


class Flag:
    """An event that is set once.

    ``threading.Event`` can deadlock in ``set`` after Ctrl-C has interrupted a waiter that holds its lock.
    """

    def __init__(self) -> None:
        self._is_set, self._closed = False, threading.Lock()
        self._closed.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._closed.release()

    def wait(self) -> None:
        while not self._is_set:
            if self._closed.acquire(timeout=_POLL_S):
                self._closed.release()


class ThreadStartError(MemoryError, RuntimeError):
    """The system has no memory for a new thread, or allows no more of them (CPython: RuntimeError)."""


class _Started(threading.Event):
    """The ``_started`` event of a thread. A thread that starts after the wait has timed out does nothing."""

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
                raise ThreadStartError(f"the thread {self._thread.name} was started, and did not begin")
        return True


def _nothing() -> None:
    pass


_start = threading.Thread.start


def start(thread: threading.Thread) -> None:
    """Start ``thread``. Raises ThreadStartError if the system has no memory for it.

    CPython's ``Thread.start`` waits for ever for a thread that got no memory for its first frame; this waits 30 s.
    """
    if not thread.is_alive() and thread.ident is None:  # else Thread.start says what is wrong
        vars(thread)["_started"] = _Started(thread)  # ``Thread.start`` waits for it
    try:
        _start(thread)
    except RuntimeError as error:
        if isinstance(error, ThreadStartError) or thread.ident is not None or "new thread" not in str(error):
            raise
        raise ThreadStartError(f"the thread {thread.name} was not started: {error}") from error


@contextlib.contextmanager
def patched_thread_start() -> Iterator[None]:
    """Start all threads of the process by ``start`` within the block, those of other libraries too."""
    before, threading.Thread.start = threading.Thread.start, start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = before  # type: ignore[method-assign]


class Worker(threading.Thread):
    """A thread whose ``join`` returns only when its work is over.

    After an exception in a signal handler, ``Thread.join`` of CPython 3.11 (``Thread._wait_for_tstate_lock``) returns
    while the thread runs. The interpreter then ends under PyTorch's code, which aborts the process.
    """

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._over = Flag()

    def start(self) -> None:
        with deferred_interrupts():
            try:
                start(self)
            except ThreadStartError:
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
def deferred_interrupts() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, which an exception must not leave with a lock taken."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in _DEFERRED}
    handlers = {number: handler for number, handler in before.items() if handler is not None}  # None: not Python's
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)
