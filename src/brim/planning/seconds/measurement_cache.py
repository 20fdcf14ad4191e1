"""Cache measurements in a file of the user's cache folder."""

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
    """Lists of numbers by name, each with its time. They depend on ``facts``: other facts have another file.

    A file that is damaged or cannot be written only causes a warning.
    """

    def __init__(self, what: str, facts: Sequence[object]) -> None:
        digest = hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:16]
        self._path = cache_folder() / f"{what}-{digest}.json"
        self._known = self._read()

    def get(self, name: str, *, count: int, within_s: float = math.inf) -> list[float] | None:
        """Return the numbers stored under ``name``; None where they are missing, older than ``within_s``, all zero,
        or not ``count``."""
        numbers, at_s = self._known.get(name, ([], 0.0))
        if len(numbers) != count or not any(numbers):
            return None
        # A time in the future: the clock was changed, so the age is unknown.
        return numbers if within_s == math.inf or 0 <= time.time() - at_s <= within_s else None

    def keep(self, entries: Mapping[str, list[float]]) -> None:
        """Add ``entries`` to the file, which is replaced atomically for other processes."""
        now_s = time.time()
        # Another process may have added entries.
        self._known = self._read() | {name: (list(numbers), now_s) for name, numbers in entries.items()}
        store_text(self._path, json.dumps(self._known))

    def _read(self) -> dict[str, tuple[list[float], float]]:
        try:
            document = json.loads(load_text(self._path) or "{}")
            return {str(name): _dated(numbers) for name, numbers in document.items()}
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            warnings.warn(f"{self._path} is damaged; its values are measured again: {error}", stacklevel=3)
            return {}


def _dated(entry: Any) -> tuple[list[float], float]:
    """Parse numbers and their Unix time; entries of older files have no time and count as from 1970."""
    numbers, at_s = (entry, 0.0) if not entry or not isinstance(entry[0], list) else entry
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{numbers!r:.100} cannot be measured")
    return [float(number) for number in numbers], float(at_s)
