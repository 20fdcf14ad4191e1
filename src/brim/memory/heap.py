"""The C library's heap: what a program frees is not what the system gets back, and RSS is what a budget counts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

# glibc, malloc/malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
# Blocks from here on get a mapping of their own: a system call and page faults each, so not for small ones. At
# 256 KiB the small tensors of a deep and thin model left a heap with 70 MB of holes after three steps of training,
# and more with each; from 64 KiB on there were none, and a step took no longer.
OWN_MAPPING_BYTES = 64 << 10
KEPT_BYTES = 1 << 20
_LARGEST_BYTES = 32 << 20  # the most that glibc takes as its threshold (DEFAULT_MMAP_THRESHOLD_MAX)
_ALWAYS_BYTES = (1 << 31) - 1  # of a free top: mallopt takes an int


def return_freed_memory() -> None:
    """From now on, let tensors that are freed leave the resident set at once. Only glibc has the settings for it.

    By default glibc raises its threshold for mappings to the size of whatever was freed (up to 32 MiB), so freed
    activations would stay in a heap with holes (mallopt(3), M_MMAP_THRESHOLD). Setting it also ends its raising.
    """
    _set(OWN_MAPPING_BYTES, KEPT_BYTES)


def keep_freed_memory() -> None:
    """From now on, let the heap keep what is freed, as far as glibc would by itself in the end."""
    _set(_LARGEST_BYTES, _ALWAYS_BYTES)


def _set(own_mapping_bytes: int, kept_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library: it only keeps a little more
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, own_mapping_bytes)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
        mallopt(_M_TOP_PAD, 0)
        mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Give back what garbage and the heap's top hold now."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Give back what the heap's holes and its top hold now."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
