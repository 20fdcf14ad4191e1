"""Memory and disks that fail at chosen calls, as the pools and the kernel make them fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from brim.memory.pool import Buffer, HostSource, Pool


class Allocations:
    """Counts what real pools are asked for; from the ``bad``-th on, ``times`` of them find one byte too few."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.bad = 0, range(0)
        self.tiers: list[str] = []  # of each call since ``fail``
        self._enter = Pool._enter
        monkeypatch.setattr(Pool, "_enter", lambda pool, *args: self._entered(pool, *args))

    def fail(self, bad: int, times: int = 1) -> None:
        """From now on, the ``bad``-th call fails, and those that follow it; 0: none does."""
        self.count, self.bad = 0, range(bad, bad + times if bad else 0)
        self.tiers.clear()

    def _entered(
        self, pool: Pool, bytes: int, label: str, make: Callable[[], torch.Tensor], category: str = ""
    ) -> Buffer:
        if not isinstance(pool.source, HostSource):  # a prediction's
            return self._enter(pool, bytes, label, make, category)
        self.count += 1
        self.tiers.append(pool.tier)
        if self.count not in self.bad:
            return self._enter(pool, bytes, label, make, category)
        pool.settle()
        limit, pool.limit_bytes = pool.limit_bytes, pool.held_bytes + bytes - 1
        try:
            return self._enter(pool, bytes, label, make, category)
        finally:
            pool.limit_bytes = limit


class Calls:
    """The system call ``name`` fails with ``code`` at the calls (from 1 on) that are ``bad``.

    ``told``: which calls count, by their first arguments; all where None.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, code: int, told: Callable[..., bool] | None = None
    ) -> None:
        self.count = 0
        self.bad: Callable[[int], bool] = lambda call: False
        self._code, self._call, self._told = code, getattr(os, name), told
        monkeypatch.setattr(os, name, self)

    def fail(self, bad: int) -> None:
        """From now on, the ``bad``-th call fails; 0: none does."""
        self.count, self.bad = 0, lambda call: call == bad

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._told is not None and not self._told(*arguments):
            return self._call(*arguments, **options)
        self.count += 1
        if self.bad(self.count):
            raise OSError(self._code, os.strerror(self._code))
        return self._call(*arguments, **options)


def full(*_: object) -> int:
    """A write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
