"""Compile each block separately, as torchtitan does (torchtitan/parallelisms/parallelize_llama.py).

Ansel et al., "PyTorch 2", ASPLOS 2024. A compiled block saves the tensors that PyTorch's partitioner chooses, and
intermediate values within a kernel take no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from brim.predict.compiled.block import CompiledBlock, NotOneGraph
from brim.predict.compiled.torch_compile import is_traced, note_not_compiled
from brim.techniques.base import StandIn, in_force
from brim.techniques.checkpointing.technique import blocks


def apply(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile every block of ``model`` separately.

    In a trace, earlier techniques such as checkpointing are compiled with a block, but its hooks are not. A
    module that is not a single graph runs uncompiled there, and the trace notes it.
    """
    compiled: dict[Any, Any] = {}
    for name in blocks(model):
        _Forward(model.get_submodule(name), compiled, backend)


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
        if is_traced():
            try:
                return self._traced(*args, **kwargs)
            except NotOneGraph as error:
                note_not_compiled(self._module, str(error))
                return self._forward(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._forward, fullgraph=True, backend=self._backend)
        return self._compiled(*args, **kwargs)
