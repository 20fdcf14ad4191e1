"""Every object that the garbage collector knows, those that the program has frozen among them.

``gc.get_objects`` leaves out what ``gc.freeze`` has put aside, and the collector has one call to bring all of that
back and one to put everything aside, what was never frozen included. A program freezes what it has for a reason:
pages that it shares with processes that it forks, or pauses that it does not want. So what was not frozen is taken
out of the collector's lists and given to it anew, which puts it among the young again.
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
    """A function of Python itself that is given an object; the interpreter's lock is held in it."""
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = (ctypes.py_object,), None
    return function


_UNTRACK, _TRACK = _of_python("PyObject_GC_UnTrack"), _of_python("PyObject_GC_Track")


def all_objects() -> list[Any]:
    """What the collector knows and what is frozen; that stays frozen, and nothing else is."""
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
    """Take ``objects`` out of the collector's lists, and back in among the young.

    To track what is tracked ends the process, and another thread that fills an empty dictionary tracks it. So both
    calls for all of them are made without a line of Python in between, where threads take turns.
    """
    twice = chain.from_iterable(zip(objects, objects, strict=True))
    deque(map(operator.call, cycle((_UNTRACK, _TRACK)), twice), maxlen=0)
