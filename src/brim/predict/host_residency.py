"""Tensors of a traced program that rest in RAM without a device name that says so: shards that FSDP2 offloads.

A rank is traced on fake tensors of one kind. The program says what rests in RAM and when a tensor crosses; from there
on an operation all of whose inputs rest there is the CPU's, and so is what it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from brim.core.trace import TO_DEVICE, TO_RAM


class Resting:
    """Tensors of one trace that rest in RAM. ``used``: one has rested there so far."""

    def __init__(self) -> None:
        self.used = False
        self._crossing: str | None = None
        self._makes = False  # whether what is made of nothing rests in RAM

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
        """While open, tensors made without tensor inputs rest in RAM."""
        before, self._makes = self._makes, True
        self.used = True
        try:
            yield
        finally:
            self._makes = before

    def made_of(self, inputs: Iterable[bool]) -> bool:
        """Return True if an operation's result rests in RAM. ``inputs``: True for each tensor that does."""
        if self._crossing is not None:
            return self._crossing == TO_RAM
        rests = list(inputs)
        return all(rests) if rests else self._makes

    def named(self, operation: str) -> str:
        return self._crossing or operation
