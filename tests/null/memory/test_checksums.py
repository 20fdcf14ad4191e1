"""Checksums of tensors: however the bytes come, and whichever bit is another."""

from __future__ import annotations

import random

import pytest
import torch

from brim.memory.checksums import Checksum, checksum

KNOWN = [1786884285633530058, 6979279389228285074, 13205733499574575564]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4096, (256 << 10) - 8, 256 << 10, (256 << 10) + 3, 600_001])
def test_how_the_bytes_are_cut_changes_nothing(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    choose = random.Random(count)
    for longest in (3, 50_000, 300_000) if count < 10_000 else (50_000, 300_000):
        made, at = Checksum(), 0
        while at < count:
            size = choose.randint(1, longest)
            made.update(data[at : at + size])
            at += size
        assert made.value() == checksum(data)


def test_known_values_stay_what_they_are_because_files_hold_them() -> None:
    assert checksum(torch.empty(0, dtype=torch.uint8)) == KNOWN[0]
    assert checksum(torch.arange(1000).to(torch.uint8)) == KNOWN[1]
    assert checksum((torch.arange(600_001) * 7).to(torch.uint8)) == KNOWN[2]


def test_any_single_bit_counts() -> None:
    data = torch.randint(0, 256, (70,), dtype=torch.uint8)
    whole, found = checksum(data), set()
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            found.add(checksum(data))
            data[at] ^= 1 << bit
    assert len(found) > 500 and whole not in found
