"""Runs a program under ``brim run`` in this process, and tells by how much its resident set grew.

``python resident_set.py SCRIPT RAM_BYTES TOLD``: writes to the file TOLD, as JSON, brim's report and the high water
of the resident set from the first call of a model on, over what was resident then less that model's tensors. Pages of
libraries that are mapped meanwhile are not counted, nor what a prediction leaves in caches of Python and PyTorch: a
small model is fitted before, and what the model would take without brim is predicted once more. Nor are tensors that
the program has read by ``torch.load``, for as long as it holds them: a second copy of the weights is its own.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import brim
from brim.memory import heap
from brim.run.fit import tensor_bytes_of
from brim.run.script import decide as launch_decisions
from brim.run.script import run as launch
from brim.run.script.decide import Decisions
from brim.run.script.hooks import Call
from brim.run.script.outcome import Outcome


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def warm() -> None:
    model = nn.Sequential(*[nn.Linear(384, 384) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 384)
    fitted = brim.fit(model, optimizer, ram="9MiB", example=(x,))
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fitted.remove()


class HighWater:
    """The largest resident set less what the program has read and holds at that moment."""

    def __init__(self) -> None:
        self._most_bytes = self._read_bytes = 0
        self._load = torch.load
        torch.load = self._loading

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high water begins anew

    def most_bytes(self) -> int:
        self._note()
        return self._most_bytes

    def _note(self) -> None:
        self._most_bytes = max(self._most_bytes, status_bytes("VmHWM") - self._read_bytes)

    def _loading(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        self.begin()
        made = self._load(*args, **kwargs)
        tensors = [value for value in tree_leaves(made) if isinstance(value, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            self._read_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        return made

    def _freed(self, count: int) -> None:
        self._note()
        self._read_bytes -= count
        self.begin()


class Measured(Decisions):
    high_water: HighWater
    before_bytes = 0
    mapped_bytes = 0

    def decide(self, call: Call) -> Outcome | None:
        if not self.before_bytes:
            Decisions(launch.Settings(device="cpu"), lambda *_: None).decide(call)
            gc.collect()
            heap.trim()
            type(self).high_water = HighWater()
            self.high_water.begin()
            nothing = torch.optim.SGD([torch.zeros(())])
            type(self).mapped_bytes = status_bytes("RssFile")
            type(self).before_bytes = status_bytes("VmRSS") - tensor_bytes_of(call.model, nothing)
        return super().decide(call)


def main(script: str, ram: str, told: str) -> None:
    warm()
    launch_decisions.Decisions = Measured  # type: ignore[misc]
    report = Path(told).with_suffix(".report.json")
    settings = launch.Settings(ram=int(ram), device="cpu", report=report)
    code = launch.run(launch.Program(target=script), settings)
    mapped = status_bytes("RssFile") - Measured.mapped_bytes
    grown = Measured.high_water.most_bytes() - Measured.before_bytes - mapped
    Path(told).write_text(json.dumps({"code": code, "grown_bytes": grown, **json.loads(report.read_text())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
