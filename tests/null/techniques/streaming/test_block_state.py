"""Values of blocks at rest are read without leaving their files' pages in the resident set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import brim

SIZE = 1024
LAYERS = 6


def file_pages_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile:")) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the kinds of resident pages are read from /proc")
def test_reading_every_value_leaves_no_pages_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", str(tmp_path))
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS))).requires_grad_(False)
    wanted = {name: p.clone() for name, p in model.named_parameters()}
    handle = brim.fit(model, ram="14MiB", device="cpu", example=[torch.zeros(1, SIZE)])
    streamed = [d.block for d in handle.plan.decisions if d.choice == "stream:disk"]
    assert len(streamed) >= 3
    with torch.no_grad():
        model(torch.zeros(1, SIZE))
    before = file_pages_bytes()
    for name, value in wanted.items():
        assert torch.equal(handle.value(name), value)
    assert file_pages_bytes() - before < SIZE * SIZE * 4
    with torch.no_grad():  # what a user writes to a parameter at rest is its value
        model.get_parameter(f"{streamed[0]}.weight").fill_(2.0)
    assert handle.value(f"{streamed[0]}.weight").eq(2.0).all()
    handle.remove()
