"""Writes to the scratch file: what is written is read back, within the disk's budget."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from brim.core import Timeline
from brim.errors import BudgetError, TransferError
from brim.memory.layout import ReadRun
from brim.memory.pool import PAGE_BYTES
from brim.memory.tiers import Memory, cpu_memory, fake_memory


@pytest.fixture
def memory(tmp_path: Path):
    made = cpu_memory(Timeline("t", measured=True), ram_bytes=64 << 20)
    made.use_disk(folder=str(tmp_path), limit_bytes=32 << 20)
    yield made
    made.close()


def _random(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8))


@pytest.mark.parametrize("count", [PAGE_BYTES, (20 << 20) + PAGE_BYTES, PAGE_BYTES + 17])
def test_what_is_written_is_read_back(memory: Memory, count: int) -> None:
    source, target = memory.ram.allocate((24 << 20), "source"), memory.ram.allocate(24 << 20, "target")
    _random(source.tensor)
    extent = memory.scratch().reserve(count)
    written = memory.engine.write(source.tensor, extent, "w", [])
    run = ReadRun(path=extent.path, offset=extent.offset, bytes=count, at=0, direct=True)
    memory.engine.read([run], target, "r", [written]).wait()
    assert torch.equal(source.tensor[:count], target.tensor[:count])
    assert memory.recorder.copied_bytes["ram", "disk"] == count


def test_released_pages_are_used_again_and_never_shared(memory: Memory) -> None:
    scratch = memory.scratch()
    first, second = scratch.reserve(5000), scratch.reserve(5000)
    assert abs(first.offset - second.offset) >= 2 * PAGE_BYTES
    scratch.release(first)
    assert scratch.reserve(6000).offset == first.offset
    assert scratch.peak_bytes == 4 * PAGE_BYTES


def test_the_budget_of_the_disk_holds_in_a_run_and_in_its_prediction(memory: Memory) -> None:
    predicted = fake_memory(Timeline("p", measured=False), compute_tier="ram", compute_bytes=1, ram_bytes=1)
    predicted.use_disk(folder=None, limit_bytes=32 << 20)
    for one in (memory, predicted):
        one.scratch().reserve(30 << 20)
        with pytest.raises(BudgetError, match="32 MiB"):
            one.scratch().reserve(3 << 20)
    predicted.close()


def test_a_full_disk_is_one_clear_error(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = memory.ram.allocate(PAGE_BYTES, "b")
    extent = memory.scratch().reserve(PAGE_BYTES)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TransferError, match="No space left"):
        memory.engine.write(buffer.tensor, extent, "w", []).wait()


def test_a_filesystem_without_direct_io_is_written_through_the_cache(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, target = memory.ram.allocate(PAGE_BYTES, "b"), memory.ram.allocate(PAGE_BYTES, "t")
    _random(buffer.tensor)
    extent = memory.scratch().reserve(PAGE_BYTES)
    real, refused = os.pwrite, []

    def picky(fd: int, data: object, offset: int) -> int:
        if os.get_blocking(fd) and not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", picky)
    written = memory.engine.write(buffer.tensor, extent, "w", [])
    run = ReadRun(path=extent.path, offset=extent.offset, bytes=PAGE_BYTES, at=0, direct=True)
    memory.engine.read([run], target, "r", [written]).wait()
    assert refused and torch.equal(buffer.tensor, target.tensor)


def test_a_closed_engine_writes_nothing_more(memory: Memory) -> None:
    buffer, extent = memory.ram.allocate(PAGE_BYTES, "b"), memory.scratch().reserve(PAGE_BYTES)
    memory.engine.close()
    with pytest.raises(TransferError, match="closed"):
        memory.engine.write(buffer.tensor, extent, "w", []).wait()
