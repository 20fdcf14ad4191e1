"""Measure the cost of memory pages that are new to a process on this machine, and cache it."""

from __future__ import annotations

import torch

from brim.core import Hardware
from brim.core.hardware import RAM
from brim.measure.bandwidth import fresh_memory_s_per_byte
from brim.measure.probe import probe
from brim.memory.heap import retention_limits
from brim.planning.seconds.measurement_cache import Remembered

_METHOD = 2  # raised when what is measured, or how, changes


def fresh_seconds(hardware: Hardware) -> float:
    """Seconds for each byte that is written to a new page; 0 for another machine, and where a GPU computes."""
    if hardware.compute != RAM or (hardware.name, RAM) != ((here := probe(device="cpu")).name, here.compute):
        return 0.0
    memory = Remembered("fresh-memory", (_METHOD, hardware.name, torch.__version__, torch.get_num_threads()))
    seconds = memory.get("s_per_byte", count=1)
    if seconds is None:
        seconds = [fresh_memory_s_per_byte()]
        memory.keep({"s_per_byte": seconds})
    return seconds[0]


def given_back(in_use_bytes: int, budget_bytes: int) -> float:
    """The share of a step's memory that a run gives back and asks for anew, as its budget has no room to keep it."""
    limits = retention_limits(in_use_bytes, budget_bytes)
    return 1.0 if limits is None else 1.0 - limits.share


__all__ = ["fresh_seconds", "given_back"]
