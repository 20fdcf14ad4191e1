"""Activation offload: tensors that autograd saves in chosen blocks leave the compute tier until backward needs them.

They go from VRAM to RAM, or from RAM to disk, during forward, and come back in reverse order during backward. The
same bytes come back with the same strides, so gradients are plain PyTorch's bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from brim.core import Category, Trace
from brim.core.hardware import VRAM
from brim.errors import UsageError
from brim.memory.pool import PAGE_BYTES
from brim.memory.tiers import Memory
from brim.techniques.activation_offload.activations import Activations, ToDisk, ToRam, destination_for
from brim.techniques.saved_tensor_hooks import Saving, Unpack, active_packers, is_recomputed

NAME = "activation_offload"

# A tensor with a smaller share of its storage is most likely a view of long-lived memory, such as a data set.
_LARGEST_SHARE = 16
_LEAST_BYTES = 2 * PAGE_BYTES


def offloadable_bytes(
    trace: Trace, blocks: Sequence[str], *, compute: str, smallest_bytes: int | None = None
) -> dict[str, int]:
    """Return the bytes of activations that each block can offload: to RAM (``compute`` is VRAM) or disk (it is RAM).

    They are computed from the last step of ``trace``, a training without the technique. Activations smaller than
    ``smallest_bytes`` stay.
    """
    destination = ToRam if compute == VRAM else ToDisk
    least_bytes = destination.smallest_bytes if smallest_bytes is None else smallest_bytes
    begin = trace.step_starts[-1]
    return {
        block: sum(
            storage.bytes
            for storage in trace.storages
            if storage.category is Category.ACTIVATION and storage.born >= begin and storage.bytes >= least_bytes
            if not block or storage.module == block or storage.module.startswith(f"{block}.")
        )
        for block in blocks
    }


def apply(
    model: nn.Module,
    blocks: Sequence[str],
    memory: Memory,
    *,
    smallest_bytes: int | None = None,
    window_bytes: int | None = None,
) -> ActivationOffload:
    """Offload the tensors that autograd saves in ``blocks``, names of submodules ("" is the model itself).

    They go to RAM where VRAM is the compute tier, else to disk. Storages of less than ``smallest_bytes`` (1 MiB to
    RAM, 256 KiB to disk), parameters, buffers and memory of the pools stay. At most ``window_bytes`` (256 MiB, 64
    MiB) of saved tensors wait in the compute tier during forward, and as many are fetched ahead of use during
    backward; a smaller window takes less memory and hides less of the copies.

    Raises UsageError for a block that does not exist, is never called or is offloaded already. A step raises
    BudgetError when the pools or the disk's budget have no room, and TransferError when the disk fails; the next step
    is right again.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    _check(model, blocks, paths)
    destination = destination_for(memory)
    least_bytes = max(_LEAST_BYTES, destination.smallest_bytes if smallest_bytes is None else smallest_bytes)
    activations = Activations(
        destination, window_bytes=destination.window_bytes if window_bytes is None else window_bytes
    )
    return ActivationOffload([paths[block] for block in blocks], _Selection(memory, least_bytes, activations))


def _check(model: nn.Module, blocks: Sequence[str], paths: dict[str, nn.Module]) -> None:
    problem = f"Cannot offload the activations of {list(blocks)} of {type(model).__name__}."
    if not blocks or isinstance(blocks, str):
        raise UsageError(problem, "The list is empty.", "Give a list of names of submodules.")
    missing = [block for block in blocks if block not in paths]
    if missing:
        raise UsageError(problem, f"The model has no part {missing[0]!r}.", "Use names of named_modules().")
    for block in blocks:
        if type(paths[block]).forward is nn.Module.forward:
            raise UsageError(
                problem, f"{block!r} is never called: it only holds other modules.", "Name the modules that it holds."
            )
    for path, module in paths.items():
        if any(isinstance(layer, _Wrapper) for layer in _wrapped_forwards(module)):
            raise UsageError(
                problem, f"{path or 'It'!r} is offloaded already.", "Call .remove() on its handle first."
            )


def _wrapped_forwards(module: nn.Module) -> Iterator[object]:
    layer = vars(module).get("forward")
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


