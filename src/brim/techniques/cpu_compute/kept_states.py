"""What a block keeps from call to call in a cache that is handed to it: keys and values, states of a recurrence.

transformers' caches (``transformers.cache_utils.Cache``) have an object per layer, which takes the device of what it
is given first. So a layer that the CPU computes makes its states in RAM and they stay there. Only a cache that was
filled or laid out elsewhere before has to be brought.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from brim.errors import UnsupportedError


def rest_in(device: torch.device, arguments: Any, layers: Collection[int]) -> None:
    """Bring the states of ``layers`` in every cache among ``arguments`` to ``device``, for good.

    Raises UnsupportedError for a cache that moves its layers itself.
    """
    for cache in _caches(arguments):
        if getattr(cache, "offloading", False):
            raise UnsupportedError(
                "Cannot use a cache that offloads its layers with a block that the CPU computes.",
                "It would move the keys and values of that block back to the device.",
                "Use a plain DynamicCache: blocks that the CPU computes keep their part of it in RAM.",
            )
        for index in layers:
            if index < len(cache.layers):
                _move(cache.layers[index], device)


def _caches(arguments: Any) -> Iterator[Any]:
    """Objects with a list of layers, also where an encoder's and a decoder's are one object."""
    # A cache itself does not count as a container here, even where it is registered as one.
    for leaf in pytree.tree_leaves(arguments, is_leaf=lambda value: not isinstance(value, (list, tuple, dict))):
        both = [getattr(leaf, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        yield from (cache for cache in (leaf, *both) if isinstance(getattr(cache, "layers", None), list))


def _move(layer: Any, device: torch.device) -> None:
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.device.type != device.type:
            setattr(layer, name, value.to(device))
        elif isinstance(value, dict):  # several states, by number
            for key, state in value.items():
                if isinstance(state, torch.Tensor) and state.device.type != device.type:
                    value[key] = state.to(device)
        elif isinstance(value, torch.device) and value.type != device.type:
            setattr(layer, name, device)
