"""Runs a program under ``brim run`` in this process, and tells by how much its resident set grew.

``python resident_set.py SCRIPT RAM_BYTES TOLD``: writes to the file TOLD, as JSON, brim's report and the high water
of the resident set from the first call of a model on, over what was resident then less that model's tensors. Pages of
libraries that are mapped meanwhile are not counted, nor what a prediction leaves in caches of Python and PyTorch: a
small model is fitted before, and what the model would take without brim is predicted once more.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

import brim
from brim.memory import heap
from brim.run import launch, launch_decisions
from brim.run.launch_decisions import Decisions
from brim.run.launch_hooks import Call
from brim.run.launch_outcome import Outcome
from brim.run.training_fit import tensor_bytes_of


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


class Measured(Decisions):
    before_bytes = 0
    mapped_bytes = 0

    def decide(self, call: Call) -> Outcome | None:
        if not self.before_bytes:
            Decisions(launch.Settings(device="cpu"), lambda *_: None).decide(call)
            gc.collect()
            heap.give_back()
            Path("/proc/self/clear_refs").write_text("5")  # the high water begins anew
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
    grown = status_bytes("VmHWM") - Measured.before_bytes - mapped
    Path(told).write_text(json.dumps({"code": code, "grown_bytes": grown, **json.loads(report.read_text())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