class ActivationOffload:
    """The handle: the technique in force on some blocks."""

    def __init__(self, modules: Sequence[nn.Module], selection: _Selection) -> None:
        self.smallest_bytes = selection.smallest_bytes
        self.window_bytes = selection.activations.window_bytes
        self._selection: _Selection | None = selection
        self._wrappers: list[_Wrapper] = []
        for module in {id(module): module for module in modules}.values():
            self._wrappers.append(_Wrapper(module, "forward", selection))
            # transformers checkpoints the entire call, hooks included, which saves tensors of the block, too.
            if "_gradient_checkpointing_func" in vars(module):
                self._wrappers.append(_Wrapper(module, "_gradient_checkpointing_func", selection))

    @property
    def misses(self) -> int:
        """The number of activations that backward needed before they were fetched: their order was not predicted."""
        return self._selection.activations.misses if self._selection is not None else 0

    def settle(self) -> None:
        """Free the memory of deleted graphs, and that cached for the next step."""
        if self._selection is not None:
            self._selection.activations.settle()

    def remove(self) -> None:
        """Give the blocks back as they were. A second call does nothing.

        An existing graph can still be differentiated, as long as the memory is not closed.
        """
        for wrapper in reversed(self._wrappers):
            wrapper.remove()
        self.settle()
        self._wrappers, self._selection = [], None


class _Selection:
    """Selects the tensors to offload."""

    def __init__(self, memory: Memory, smallest_bytes: int, activations: Activations) -> None:
        self.smallest_bytes, self.activations = smallest_bytes, activations
        self._pools = (memory.compute, memory.ram)
        self._type = FakeTensor if memory.fake else torch.Tensor
        self._device, self._fake = memory.device, memory.fake

    def takes(self, tensor: torch.Tensor, own: frozenset[int]) -> bool:
        """Return whether to offload ``tensor``: dense memory on the compute device that only autograd uses."""
        if type(tensor) is not self._type or tensor.layout is not torch.strided:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.device.type != self._device.type:
            return False
        storage = tensor.untyped_storage()
        count = storage.nbytes()
        if count < self.smallest_bytes or count > _LARGEST_SHARE * _span_bytes(tensor) or storage._cdata in own:
            return False
        # A weight, or a view of it such as its transpose, is not an activation.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if any(pool.owns(tensor) for pool in self._pools):
            return False
        return self._fake or tensor.data_ptr() % tensor.element_size() == 0


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element in memory."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _CallPacker:
    def __init__(self, selection: _Selection, module: nn.Module) -> None:
        self.selection = selection
        tensors = [*module.parameters(), *module.buffers()]  # of this call: their memory may change between calls
        self._storages = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)

    def pack(self, tensor: torch.Tensor) -> Unpack | None:
        return (
            self.selection.activations.keep(tensor).unpack if self.selection.takes(tensor, self._storages) else None
        )


class _Wrapper:
    """Wraps a function of a module with hooks for saved tensors.

    Not with forward hooks: PyTorch calls none after Ctrl-C, and the thread would keep the saved-tensor hooks.
    """

    def __init__(self, module: nn.Module, name: str, selection: _Selection) -> None:
        self._module, self._name, self._selection = module, name, selection
        self._before: Callable[..., Any] | None = vars(module).get(name)  # None: the class's
        self._active = True
        self.__wrapped__: Callable[..., Any]
        functools.update_wrapper(self, getattr(module, name), updated=())
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._sees():
            return self.__wrapped__(*args, **kwargs)
        with Saving(_CallPacker(self._selection, self._module)):
            return self.__wrapped__(*args, **kwargs)

    def _sees(self) -> bool:
        """Return whether tensors are saved for a later backward pass, and not in a recomputation within it."""
        if not self._active or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return False
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None or is_recomputed():
            return False
        return not any(isinstance(k, _CallPacker) and k.selection is self._selection for k in active_packers())

    def remove(self) -> None:
        self._active = False  # a wrapper of another technique may still call this one
        if vars(self._module).get(self._name) is self:
            if self._before is None:
                del vars(self._module)[self._name]
            else:
                vars(self._module)[self._name] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The function of a copied module, which is not wrapped."""
        copied = memo[id(self._module)]
        return getattr(type(copied), self._name).__get__(copied) if self._before is None else self._before
