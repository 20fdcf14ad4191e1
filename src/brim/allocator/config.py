"""Settings of PyTorch's CUDA caching allocator, in the form of ``PYTORCH_ALLOC_CONF``.

Grammar and checks follow ``c10/core/AllocatorConfig.cpp`` and ``c10/cuda/CUDAAllocatorConfig.cpp`` of PyTorch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from brim.errors import FormatError, UsageError
from brim.units import GIB, MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB  # smaller large requests share a segment of `large_segment_bytes`
ROUND_LARGE_BYTES = 2 * MIB
POWER2_INTERVALS = 16  # requests of 1 MiB to 64 GiB, one entry per power of two

# Settings that change host memory, locking or error texts, but no device address.
_WITHOUT_EFFECT = (
    "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)

_Value = str | list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """The allocator's settings. Sizes in bytes; ``max_split_bytes`` None: every block may be split.

    ``roundup_power2_divisions`` has one entry per power of two from 1 MiB to 32 GiB (0: round to 512 bytes).
    ``memory_fraction`` is ``per_process_memory_fraction`` or ``set_per_process_memory_fraction``; 1: no limit.
    ``reserve`` is the address space of one expandable segment: bytes, a fraction of the device, or None: 9/8 of it.
    ``oldest_segment_first``: among free blocks of one size, that of the oldest segment is chosen, as from PyTorch
    2.13 on (pytorch/pytorch#183591), not that at the lowest address. It is no setting of PyTorch.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * POWER2_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    memory_fraction: float = 1.0
    reserve: int | float | None = None
    backend: str = "native"
    oldest_segment_first: bool = False

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Parse the settings in ``text`` (``expandable_segments:True,max_split_size_mb:256``).

        Raises UsageError for an unknown key (with the nearest), a missing or an impossible value.
        """
        pairs = list(_pairs(text))
        config = cls()
        for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):  # others depend on it
            config = _apply(config, key, value)
        if all(key != "max_non_split_rounding_mb" for key, _ in pairs):
            config = replace(config, max_non_split_rounding_bytes=config.large_segment_bytes)
        return config

    @classmethod
    def from_snapshot(cls, settings: Mapping[str, Any]) -> AllocatorConfig:
        """Read a memory snapshot's ``allocator_settings`` (absent before torch 2.2).

        Its values override its text, which may be older. A snapshot does not contain ``oldest_segment_first``:
        ``brim.recordings.replay.recorded_start`` infers it. Raises FormatError for a text or value that PyTorch
        does not write.
        """
        text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
        try:
            config = cls.parse(str(text))
        except UsageError as error:
            raise FormatError("Cannot read a snapshot's allocator settings.", str(error)) from error
        changes: dict[str, Any] = {}
        if isinstance(limit := settings.get("max_split_size"), int):
            changes["max_split_bytes"] = limit if 0 < limit < 1 << 62 else None  # -1: unlimited
        if isinstance(threshold := settings.get("garbage_collection_threshold"), float):
            changes["garbage_collection_threshold"] = threshold
        if isinstance(expandable := settings.get("expandable_segments"), bool):
            changes["expandable_segments"] = expandable
        if isinstance(divisions := settings.get("roundup_power2_divisions"), Mapping):
            values = tuple(divisions.values())
            if len(values) != POWER2_INTERVALS or not all(_is_division(value) for value in values):
                raise FormatError("Cannot read a snapshot's roundup_power2_divisions.", f"Found {values[:20]}.")
            changes["roundup_power2_divisions"] = values
        return replace(config, **changes)

    def round_size(self, nbytes: int) -> int:
        """Round a request up to a multiple of 512 bytes, or of a fraction of a power of two."""
        if nbytes >= MIN_BLOCK_BYTES:
            exponent = nbytes.bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(exponent - 20, 0), POWER2_INTERVALS - 1)]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                step = 1 << exponent >> divisions.bit_length() - 1
                return -(-nbytes // step) * step
        return max(-(-nbytes // MIN_BLOCK_BYTES), 1) * MIN_BLOCK_BYTES

    def segment_bytes(self, size: int) -> int:
        """Return the bytes of the new segment for a block of ``size`` bytes."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def describe(self) -> str:
        """Return the settings that differ from the default, as PyTorch writes them; ``""`` if none does."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_bytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_bytes // MIB}")
        if any(self.roundup_power2_divisions):
            parts.append(_divisions_text(self.roundup_power2_divisions))
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.large_segment_bytes != LARGE_SEGMENT_BYTES:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        if self.max_non_split_rounding_bytes != self.large_segment_bytes:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_bytes // MIB}")
        if self.memory_fraction < 1:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction:g}")
        return ",".join(parts)


def _pairs(text: str) -> Iterator[tuple[str, _Value]]:
    """Iterate over keys and values; a list value becomes its ``(interval, value)`` pairs."""
    compact = re.sub(r"\s", "", text)
    at = 0
    pattern = re.compile(r"([^,:\[\]]+):(?:\[([^\[\]]*)\]|([^,:\[\]]+))(?:,|$)")
    while at < len(compact):
        match = pattern.match(compact, at)
        if match is None:
            raise UsageError(
                f"Cannot read the allocator settings {text!r}.",
                f"{compact[at:]!r} is not of the form key:value.",
                "Write key:value pairs with commas between, as in expandable_segments:True,max_split_size_mb:256.",
            )
        at = match.end()
        yield match[1], match[3] if match[2] is None else _list_value(match[1], match[2])


def _list_value(key: str, inside: str) -> list[tuple[str, str]]:
    pairs = [item.partition(":") for item in inside.split(",") if item]
    if not pairs or not all(name and colon and value for name, colon, value in pairs):
        raise _bad(key, f"[{inside}]", "a list like [256:1,512:2,1024:4,>:8]")
    return [(name, value) for name, _, value in pairs]


def _apply(config: AllocatorConfig, key: str, value: _Value) -> AllocatorConfig:
    """Return ``config`` with one setting changed."""
    if key == "roundup_power2_divisions":
        return replace(config, roundup_power2_divisions=_divisions(key, value))
    if key in _WITHOUT_EFFECT:
        return config
    if key not in _SCALARS:
        nearest = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.0)[0]
        raise UsageError(
            f"Unknown allocator setting {key!r}.",
            "PyTorch's CUDA allocator has no setting of this name.",
            f"The nearest is {nearest!r}.",
        )
    if not isinstance(value, str):
        raise _bad(key, str(value), "a single value")
    field, read = _SCALARS[key]
    return replace(config, **{field: read(config, key, value)})


def known_keys() -> tuple[str, ...]:
    """Return every setting that ``AllocatorConfig.parse`` accepts."""
    return tuple(sorted((*_SCALARS, *_WITHOUT_EFFECT, "roundup_power2_divisions")))


def _bad(key: str, value: str, allowed: str) -> UsageError:
    return UsageError(
        f"Cannot use the allocator setting {key}.", f"Its value is {value!r}.", f"It must be {allowed}."
    )


def _megabytes(key: str, value: str, least: int) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < least:
        raise _bad(key, value, f"a whole number of MiB, {least} or more")
    return int(value) * MIB


def _word(key: str, value: str, words: Sequence[str], allowed: str) -> str:
    if value not in words:
        raise _bad(key, value, allowed)
    return value


def _share(key: str, value: str, *, ends: bool) -> float:
    """Read a number between 0 and 1; ``ends``: or one of them."""
    allowed = "a number from 0 to 1" if ends else "a number above 0 and below 1"
    share = _number(key, value, allowed)
    if not (0 < share < 1 or (ends and share in (0, 1))):
        raise _bad(key, value, allowed)
    return share


def _reserve(key: str, value: str) -> float:
    allowed_form = "a fraction of the device like 0.5, or a size like 40G"
    absolute = value[-1] in "gG"
    amount = _number(key, value[:-1] if absolute else value, allowed_form)
    if amount <= 0:
        raise _bad(key, value, allowed_form)
    return int(amount * GIB) if absolute else amount


_BACKENDS = ("native", "cudaMallocAsync", "hipMallocAsync")
# PyTorch's setting -> field, and its value of (config, setting, text).
_SCALARS: dict[str, tuple[str, Callable[[AllocatorConfig, str, str], Any]]] = {
    "backend": ("backend", lambda _, key, text: _word(key, text, _BACKENDS, "native or cudaMallocAsync")),
    "expandable_segments": (
        "expandable_segments", lambda _, key, text: _word(key, text, ("True", "False"), "True or False") == "True"
    ),
    "expandable_segments_reserve": ("reserve", lambda _, key, text: _reserve(key, text)),
    "garbage_collection_threshold": (
        "garbage_collection_threshold", lambda _, key, text: _share(key, text, ends=False)
    ),
    # Above the 10 MiB that choose it.
    "large_segment_size_mb": ("large_segment_bytes", lambda _, key, text: _megabytes(key, text, 11)),
    "max_non_split_rounding_mb": (
        "max_non_split_rounding_bytes",
        lambda config, key, text: _megabytes(key, text, config.large_segment_bytes // MIB),
    ),
    "max_split_size_mb": (
        "max_split_bytes", lambda config, key, text: _megabytes(key, text, config.large_segment_bytes // MIB)
    ),
    "per_process_memory_fraction": ("memory_fraction", lambda _, key, text: _share(key, text, ends=True)),
}  # fmt: skip


def _number(key: str, value: str, allowed: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _bad(key, value, allowed)
    return number


def _is_division(value: Any) -> bool:
    return isinstance(value, int) and value >= 0 and value & (value - 1) == 0


def _divisions(key: str, value: _Value) -> tuple[int, ...]:
    """Read a number for all intervals, or a list whose keys are the upper ends of intervals in MiB."""
    if isinstance(value, str):
        if not value.isdigit() or int(value) == 0 or not _is_division(int(value)):
            raise _bad(key, value, "a power of two")
        return (int(value),) * POWER2_INTERVALS
    divisions = [0] * POWER2_INTERVALS
    last: int | None = None
    for name, count in value:
        if not count.isdigit() or not _is_division(int(count)):
            raise _bad(key, f"{name}:{count}", "a power of two, or 0 to switch the rounding off")
        if name == ">":
            after = 1 if last is None else last + 1
            divisions[after:] = [int(count)] * (POWER2_INTERVALS - after)
            continue
        if not name.isdigit() or int(name) == 0 or not _is_division(int(name)):
            raise _bad(key, f"{name}:{count}", "given for intervals that are powers of two (in MiB)")
        index = min(int(name).bit_length() - 1, POWER2_INTERVALS - 1)
        if last is None:
            divisions[:index] = [int(count)] * index
        divisions[index] = int(count)
        last = index
    return tuple(divisions)


def _divisions_text(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return f"roundup_power2_divisions:{divisions[0]}"
    listed = ",".join(f"{1 << index}:{count}" for index, count in enumerate(divisions))
    return f"roundup_power2_divisions:[{listed}]"
