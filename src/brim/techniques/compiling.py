"""Compiling: each block by itself, as torchtitan does it (torchtitan/parallelisms/parallelize_llama.py).

Ansel et al., "PyTorch 2", ASPLOS 2024. A compiled block keeps what PyTorch's partitioner chooses, and what lies
between the operations of one kernel is in no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from brim.predict.compiled import is_traced, note_not_compiled
from brim.predict.compiled_block import CompiledBlock, NotOneGraph
from brim.techniques.checkpointing import blocks

NAME = "compiling"


def apply(model: nn.Module, names: Iterable[str] | None = None, *, backend: str = "inductor") -> Compiling:
    """Compile the modules of these paths, each by itself; without names every block.

    In a trace, what was placed in them before, such as checkpointing, is compiled with them; hooks on them stay
    outside. A module that is no one graph runs as it is written there, and the trace says so.
    """
    chosen = list(blocks(model) if names is None else names)
    return Compiling([model.get_submodule(name) for name in chosen], backend)


class Compiling:
    """The handle."""

    def __init__(self, modules: Iterable[nn.Module], backend: str) -> None:
        known: dict[Any, Any] = {}
        self._placed = [_Forward(module, known, backend) for module in modules]

    def remove(self) -> None:
        for placed in self._placed:
            placed.remove()
        self._placed = []


class _Forward:
    """Stands in a module's instance for its forward."""

    def __init__(self, module: nn.Module, known: dict[Any, Any], backend: str) -> None:
        self._module, self._before = module, vars(module).get("forward")
        self._traced = CompiledBlock(module, self._plain, known)
        self._backend = backend
        self._compiled: Callable[..., Any] | None = None
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            try:
                return self._traced(*args, **kwargs)
            except NotOneGraph as error:
                note_not_compiled(self._module, str(error))
                return self._plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._plain, fullgraph=True, backend=self._backend)
        return self._compiled(*args, **kwargs)

    def remove(self) -> None:
        if vars(self._module).get("forward") is self:
            if self._before is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = self._before

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)
