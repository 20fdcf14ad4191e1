"""Rates are what they claim: bytes from the disk, operations per second, by the best of the ways tried."""

import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from brim.errors import TransferError, UsageError
from brim.measure.bandwidth import matrix_rate, median_s, ram_link
from brim.measure.disk import UncachedFile, disk_link, uncached_file

MIB = 1 << 20


def read_from_disk_bytes() -> int:
    """The bytes that this process has read from storage, not from the page cache (proc_pid_io(5))."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def filesystem(directory: Path) -> str:
    mounts = [part for part in psutil.disk_partitions(all=True) if directory.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype


@pytest.mark.thorough
def test_the_disk_is_read_and_not_the_page_cache(tmp_path):
    if filesystem(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are kept in RAM here")
    before_bytes = read_from_disk_bytes()
    with uncached_file(tmp_path) as file:
        link = disk_link(file)
    assert (link.source, link.target) == ("disk", "ram")
    assert read_from_disk_bytes() - before_bytes > file.size_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_where_the_filesystem_refuses_direct_reads_the_cache_is_dropped_first(tmp_path):
    if filesystem(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are kept in RAM here")
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB) * 64)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        before_bytes = read_from_disk_bytes()
        link = disk_link(
            UncachedFile(
                directory=tmp_path, descriptor=opened.fileno(), size_bytes=64 * MIB, direct=False, writable=False
            )
        )
    assert link.bytes_per_s > 0
    assert read_from_disk_bytes() - before_bytes > 5 * 64 * MIB  # every round of it, not the first alone


def test_the_scratch_file_has_no_name_while_it_is_read(tmp_path):
    with uncached_file(tmp_path) as file:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(file.descriptor).st_size == file.size_bytes
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)


def test_a_file_that_shrinks_is_a_transfer_error(tmp_path):
    with uncached_file(tmp_path) as file:
        os.ftruncate(file.descriptor, 0)
        with pytest.raises(TransferError, match="ended at byte"):
            disk_link(file)


def test_a_directory_that_can_neither_be_written_nor_read_from_says_what_to_do():
    with pytest.raises(UsageError, match="another directory"), uncached_file(Path("/proc/self/task")):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can write everywhere")
def test_in_a_directory_that_cannot_be_written_its_largest_file_is_read(tmp_path):
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(MIB) * 65)
    tmp_path.chmod(0o500)
    try:
        with uncached_file(tmp_path) as file:
            assert file.size_bytes == 65 * MIB
            assert disk_link(file).bytes_per_s > 0
    finally:
        tmp_path.chmod(0o700)


def test_a_matrix_rate_counts_two_operations_per_multiplication():
    rate = matrix_rate(lambda size: lambda: time.sleep(2 * size**3 / 1e9), target_s=0.05, largest=4096)
    assert 0.5e9 < rate <= 1e9  # a sleep is never shorter than asked, but longer on a busy machine


def test_a_matrix_rate_stops_at_the_largest_size():
    sizes = []

    def product(size):
        sizes.append(size)
        return lambda: time.sleep(1e-6)

    matrix_rate(product, target_s=10.0, largest=512)
    assert sizes[-1] == 512


def test_the_median_ignores_the_warm_up_and_one_slow_round():
    delays = iter([0.3, 0.01, 0.2, 0.01])
    assert median_s(lambda: time.sleep(next(delays)), rounds=3) < 0.1


def test_measuring_copies_leaves_torch_its_threads():
    before = torch.get_num_threads()
    link = ram_link()
    assert torch.get_num_threads() == before
    assert link.bytes_per_s >= link.single_bytes_per_s > 1e6
    assert link.concurrency in (1, before)
