"""List all objects of the garbage collector, those that the program has frozen included.

``gc.get_objects`` leaves out objects set aside by ``gc.freeze``, and the collector can only unfreeze or freeze all
objects at once. A program freezes objects on purpose: to share pages with processes that it forks, or to avoid
pauses. So objects that were not frozen before are untracked and tracked again, which puts them into the young
generation.
"""

from __future__ import annotations

import ctypes
import gc
import operator
from collections import deque
from collections.abc import Sequence
from itertools import chain, cycle
from typing import Any


def _of_python(name: str) -> Any:
    """A function of Python's C API that takes an object, called with the interpreter's lock held."""
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = (ctypes.py_object,), None
    return function


_UNTRACK, _TRACK = _of_python("PyObject_GC_UnTrack"), _of_python("PyObject_GC_Track")


def all_objects() -> list[Any]:
    """All tracked objects, frozen ones included. The same objects are frozen afterwards as before."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    collects = gc.isenabled()
    gc.disable()
    try:
        free = gc.get_objects()
        gc.unfreeze()
        objects = gc.get_objects()
        gc.freeze()
        _melt(free)
    finally:
        if collects:
            gc.enable()
    return objects


def _melt(objects: Sequence[Any]) -> None:
    """Move ``objects`` out of the permanent generation, into the young one.

    Tracking a tracked object aborts the process, and another thread tracks a dictionary when it first fills it. So
    both calls are made for all objects without executing Python code in between, where threads switch.
    """
    twice = chain.from_iterable(zip(objects, objects, strict=True))
    deque(map(operator.call, cycle((_UNTRACK, _TRACK)), twice), maxlen=0)
