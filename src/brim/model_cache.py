"""What models of transformers call the cache that they take and return.

From 5.24 on all call it ``cache`` (transformers/generation/utils.py, ``ALL_CACHE_NAMES``); the older name still works
there, with a warning, until 5.40. Before, models with attention called it ``past_key_values``, and those with
recurrent states ``cache_params``. RWKV calls it ``state`` in every version.
"""

from __future__ import annotations

import inspect
from typing import Any

_NAMES = ("cache", "past_key_values", "cache_params", "state")
_MISSING = object()


def cache_argument(model: Any) -> str | None:
    """The argument of ``model.forward`` that takes what it keeps between tokens; None where there is none."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in takes), None)


def cache_input(model: Any, cache: object) -> dict[str, Any]:
    """Keyword arguments that give ``cache`` to ``model`` or its ``generate``; TypeError where it takes none."""
    name = cache_argument(model)
    if name is None:
        raise TypeError(f"{type(model).__name__}.forward takes no cache.")
    return {name: cache}


def cache_of(output: object) -> Any:
    """The cache that a model's ``output`` holds, of any kind; None where it holds none.

    The first name that the output has is the one that counts: newer outputs answer to older names by a warning.
    """
    for name in _NAMES:
        value = getattr(output, name, _MISSING)
        if value is not _MISSING:
            return value
    return None


def keeps_keys(model: Any, cache: object) -> bool:
    """Whether some layer of a model's ``cache`` keeps the keys of all tokens. Recurrent states have taken them in."""
    name = cache_argument(model)
    if name != "cache":
        return name == "past_key_values"
    linear = getattr(cache, "is_linear", None)
    return not (linear and all(linear))
