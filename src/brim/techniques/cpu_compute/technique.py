"""Host compute: blocks whose weights rest in RAM and which the CPU computes there, while the link brings others.

A decode step at batch 1 reads every weight once and computes little with it. What does not fit the compute tier is
read by two at once: the link carries some of it, the CPU reads the rest where it is. Then a step takes
overflow / (link + RAM) seconds, both in bytes per second (cf. PowerInfer, arXiv:2312.12456, and llama.cpp's layers on
the CPU, which the link does not work beside).

Activations are copied: a call's inputs to RAM, its outputs back. What a block keeps for itself from call to call
(keys and values in a cache) is made in RAM and stays there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.techniques.blocks import Partition
from brim.techniques.cpu_compute.activation_transfer import ActivationTransfer
from brim.techniques.cpu_compute.kept_states import rest_in
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.placement import computable
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

# A plan's setting: the page-locked RAM that activations pass through; it grows where needed.
TRANSFER_BYTES = "transfer_bytes"
_CPU = torch.device("cpu")


class HostCompute:
    """Calls of the blocks that the CPU computes, for one fitted model. ``transfer_bytes``: see ``TRANSFER_BYTES``."""

    def __init__(self, streamed_blocks: StreamedBlocks, partition: Partition, *, transfer_bytes: int) -> None:
        self._streamed_blocks, self._computable = streamed_blocks, computable(partition)
        self._held: dict[str, list[Streamed]] = {}
        if streamed_blocks.training:
            raise UnsupportedError(
                "Cannot train by a plan whose blocks the CPU computes.",
                "Such blocks are for inference: their activations are in RAM, and backward does not use those.",
                "Plan without compute:ram, or fit the model for inference.",
            )
        if streamed_blocks.memory.host is None:
            raise UsageError(
                "Cannot apply a plan whose blocks the CPU computes from RAM.",
                "Here RAM is the compute tier, so the CPU computes all of them.",
                "Make the plan for this machine.",
            )
        self.transfer = ActivationTransfer(streamed_blocks.memory, transfer_bytes)

    def take(self, streamed: Streamed) -> None:
        """Have the CPU compute a block that rests in RAM. Raises UnsupportedError where it cannot."""
        block = streamed.block
        if block.name not in self._computable:
            raise UnsupportedError(
                f"Cannot compute {block.name} on the CPU.",
                "Its modules need parameters of other blocks, which are elsewhere.",
                "Plan it as resident or streamed.",
            )
        for trigger in block.triggers:
            if trigger not in block.lookups:  # rows are picked where the table rests in any case
                self._held.setdefault(trigger, []).append(streamed)

    def has(self, streamed: Streamed) -> bool:
        """Whether the CPU computes the block, so that it never comes to the compute tier."""
        return any(streamed is other for blocks in self._held.values() for other in blocks)

    @contextlib.contextmanager
    def bound(self, streamed: Streamed) -> Iterator[None]:
        """The parameters point to where the block rests for as long as it is in use."""
        if not streamed.uses:
            self._streamed_blocks.adopt_changes(streamed)
            streamed.store.settle()
            self._bind(streamed)
        streamed.uses += 1
        try:
            yield
        finally:
            streamed.uses -= 1
            if not streamed.uses:
                if streamed.is_changed():
                    streamed.store.write_back([p.data for p in streamed.parameters])
                streamed.rest()

    def _bind(self, streamed: Streamed) -> None:
        if streamed.fake:
            return
        self._streamed_blocks.bind(streamed, [view for view in streamed.store.rest() if view is not None])

    def install(self, model: nn.Module, guards: Guards) -> None:
        for trigger, blocks in self._held.items():
            module = model.get_submodule(trigger)
            call = _Call(self, module, blocks)
            guards.replace(module, "forward", torch.compiler.disable(call.forward))

    def free(self) -> None:
        self.transfer.free()


class _Call:
    """Stands for the forward of one module: hooks, the user's and ours, see tensors of the compute tier."""

    def __init__(self, host: HostCompute, module: nn.Module, held: Sequence[Streamed]) -> None:
        self._host, self._module, self._held = host, module, held
        self._forward: Callable[..., Any] = module.forward  # what an instance has of its own, or its class
        self._label = f"{held[0].block.name}, activations"
        # transformers' modules that keep states in a cache say which of its layers is theirs.
        layer_indexes = (getattr(part, "layer_idx", None) for part in module.modules())
        self._layers = frozenset(index for index in layer_indexes if isinstance(index, int))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        rest_in(_CPU, (args, kwargs), self._layers)
        return self._host.transfer.call(self._with_weights, self._label, args, kwargs)

    def _with_weights(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for streamed in self._held:
                stack.enter_context(self._host.bound(streamed))
            return self._forward(*args, **kwargs)

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [*args, *kwargs.values(), *self._module.parameters()]
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise UnsupportedError(
                f"Cannot compute gradients through {self._held[0].block.name}, which the CPU computes.",
                "Blocks that the CPU computes from RAM are for inference only.",
                "Run the model under torch.no_grad(), or fit it for training.",
            )
