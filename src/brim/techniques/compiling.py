"""Compile each block separately, as torchtitan does (torchtitan/parallelisms/parallelize_llama.py).

Ansel et al., "PyTorch 2", ASPLOS 2024. A compiled block saves the tensors that PyTorch's partitioner chooses, and
intermediate values within a kernel take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from brim.errors import UsageError
from brim.predict.compiled.block import CompiledBlock, NotOneGraph
from brim.predict.compiled.torch_compile import is_traced, note_not_compiled
from brim.techniques.base import StandIn, in_force
from brim.techniques.checkpointing.technique import blocks


def apply(model: nn.Module, names: Iterable[str] | None = None, *, backend: str = "inductor") -> Compiling:
    """Compile the modules of these paths separately; by default every block.

    In a trace, earlier techniques such as checkpointing are compiled with a block, but its hooks are not. A
    module that is not a single graph runs uncompiled there, and the trace notes it.

    Raises UsageError for an unknown path, a block inside another one, or a block that is compiled already.
    """
    chosen = list(blocks(model) if names is None else names)
    modules = [_module(model, name) for name in chosen]
    _refuse(model, dict(zip(chosen, modules, strict=True)))
    if len(set(modules)) < len(modules) and names is not None:
        raise UsageError(f"Cannot compile {', '.join(chosen)}.", "One of them is named twice.", "Name it once.")
    return Compiling(dict.fromkeys(modules), backend)


class Compiling:
    def __init__(self, modules: Iterable[nn.Module], backend: str) -> None:
        compiled: dict[Any, Any] = {}
        self._placed = [_Forward(module, compiled, backend) for module in modules]

    def remove(self) -> None:
        for placed in self._placed:
            placed.remove()
        self._placed = []


class _Forward(StandIn):
    def __init__(self, module: nn.Module, known: dict[Any, Any], backend: str) -> None:
        super().__init__(module)
        self._traced = CompiledBlock(module, self._forward, known)
        self._backend = backend
        self._compiled: Callable[..., Any] | None = None

    @property
    def choice(self) -> tuple[Any, ...]:
        """The choices of the other replacements: blocks that are checkpointed differently are different graphs."""
        return tuple(getattr(placed, "choice", None) for placed in in_force(self._module) if placed is not self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return self._forward(*args, **kwargs)
        if is_traced():
            try:
                return self._traced(*args, **kwargs)
            except NotOneGraph as error:
                note_not_compiled(self._module, str(error))
                return self._forward(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, fullgraph=True, backend=self._backend)
        return self._compiled(*args, **kwargs)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise UsageError(f"Cannot compile {name!r} of {type(model).__name__}.", "It has no such part.") from error


def _refuse(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Raise UsageError for a graph within a graph, or a block that is compiled already."""
    compiled = [(path, part) for path, part in model.named_modules() if _is_compiled(part)]
    for name, module in chosen.items():
        inside = set(module.modules())
        for path, part in compiled:
            if part in inside or module in set(part.modules()):
                where = "It is" if part is module else f"{path} is"
                raise UsageError(
                    f"Cannot compile {name}.", f"{where} compiled already.", "Call .remove() on its handle first."
                )
        for other, part in chosen.items():
            if part is not module and part in inside:
                raise UsageError(f"Cannot compile both {name} and {other}.", "One is inside the other.")


def _is_compiled(module: nn.Module) -> bool:
    return any(isinstance(placed, _Forward) for placed in in_force(module))
