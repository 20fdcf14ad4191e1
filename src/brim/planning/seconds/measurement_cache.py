"""Figures that were measured once, in a file of the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from brim.measure.user_cache import cache_folder, load_text, store_text


class Remembered:
    """Lists of numbers by name, each with when it was kept. ``facts`` are what they depend on: under other ones
    nothing is known.

    A file that is damaged or cannot be written is warned about and does not stop anything.
    """

    def __init__(self, what: str, facts: Sequence[object]) -> None:
        digest = hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:16]
        self._path = cache_folder() / f"{what}-{digest}.json"
        self._known = self._read()

    def get(self, name: str, *, count: int | None, within_s: float = math.inf) -> list[float] | None:
        """What was kept under ``name``; None where that is nothing, older than ``within_s``, zeros alone, or not
        ``count`` numbers (None: however many)."""
        numbers, at_s = self._known.get(name, ([], 0.0))
        if (count is not None and len(numbers) != count) or not any(numbers):
            return None
        # Kept in a time to come: a clock was set, and nobody knows how old it is.
        return numbers if within_s == math.inf or 0 <= time.time() - at_s <= within_s else None

    def keep(self, found: Mapping[str, list[float]]) -> None:
        """Add ``found`` to the file. It is moved into place, so that no other process reads half of it."""
        now_s = time.time()
        # Another process may have added its own.
        self._known = self._read() | {name: (list(numbers), now_s) for name, numbers in found.items()}
        store_text(self._path, json.dumps(self._known))

    def _read(self) -> dict[str, tuple[list[float], float]]:
        try:
            text, _ = load_text(self._path) or ("{}", 0.0)
            return {str(name): _dated(numbers) for name, numbers in json.loads(text).items()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            warnings.warn(f"{self._path} is damaged; its values are measured again: {error}", stacklevel=3)
            return {}


def _dated(entry: Any) -> tuple[list[float], float]:
    """Numbers and when they were kept, in seconds since 1970; in older files they stand alone, of any age."""
    numbers, at_s = (entry, 0.0) if not entry or not isinstance(entry[0], list) else entry
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{numbers!r:.100} cannot be measured")
    return [float(number) for number in numbers], float(at_s)
