"""Call back when a module has been imported, without importing it: many programs never do, or only later."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec


def when_imported(name: str, then: Callable[[types.ModuleType], object]) -> None:
    """Call ``then`` with the module ``name`` once its import has finished: now, if it is in sys.modules."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """The first finder on ``sys.meta_path``; it finds nothing itself, and is removed once the module is imported.

    Libraries look up the spec of ``torch`` long before anyone imports it, or without ever importing it.
    """

    def __init__(self, name: str, then: Callable[[types.ModuleType], object]) -> None:
        self._name, self._then = name, then
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asking:
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
                self._then(module)

        vars(loader)["exec_module"] = exec_module
        return spec
