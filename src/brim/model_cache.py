"""The names under which transformers models take and return their cache.

From 5.24 on it is ``cache`` (transformers/generation/utils.py, ``ALL_CACHE_NAMES``); the older names still work
there, with a warning, until 5.40: ``past_key_values`` with attention, ``cache_params`` with recurrent states. RWKV
has ``state`` in every version.
"""

from __future__ import annotations

import inspect
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params", "state")
_MISSING = object()


def cache_argument(model: Any) -> str | None:
    """Return the name of the cache argument of ``model.forward``, None if it has none."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in takes), None)


def cache_input(model: Any, cache: object) -> dict[str, Any]:
    """Return the keyword arguments that pass ``cache`` to ``model``; TypeError if it takes none."""
    name = cache_argument(model)
    if name is None:
        raise TypeError(f"{type(model).__name__}.forward takes no cache.")
    return {name: cache}


def cache_of(output: object) -> Any:
    """Return the cache in a model's ``output``, None if it has none."""
    for name in _NAMES:  # newest first: an output with a newer name warns about the older one
        value = getattr(output, name, _MISSING)
        if value is not _MISSING:
            return value
    return None


def keeps_keys(model: Any, cache: object) -> bool:
    """True if some layer of ``cache`` keeps the keys of all tokens; recurrent states do not."""
    name = cache_argument(model)
    if name != "cache":
        return name == "past_key_values"
    linear = getattr(cache, "is_linear", None)
    return not (linear and all(linear))
