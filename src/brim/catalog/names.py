"""Compare names in the spellings that people use, and suggest near ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from brim.errors import UsageError

_ALTERNATIVES = {
    "model": ("Or give a folder with its config.json; `brim models` lists all names.",),
    "GPU": ("Or give its memory by --vram; `brim gpus` lists all names.",),
}
_NOISE = {"nvidia", "geforce", "tesla", "amd", "instinct", "generation"}


def tokens(name: str) -> frozenset[str]:
    """Split a name into words and numbers without vendor words: ``"NVIDIA GeForce RTX4090"`` -> {rtx, 4090}."""
    return frozenset(_words(name))


def key(name: str) -> str:
    """Drop vendor words, case and punctuation: ``"GeForce RTX-4090"`` -> ``"rtx4090"``."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z]+|[0-9]+", name.lower()) if word not in _NOISE]


def unknown(kind: str, name: str, known: Sequence[str], near: Iterable[str] = ()) -> UsageError:
    """Return the error for a name that the catalog lacks; it suggests ``near``, else the nearest known names."""
    todo = f"Nearest: {', '.join(list(near) or _nearest(name, known))}."
    return UsageError(
        f"Unknown {kind} {name!r}.",
        f"None of the {len(known)} in the catalog has this name.",
        " ".join([todo, *_ALTERNATIVES.get(kind, ())]),
    )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    names = {key(name): name for name in known}
    name_key = key(name.rpartition("/")[2])  # the hub's part before the slash says nothing about the model
    return [names[near] for near in difflib.get_close_matches(name_key, list(names), n=4, cutoff=0.0)]
