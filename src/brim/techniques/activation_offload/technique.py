"""Activation offload: what autograd saves inside of chosen blocks leaves the compute tier until backward needs it.

From VRAM it goes to RAM, from RAM to disk, while forward goes on; it comes back in the reverse order while backward
goes on. The same bytes come back to the same strides, so gradients are plain PyTorch's bit for bit.
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
from brim.techniques.activation_offload.activations import Activations, Saved
from brim.techniques.activation_offload.ways import ToDisk, ToRam, way_for
from brim.techniques.base import Option
from brim.techniques.saved_tensor_hooks import Saving, is_recomputed, keepers_in_force

NAME = "activation_offload"

# A view of so small a part of its storage is most likely of something that stays anyway, such as a data set.
_LARGEST_SHARE = 16
_LEAST_BYTES = 2 * PAGE_BYTES


def options(
    trace: Trace, blocks: Sequence[str], *, compute: str = VRAM, smallest_bytes: int | None = None
) -> list[Option]:
    """One option per block: its activations go to RAM (``compute`` is VRAM) or to disk (it is RAM).

    ``trace`` is of training steps without the technique; its last step is looked at. Blocks whose activations are all
    smaller than ``smallest_bytes`` have none.
    """
    way = ToRam if compute == VRAM else ToDisk
    least_bytes = way.smallest_bytes if smallest_bytes is None else smallest_bytes
    begin = trace.step_starts[-1]
    offers = []
    for block in blocks:
        count = sum(
            storage.bytes
            for storage in trace.storages
            if storage.category is Category.ACTIVATION and storage.born >= begin and storage.bytes >= least_bytes
            if not block or storage.module == block or storage.module.startswith(f"{block}.")
        )
        if count:
            moves = {(compute, way.tier): count, (way.tier, compute): count}
            saves = {compute: count, way.tier: -count}
            offers.append(Option(technique=NAME, block=block, choice=way.tier, saves_bytes=saves, moves_bytes=moves))
    return offers


def apply(
    model: nn.Module,
    blocks: Sequence[str],
    memory: Memory,
    *,
    smallest_bytes: int | None = None,
    window_bytes: int | None = None,
) -> ActivationOffload:
    """Offload what autograd saves inside of ``blocks``, names of submodules ("" is the model itself).

    Where VRAM is the compute tier it goes to RAM, where RAM is, to disk. Storages of less than ``smallest_bytes``
    (1 MiB on the way to RAM, 256 KiB on the way to disk) stay, and so do parameters and buffers and what lies in the
    pools. At most ``window_bytes`` (256 MiB, 64 MiB) of what was saved wait in the compute tier during forward, and
    as many come back ahead of use during backward; a smaller window takes less memory and hides less of the copies.

    Raises UsageError for a block that does not exist, is never called or is offloaded already. A step raises
    BudgetError when the pools or the disk's budget have no room, and TransferError when the disk fails; the next step
    is right again.
    """
    paths = dict(model.named_modules(remove_duplicate=False))
    _check(model, blocks, paths)
    way = way_for(memory)
    least_bytes = max(_LEAST_BYTES, way.smallest_bytes if smallest_bytes is None else smallest_bytes)
    activations = Activations(way, window_bytes=way.window_bytes if window_bytes is None else window_bytes)
    return ActivationOffload([paths[block] for block in blocks], _Rules(memory, least_bytes, activations))


def _check(model: nn.Module, blocks: Sequence[str], paths: dict[str, nn.Module]) -> None:
    asked = f"Cannot offload the activations of {list(blocks)} of {type(model).__name__}."
    if not blocks or isinstance(blocks, str):
        raise UsageError(asked, "The list is empty.", "Give a list of names of submodules.")
    missing = [block for block in blocks if block not in paths]
    if missing:
        raise UsageError(asked, f"The model has no part {missing[0]!r}.", "Use names of named_modules().")
    for block in blocks:
        if type(paths[block]).forward is nn.Module.forward:
            raise UsageError(
                asked, f"{block!r} is never called: it only holds other modules.", "Name the modules that it holds."
            )
    for path, module in paths.items():
        if any(isinstance(layer, _Bracket) for layer in _layers(module)):
            raise UsageError(asked, f"{path or 'It'!r} is offloaded already.", "Call remove() of that handle first.")


def _layers(module: nn.Module) -> Iterator[object]:
    """What stands in for the class's ``forward``, outermost first."""
    layer = vars(module).get("forward")
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


