"""CPU compute: the CPU computes blocks whose weights rest in RAM, while the link copies other blocks.

A decode step at batch 1 reads every weight once and computes little with it. The weights beyond the compute tier are
read by both at once: the link copies some of them, the CPU reads the rest in RAM. Then a step takes
overflow / (link + RAM) seconds, both in bytes per second (cf. PowerInfer, arXiv:2312.12456, and llama.cpp's layers on
the CPU, beside which the link is idle).

A call's inputs are copied to RAM, its outputs back. The states that a block keeps between calls (keys and values in a
cache) are created in RAM and stay there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from brim.errors import UnsupportedError, UsageError
from brim.techniques.base import refuse_gradients
from brim.techniques.blocks import Partition
from brim.techniques.cpu_compute.activation_transfer import CPU, ActivationTransfer
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.placement import COMPUTE_RAM, Companion, Placement, computable
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

# A plan's setting: the page-locked RAM that activations are copied through; it grows where needed.
TRANSFER_BYTES = "transfer_bytes"


class HostCompute(Companion):
    """The blocks of a fitted model that the CPU computes."""

    def __init__(self, placement: Placement, streamed_blocks: StreamedBlocks, *, partition: Partition) -> None:
        self._placement, self._streamed_blocks, self._computable = placement, streamed_blocks, computable(partition)
        self._blocks: dict[str, list[StreamedBlock]] = {}  # by the path of the module that needs them
        if streamed_blocks.training:
            raise UnsupportedError(
                "Cannot train with a plan in which the CPU computes some blocks.",
                "That is for inference: the activations of these blocks are in RAM, where backward cannot use them.",
                "Plan without compute:ram, or fit the model for inference.",
            )
        if streamed_blocks.memory.host is None:
            raise UsageError(
                "Cannot apply a plan in which the CPU computes some blocks beside a GPU.",
                "This machine has no GPU: the CPU computes all blocks.",
                "Make the plan for this machine.",
            )
        self.transfer = ActivationTransfer(streamed_blocks.memory)

    def prepare(self) -> None:
        self.transfer.make_room(self._placement.plan.settings.get(TRANSFER_BYTES, 0))

    def take(self, streamed: StreamedBlock, choice: str) -> None:
        if choice != COMPUTE_RAM:
            return
        block = streamed.block
        if block.name not in self._computable:
            raise UnsupportedError(
                f"Cannot compute {block.name} on the CPU.",
                "Its modules use parameters of other blocks, which may be in another tier.",
                "Plan it as resident or streamed.",
            )
        for trigger in block.triggers:
            if trigger not in block.lookups:  # look-ups read rows at rest in any case
                self._blocks.setdefault(trigger, []).append(streamed)
        self._streamed_blocks.gathering[streamed.index] = self.bound

    @contextlib.contextmanager
    def bound(self, streamed: StreamedBlock) -> Iterator[None]:
        """Bind the parameters to RAM while the block is in use."""
        if not streamed.uses:
            self._streamed_blocks.adopt_changes(streamed)
            streamed.store.settle()
            if not streamed.fake:
                self._streamed_blocks.bind(streamed, [view for view in streamed.store.rest() if view is not None])
        streamed.uses += 1
        try:
            yield
        finally:
            streamed.uses -= 1
            if not streamed.uses:
                if streamed.is_changed():
                    streamed.store.write_back([p.data for p in streamed.parameters])
                streamed.rest()

    def install(self, guards: Guards) -> None:
        for trigger, blocks in self._blocks.items():
            module = self._placement.model.get_submodule(trigger)
            call = _Call(self, module, blocks)
            guards.replace(module, "forward", torch.compiler.disable(call.forward))

    def free(self) -> None:
        self.transfer.free()


class _Call:
    """Replaces the forward of a module. Its hooks still get tensors of the compute tier."""

    def __init__(self, host: HostCompute, module: nn.Module, blocks: Sequence[StreamedBlock]) -> None:
        self._host, self._module, self._blocks = host, module, blocks
        self._forward: Callable[..., Any] = module.forward  # of the instance, or of its class
        self._label = f"{blocks[0].block.name}, activations"
        # transformers' modules with states in a cache have the index of their layer.
        layer_indexes = (getattr(part, "layer_idx", None) for part in module.modules())
        self._layers = frozenset(index for index in layer_indexes if isinstance(index, int))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_gradients(
                [*args, *kwargs.values(), *self._module.parameters()],
                f"Cannot compute gradients through {self._blocks[0].block.name}, which the CPU computes.",
                "Blocks that the CPU computes from RAM are for inference only.",
                "Run the model under torch.no_grad(), or fit it for training.",
            )
        rest_in(CPU, (args, kwargs), self._layers)
        return self._host.transfer.call(self._with_weights, self._label, args, kwargs)

    def _with_weights(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for streamed in self._blocks:
                stack.enter_context(self._host.bound(streamed))
            return self._forward(*args, **kwargs)


def rest_in(device: torch.device, arguments: Any, layers: Collection[int]) -> None:
    """Move the states of ``layers`` in every cache among ``arguments`` to ``device``, permanently.

    transformers' caches (``transformers.cache_utils.Cache``) have an object per layer, which takes the device of its
    first input: only a cache that was filled or laid out elsewhere has to be moved. Raises UnsupportedError for a
    cache that moves its layers itself.
    """
    for cache in _caches(arguments):
        if getattr(cache, "offloading", False):
            raise UnsupportedError(
                "Cannot use a cache that offloads its layers with a block that the CPU computes.",
                "It would move the keys and values of that block back to the device.",
                "Use a plain DynamicCache: blocks that the CPU computes keep their part of it in RAM.",
            )
        for index in layers:
            if index < len(cache.layers):
                _move(cache.layers[index], device)


def _caches(arguments: Any) -> Iterator[Any]:
    """The caches with a list of layers in ``arguments``, also an encoder's and a decoder's in one object."""
    # A cache is a leaf here, even if it is registered as a container.
    for leaf in pytree.tree_leaves(arguments, is_leaf=lambda value: not isinstance(value, (list, tuple, dict))):
        nested = [getattr(leaf, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        yield from (cache for cache in (leaf, *nested) if isinstance(getattr(cache, "layers", None), list))


def _move(layer: Any, device: torch.device) -> None:
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.device.type != device.type:
            setattr(layer, name, value.to(device))
        elif isinstance(value, dict):  # several states, by number
            for key, state in value.items():
                if isinstance(state, torch.Tensor) and state.device.type != device.type:
                    value[key] = state.to(device)
        elif isinstance(value, torch.device) and value.type != device.type:
            setattr(layer, name, device)
