"""Temporary storage that the device-wide algorithms of CUB ask for (cub/device/dispatch).

Each reads its input in tiles. Sorting by radix has passes of eight bits; where there are several it writes to a
second copy of keys and values. Everything lies at multiples of 256 bytes, and 255 more are asked for to find the
first one.
"""

from __future__ import annotations

from math import ceil

_ALIGNMENT = 256
_SLACK = 255
_DIGITS = 256
_LARGEST_SINGLE_TILE = 256 * 19 * 4  # bytes of keys or values, whichever are wider, that one block of threads sorts
_REDUCED_BY_ONE_BLOCK = 4096
_BLOCKS_PER_MULTIPROCESSOR = 5 * 8  # of a reduction in two steps
_SELECTED_PER_TILE = 4096


def _aligned(bytes: int) -> int:
    return ceil(bytes / _ALIGNMENT) * _ALIGNMENT


def sort_bytes(count: int, key_bytes: int, value_bytes: int, bits: int) -> int:
    """``DeviceRadixSort`` of keys, with values where ``value_bytes`` is not 0, by their lowest ``bits``."""
    if count <= max(_LARGEST_SINGLE_TILE // max(key_bytes, value_bytes, 4) // 256, 1) * 256:
        return 1
    passes = ceil(bits / 8)
    tiles = ceil(count / _sorted_per_tile(key_bytes, value_bytes))
    total_bytes = _aligned(passes * _DIGITS * 8) + _aligned(tiles * _DIGITS * 4) + _aligned(passes * 4)
    if passes > 1:
        total_bytes += _aligned(count * key_bytes) + _aligned(count * value_bytes)
    return total_bytes + _SLACK


def merge_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceMergeSort`` of keys and values, which Thrust takes where it is given a comparison: second copies, and
    where each tile's part of the other begins."""
    tile = 256 * max(1, min(17, 17 * 4 // key_bytes))
    parts = _aligned((ceil(count / tile) + 1) * 8)
    return _aligned(count * key_bytes) + _aligned(count * value_bytes) + parts + _SLACK


def segmented_sort_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``: second copies."""
    return _aligned(count * key_bytes) + _aligned(count * value_bytes) + _SLACK


def _sorted_per_tile(key_bytes: int, value_bytes: int) -> int:
    if key_bytes <= 2:
        return 512 * 11
    if not value_bytes:
        return 384 * 15
    if key_bytes == 8:
        return 384 * 12
    return 384 * (14 if value_bytes == 8 else 17)


def scan_bytes(count: int, item_bytes: int, *, in_words: bool = True) -> int:
    """``DeviceScan``: the state of every tile, and 32 more: a word each or, of types that C++ lacks, three parts."""
    tiles = ceil(count / (128 * min(60 // item_bytes, 30))) + 32
    words = _aligned(tiles * max(2 * item_bytes, 4))
    return (words if in_words else _aligned(tiles * 4) + 2 * _aligned(tiles * item_bytes)) + _ALIGNMENT + _SLACK


def unique_by_key_bytes(count: int, item_bytes: int) -> int:
    """``DeviceSelect::UniqueByKey``: the state of every tile, and 32 more."""
    tile = 448 * 11 if item_bytes == 8 else 512 * 14
    return _aligned((ceil(count / tile) + 32) * 16) + _ALIGNMENT + _SLACK


def thrust_unique_by_key_bytes(count: int) -> int:
    """``thrust::unique_by_key`` of 64-bit keys: of every tile whether it is done, its sum and the one up to it."""
    tiles = ceil(count / (448 * 11)) + 32
    return _aligned(tiles * 4) + 2 * _aligned(tiles * 8) + _SLACK


def select_bytes(count: int) -> int:
    """``DeviceSelect``."""
    return _aligned((ceil(count / _SELECTED_PER_TILE) + 32) * 8) + _ALIGNMENT + _SLACK


def count_bytes(count: int, multiprocessors: int) -> int:
    """``DeviceReduce`` that counts in 32 bits."""
    if count <= _REDUCED_BY_ONE_BLOCK:
        return 1
    return _aligned(multiprocessors * _BLOCKS_PER_MULTIPROCESSOR * 4) + _SLACK


def bits_of(number: int) -> int:
    """How many bits numbers up to this one have (cuda::get_num_bits)."""
    return max(number.bit_length(), 1)
