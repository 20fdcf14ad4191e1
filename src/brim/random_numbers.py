"""The random generators of a program: the default ones of Python, NumPy and PyTorch's CPU, and its own objects."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_CPU = torch.device("cpu")


def default_generators() -> list[Any]:
    """Return the generators behind the functions of ``random``, ``numpy.random`` (if imported) and ``torch``."""
    numpy = sys.modules.get("numpy")
    functions: list[Any] = [random.getstate] if numpy is None else [random.getstate, numpy.random.get_state]
    return [torch.default_generator, *(function.__self__ for function in functions)]


def all_generators() -> list[Any]:
    """Return all generators on the CPU that the garbage collector reaches. Visiting every object takes 0.1 s."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random, torch.Generator)
    kinds += () if numpy is None else (numpy.random.RandomState, numpy.random.BitGenerator)
    held = gc.get_referents(*gc.get_objects())  # the collector does not track generators of torch, only their owners
    types = {
        one for one in set(map(type, held)) if issubclass(one, kinds) and not issubclass(one, random.SystemRandom)
    }
    found = [one for one in held if type(one) in types and getattr(one, "device", _CPU) == _CPU]
    inner = {id(getattr(one, "_bit_generator", None)) for one in found if hasattr(one, "set_state")}  # of RandomState
    return list({id(one): one for one in [*default_generators(), *found] if id(one) not in inner}.values())


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.state


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.state = state


@contextmanager
def restored(generators: Sequence[Any]) -> Iterator[None]:
    """Restore the states of ``generators`` at the end."""
    states = [state_of(one) for one in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)
