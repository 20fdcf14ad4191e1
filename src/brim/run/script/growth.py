"""Growth of a program's memory since its first call of a model, as measured by the kernel and PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.measure.capacity import amount_bytes
from brim.memory.mapped import present_bytes
from brim.run.script.settings import Settings
from brim.units import format_bytes

# Kernels' buffers, threads and caches of a prediction are outside of the tensors that budgets cover.
_BESIDE_TENSORS_BYTES = 64 << 20


class Growth:
    """Growth since the first call of a model, compared only with budgets that were given."""

    def __init__(self, settings: Settings, *, on_gpu: bool) -> None:
        amounts = {VRAM: settings.vram} if on_gpu else {RAM: settings.ram, VRAM: settings.vram}
        budgets = [amount_bytes(n, t if on_gpu else RAM) for t, n in amounts.items() if n is not None]
        self._budget_bytes = min(budgets, default=None)
        self._on_gpu = on_gpu
        self._begin_bytes = self._begin_peak_bytes = 0

    def before_decision(self, model: nn.Module) -> None:
        """Note what the program holds besides ``model`` before its first call.

        A decision gives the heap's free memory back. Taking that memory again is no growth.
        """
        self._note(model, 0)

    def begin(self, model: nn.Module, brim_bytes: int) -> None:
        """Start measuring after the decision for ``model``; brim holds ``brim_bytes`` of the resident memory for
        it."""
        self._note(model, brim_bytes)

    def _note(self, model: nn.Module, brim_bytes: int) -> None:
        if self._budget_bytes is None or self._on_gpu or (counts := _counts()) is None:
            return
        own = brim_bytes or present_bytes([*model.parameters(), *model.buffers()])
        self._begin_bytes = max(self._begin_bytes, counts["RssAnon"] + counts["RssShmem"] - own)
        self._begin_peak_bytes = counts["VmHWM"]

    def above(self) -> str | None:
        """A sentence on how far the program is above its budget; None if it is not."""
        if self._budget_bytes is None:
            return None
        grown_bytes, allowed_bytes = self._measured_bytes(), self._budget_bytes
        if not self._on_gpu:
            allowed_bytes += _BESIDE_TENSORS_BYTES
        if grown_bytes <= allowed_bytes:
            return None
        tier = "VRAM" if self._on_gpu else "RAM"
        budget = format_bytes(self._budget_bytes)
        return f"the program took {format_bytes(grown_bytes)} of {tier}, and its budget is {budget}"

    def _measured_bytes(self) -> int:
        if self._on_gpu:
            if torch.cuda.memory.get_allocator_backend() != "native":
                return 0  # other backends do not count
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        counts = _counts()
        if counts is None or counts["VmHWM"] == self._begin_peak_bytes:  # no higher than before the first call
            return 0
        return counts["VmHWM"] - counts["RssFile"] - self._begin_bytes


def _counts() -> dict[str, int] | None:
    """Bytes of the process by the kernel's names (peak and resident); None where the kernel does not report them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    parts = (line.split() for line in lines)
    counts = {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts if part[-1] == "kB"}
    return counts if counts.keys() >= {"VmHWM", "RssAnon", "RssShmem", "RssFile"} else None
