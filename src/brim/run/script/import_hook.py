"""Call back when PyTorch has been imported, without importing it: many programs never do, or only later."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec


def when_imported(then: Callable[[], None]) -> None:
    """Call ``then`` once the import of ``torch`` has finished: now, if it is imported already."""
    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(then))


class _Finder(importlib.abc.MetaPathFinder):
    """The first finder on ``sys.meta_path``; it finds nothing itself, and is removed once ``torch`` is imported.

    Libraries look up the spec of ``torch`` long before anyone imports it, or without ever importing it.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        others = vars(loader).get("exec_module")  # set by another finder that waits for the import

        def exec_module(module: types.ModuleType) -> None:
            if others is None:
                del vars(loader)["exec_module"]
            else:
                vars(loader)["exec_module"] = others
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        vars(loader)["exec_module"] = exec_module
        return spec
