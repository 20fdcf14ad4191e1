"""The limit of overlap: every weight in memory, and beside each forward the disk reads what the budget leaves out.

Nothing waits for anything but the end, so no runtime that reads those bytes can be faster here. It differs from
max(compute, read) by what reading takes away from compute on this machine: cores, memory bandwidth.
"""

from __future__ import annotations

import threading

import torch

from _checkpoint import weight_files
from _harness import RawReader
from peers import Loaded, Setting, resident

TITLE = "all resident, the same bytes read beside (no limit)"
PACKAGE = "transformers"
LIMITED = False
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    pass


def load(setting: Setting) -> Loaded:
    model = resident.load(setting)
    reader = RawReader(weight_files(setting.checkpoint), readers=2)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        reading = threading.Thread(target=reader.read, args=(setting.weights_bytes - setting.budget_bytes,))
        reading.start()
        logits = model.forward(ids)
        reading.join()
        return logits

    return Loaded(forward=forward, close=reader.close)
