"""Tensors of a traced program that are in RAM although their device name does not say so: shards of FSDP2.

A rank is traced on fake tensors of one device. The program marks the tensors in RAM, and the copies from and to RAM.
An operation all of whose inputs are in RAM runs on the CPU, and its results are in RAM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from brim.core.trace import TO_DEVICE, TO_RAM


class Resting:
    """The tensors of one trace that are in RAM. ``used``: True after the first one."""

    def __init__(self) -> None:
        self.used = False
        self._crossing: str | None = None
        self._makes = False  # True if operations without inputs create tensors in RAM

    @contextmanager
    def crossing(self, *, to_ram: bool) -> Iterator[None]:
        """While open, every operation is a copy to RAM, or to the device."""
        before, self._crossing = self._crossing, TO_RAM if to_ram else TO_DEVICE
        self.used = True
        try:
            yield
        finally:
            self._crossing = before

    @contextmanager
    def making(self) -> Iterator[None]:
        """While open, operations without tensor inputs create tensors in RAM."""
        before, self._makes = self._makes, True
        self.used = True
        try:
            yield
        finally:
            self._makes = before

    def made_of(self, inputs: Iterable[bool]) -> bool:
        """Return True if an operation's result is in RAM. ``inputs``: True for each input in RAM."""
        if self._crossing is not None:
            return self._crossing == TO_RAM
        rests = list(inputs)
        return all(rests) if rests else self._makes

    def named(self, operation: str) -> str:
        return self._crossing or operation
