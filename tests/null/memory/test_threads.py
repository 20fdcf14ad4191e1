"""Threads that are waited for to their end, and flags that stay usable, whatever interrupts a wait."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from brim.memory import threads
from brim.memory.threads import Flag, Worker, interrupts_held


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
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_that_never_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "_start_new_thread", lambda *_: 0)
    monkeypatch.setattr(threading, "_start_joinable_thread", lambda *_, **__: 0, raising=False)
    monkeypatch.setattr(threads, "_START_S", 0.01)
    worker = Worker(lambda: None, "brim-test", daemon=True)
    with pytest.raises(MemoryError, match="did not begin"):
        worker.start()
    threading._limbo.pop(worker)  # type: ignore[attr-defined]
