"""The forward hooks that bring a block's weights before its module runs and let them go after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.memory.tiers import DiskHome
from brim.techniques.streamed import Streamed

if TYPE_CHECKING:
    from brim.techniques.weight_streaming import WeightStreaming


class Enter:
    """The forward pre-hook of a trigger."""

    def __init__(self, handle: WeightStreaming, held: list[Streamed]) -> None:
        self._handle, self._held = handle, held

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            _refuse_gradients(module, self._held, args, kwargs)
        for streamed in self._held:
            self._handle._enter(streamed)


class Leave:
    """The forward hook of a trigger; also called when its forward raised."""

    def __init__(self, handle: WeightStreaming, held: list[Streamed]) -> None:
        self._handle, self._held = handle, held

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        for streamed in reversed(self._held):
            self._handle._leave(streamed)


class Recover:
    """The first pre-hook of the whole model: after Ctrl-C in a forward, PyTorch has called no hook of ours."""

    def __init__(self, handle: WeightStreaming) -> None:
        self._handle = handle

    def __call__(self, module: nn.Module, args: object) -> None:
        self._handle._let_go()


def check_rows(table: nn.Module, home: DiskHome, streamed: Streamed) -> torch.utils.hooks.RemovableHandle:
    """Before rows of ``table``, an embedding, are looked up in its file: make sure that they can be read."""
    assert isinstance(table, nn.Embedding)
    count = table.num_embeddings
    index = next(i for i, parameter in enumerate(streamed.parameters) if parameter is table.weight)

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        ids = args[0] if args else kwargs.get("input")
        if isinstance(ids, torch.Tensor):
            home.check_rows(index, [row for row in ids.unique().tolist() if 0 <= row < count])

    return table.register_forward_pre_hook(torch.compiler.disable(check), with_kwargs=True)


def _refuse_gradients(
    module: nn.Module, held: list[Streamed], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Autograd would keep a slot's bytes for backward, and they are another block's by then."""
    tensors = [*args, *kwargs.values(), *module.parameters()]
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"Gradients were to be computed through {held[0].block.name}, whose weights are streamed.",
            "This handle streams for inference only.",
            "Run the model under torch.no_grad(), or give a budget that holds it whole.",
        )
