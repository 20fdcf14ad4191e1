"""Threads that are waited for to their end, and flags that stay usable, whatever interrupts a wait."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from brim import threads
from brim.threads import Flag, ThreadStartError, Worker, deferred_interrupts, patched_thread_start


def test_a_wait_that_was_interrupted_is_not_the_end_of_the_thread() -> None:
    go, done = threading.Event(), []

    def work() -> None:
        go.wait()
        done.append(True)

    worker = Worker(work, "brim-test", daemon=True)
    worker.start()
    waker = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    waker.start()
    with pytest.raises(KeyboardInterrupt):
        worker.join()
    waker.join()
    assert worker.is_alive() and not done
    go.set()
    worker.join()
    assert done and not worker.is_alive()


def test_a_flag_wakes_all_who_wait() -> None:
    flag, woken = Flag(), []
    waiting = [Worker(lambda: (flag.wait(), woken.append(1))[1], f"brim-test-{n}", daemon=True) for n in range(3)]
    for one in waiting:
        one.start()
    assert not flag.is_set()
    flag.set()
    for one in waiting:
        one.join()
    flag.wait()
    assert len(woken) == 3


def test_signals_come_when_the_block_has_ended() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def no_begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """New threads wait for somebody to call what is in here."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "_start_new_thread", lambda begin, _: waiting.append(begin))
    later = lambda begin, **_: waiting.append(begin)  # noqa: E731
    monkeypatch.setattr(threading, "_start_joinable_thread", later, raising=False)
    monkeypatch.setattr(threads, "_START_S", 0.01)
    yield waiting
    threading._limbo.clear()  # type: ignore[attr-defined]


def test_a_thread_that_never_begins_is_an_error(no_begin: list[Callable[[], None]]) -> None:
    worker = Worker(lambda: None, "brim-test", daemon=True)
    with pytest.raises(ThreadStartError, match="did not begin"):
        worker.start()
    worker.join()  # there is nothing to wait for


def test_a_thread_that_begins_after_it_was_given_up_does_nothing(
    no_begin: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(True))
    with pytest.raises(ThreadStartError):
        threads.start(thread)
    monkeypatch.undo()
    _thread.start_new_thread(no_begin[0], ())
    while not thread._started.is_set():  # type: ignore[attr-defined]
        time.sleep(0.001)
    thread.join()
    assert not done


def test_threads_of_others_end_their_wait_too(no_begin: list[Callable[[], None]]) -> None:
    before = threading.Thread.start
    with patched_thread_start(), pytest.raises(MemoryError):
        threading.Thread(target=lambda: None).start()
    assert threading.Thread.start is before


def test_a_system_without_more_threads_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    monkeypatch.setattr(threading, "_start_joinable_thread", refuse, raising=False)
    with pytest.raises(ThreadStartError, match="was not started"):
        threads.start(threading.Thread(target=lambda: None))


def test_what_is_wrong_with_a_start_is_told_as_ever() -> None:
    thread = threading.Thread(target=lambda: None)
    threads.start(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="only be started once") as found:
        threads.start(thread)
    assert not isinstance(found.value, ThreadStartError)
