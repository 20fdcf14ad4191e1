"""What stands in a module's instance for its forward. Hooks of the module stay outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class StandIn:
    """``_before``: what was set there by someone else; None: the class's own is in force."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, vars(module).get("forward")
        self._active = True
        vars(module)["forward"] = self

    def remove(self) -> None:
        """What another technique placed on top keeps working: this one then only passes on, until that is removed."""
        self._active = False
        while isinstance(top := vars(self._module).get("forward"), StandIn) and not top._active:
            if top._before is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = top._before

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def in_force(module: nn.Module) -> Iterator[StandIn]:
    """Those of ``module``, the outermost first."""
    stand_in = vars(module).get("forward")
    while isinstance(stand_in, StandIn):
        if stand_in._active:
            yield stand_in
        stand_in = stand_in._before
