"""``brim.watch`` on a GPU: the snapshot is written where the allocation fails, before anything is undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import brim
from brim.recordings import snapshot
from brim.units import GIB, MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")]


def test_running_out_of_memory_writes_a_snapshot_before_unwinding(tmp_path: Path):
    path = tmp_path / "run.brim"
    seen = []
    with pytest.raises(torch.OutOfMemoryError) as caught, brim.watch(path):
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        finally:
            seen.append(path.exists())
    assert seen == [True]
    assert "brim explain" in caught.value.__notes__[0]
    (device, *_) = snapshot.read(path).devices
    assert "oom" in device.actions
    assert any(block.requested == held.numel() for segment in device.segments for block in segment.blocks)
    assert not torch._C._cuda_isHistoryEnabled()


def test_the_ring_is_bounded_and_a_recording_that_was_on_stays_on(tmp_path: Path):
    path = tmp_path / "run.brim"
    with brim.watch(path, max_entries=100, on_exit=True):
        for _ in range(1000):
            torch.empty(MIB, device="cuda")
    assert len(snapshot.read(path).devices[0].actions) <= 100
    torch.cuda.memory._record_memory_history()
    try:
        with brim.watch(path):
            pass
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_failures_on_other_devices_and_after_the_block_are_not_its_own(tmp_path: Path):
    path = tmp_path / "run.brim"
    with brim.watch(path, devices=[0]):
        pass
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1024 * GIB, dtype=torch.uint8, device="cuda")
    assert not path.exists()
