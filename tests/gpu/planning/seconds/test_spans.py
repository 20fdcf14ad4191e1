"""Spans on a GPU are those of the device's own clock: as long as the kernels take, and on the host's axis."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from brim.core import EventKind, Timeline
from brim.memory.tiers import device_memory
from brim.planning.seconds.spans import BLOCKS, WHOLE, ComputeSpans
from brim.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")]


@pytest.mark.seconds
def test_spans_are_as_long_as_the_kernels_take_and_in_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(*(nn.Linear(8192, 8192, device=device) for _ in range(3)))
    given = torch.randn(8192, 8192, device=device)
    memory = device_memory(Timeline("run", measured=True), vram_bytes=GIB, ram_bytes=GIB, device=device)
    with torch.no_grad():
        model(given)
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        with ComputeSpans(model, ["0", "1", "2"], memory):
            model(given)
        took_s = time.perf_counter() - begin_s
    spans = [event for event in memory.recorder.timeline if event.kind is EventKind.COMPUTE]
    blocks = sorted((event for event in spans if event.stream == BLOCKS), key=lambda event: event.time_s)
    (whole,) = (event for event in spans if event.stream == WHOLE)
    memory.close()
    assert [event.label for event in blocks] == ["0", "1", "2"]
    assert sum(event.duration_s for event in blocks) == pytest.approx(whole.duration_s, rel=0.05)
    assert 0 < whole.duration_s <= took_s