class ActivationOffload:
    """The handle: the technique in force on some blocks."""

    def __init__(self, modules: Sequence[nn.Module], rules: _Rules) -> None:
        self.smallest_bytes = rules.smallest_bytes
        self.window_bytes = rules.activations.window_bytes
        self._rules: _Rules | None = rules
        self._brackets: list[_Bracket] = []
        for module in {id(module): module for module in modules}.values():
            self._brackets.append(_Bracket(module, "forward", rules))
            # transformers checkpoints around the whole call, hooks included: what that saves is the block's too.
            if "_gradient_checkpointing_func" in vars(module):
                self._brackets.append(_Bracket(module, "_gradient_checkpointing_func", rules))

    @property
    def misses(self) -> int:
        """Activations that backward had to wait for from the start: their order was not foreseen."""
        return self._rules.activations.misses if self._rules is not None else 0

    def settle(self) -> None:
        """Give back what belonged to graphs that are gone, and memory that is kept for the next step."""
        if self._rules is not None:
            self._rules.activations.settle()

    def remove(self) -> None:
        """Give the blocks back as they were. A second call does nothing.

        A graph that is still there keeps what it needs, as long as the memory is not closed.
        """
        for bracket in reversed(self._brackets):
            bracket.remove()
        self.settle()
        self._brackets, self._rules = [], None


class _Rules:
    """What is taken, from which blocks, and where to."""

    def __init__(self, memory: Memory, smallest_bytes: int, activations: Activations) -> None:
        self.smallest_bytes, self.activations = smallest_bytes, activations
        self._pools = (memory.compute, memory.ram)
        self._type = FakeTensor if memory.fake else torch.Tensor
        self._device, self._fake = memory.device, memory.fake

    def takes(self, tensor: torch.Tensor, own: frozenset[int]) -> bool:
        """Whether ``tensor`` may leave: dense memory on the compute device that is nobody's but autograd's."""
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
        # A weight that is used as it is or transposed: wherever it rests, it is not an activation.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if any(pool.owns(tensor) for pool in self._pools):
            return False
        return self._fake or tensor.data_ptr() % tensor.element_size() == 0


def _span_bytes(tensor: torch.Tensor) -> int:
    """From the first to the last element, as they lie in memory."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _Call:
    """One call of a block: the keeper of what is saved in it."""

    def __init__(self, rules: _Rules, module: nn.Module) -> None:
        self.rules = rules
        tensors = [*module.parameters(), *module.buffers()]  # now: they may be elsewhere in the next call
        self._own = frozenset(tensor.untyped_storage()._cdata for tensor in tensors)

    def pack(self, tensor: torch.Tensor) -> Saved | None:
        return self.rules.activations.keep(tensor) if self.rules.takes(tensor, self._own) else None


class _Bracket:
    """Stands for one of a module's functions, and sees what is saved in it.

    Around the function and not in hooks: after Ctrl-C PyTorch calls none, and the thread would keep our hooks.
    """

    def __init__(self, module: nn.Module, name: str, rules: _Rules) -> None:
        self._module, self._name, self._rules = module, name, rules
        self._own: Callable[..., Any] | None = vars(module).get(name)  # None: the class's
        self._active = True
        self.__wrapped__: Callable[..., Any]
        functools.update_wrapper(self, getattr(module, name), updated=())
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._sees():
            return self.__wrapped__(*args, **kwargs)
        with Saving(_Call(self._rules, self._module)):
            return self.__wrapped__(*args, **kwargs)

    def _sees(self) -> bool:
        """Whether something is saved for later: not by what backward computes again, which it needs at once."""
        if not self._active or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return False
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None or is_recomputed():
            return False
        return not any(isinstance(k, _Call) and k.rules is self._rules for k in keepers_in_force())

    def remove(self) -> None:
        self._active = False  # if another technique has put itself around, it will go on calling this
        if vars(self._module).get(self._name) is self:
            if self._own is None:
                del vars(self._module)[self._name]
            else:
                vars(self._module)[self._name] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is a plain one."""
        copied = memo[id(self._module)]
        return getattr(type(copied), self._name).__get__(copied) if self._own is None else self._own
