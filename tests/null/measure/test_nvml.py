"""NVIDIA's management library is set up once per process, not per question: that takes the driver milliseconds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from brim.measure import nvml
from support.forked import forked


class Library:
    """Which calls were made; every device computes a quarter of the time."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.refuses = refuses

    def nvmlInit_v2(self) -> int:  # as the library has it
        self.calls.append("init")
        return 9 if self.refuses else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: object, rates: ctypes.Array[ctypes.c_uint]) -> int:
        self.calls.append("rates")
        rates[0] = 25
        return 0


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    nvml._of_process.cache_clear()
    yield
    nvml._of_process.cache_clear()


def test_it_is_set_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert [nvml.busy_share("GPU-1") for _ in range(3)] == [0.25] * 3
    assert library.calls == ["init", "rates", "rates", "rates"]


def test_a_fork_sets_up_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert nvml.busy_share("GPU-1") == 0.25

    def child() -> None:
        assert nvml.busy_share("GPU-1") == 0.25
        assert library.calls.count("init") == 2

    assert os.waitstatus_to_exitcode(os.waitpid(forked(child), 0)[1]) == 0


def test_a_driver_that_refuses_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(refuses=True))
    assert nvml.busy_share("GPU-1") is None


def test_no_driver_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvml.busy_share("GPU-1") is None
