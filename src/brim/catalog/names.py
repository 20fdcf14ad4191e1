"""Names as people write them: what is the same, and what is near."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from brim.errors import UsageError

_NOISE = {"nvidia", "geforce", "tesla", "amd", "instinct", "generation"}


def tokens(name: str) -> frozenset[str]:
    """``"NVIDIA GeForce RTX4090"`` -> {rtx, 4090}: letters and numbers apart, vendor words dropped."""
    return frozenset(_words(name))


def key(name: str) -> str:
    """The name without vendor words, case and punctuation: ``"GeForce RTX-4090"`` -> ``"rtx4090"``."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z]+|[0-9]+", name.lower()) if word not in _NOISE]


def unknown(kind: str, asked: str, names: Sequence[str], near: Iterable[str] = ()) -> UsageError:
    """The error for a name that is not in the catalog, naming the nearest ones (or ``near``, where given)."""
    suggestions = list(near) or _nearest(asked, names)
    found = f"None of the {len(names)} in the catalog has this name."
    return UsageError(f"Unknown {kind} {asked!r}.", found, f"Nearest: {', '.join(suggestions)}.")


def _nearest(asked: str, names: Sequence[str]) -> list[str]:
    keys = {key(name): name for name in names}
    asked_key = key(asked.rpartition("/")[2])  # the hub's part before the slash says nothing about the model
    return [keys[k] for k in difflib.get_close_matches(asked_key, list(keys), n=4, cutoff=0.0)]
