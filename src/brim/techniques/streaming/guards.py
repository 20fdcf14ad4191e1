"""Replace the methods of a fitted module that must be refused or work differently while it is fitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.memory.tiers import Memory
from brim.techniques.base import HANDLE_ATTRIBUTE, Handle
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.offloaded_parameter import reveal
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

_NOTHING = object()


class Guards:
    """Changes of a module while it is fitted; ``remove`` undoes all of them."""

    def __init__(self, model: nn.Module, memory: Memory) -> None:
        self._model, self._memory = model, memory
        self._marked: list[tuple[nn.Module, str, Any]] = []  # with its own attribute from before
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._moved: list[tuple[nn.Parameter, torch.device, torch.Tensor | None]] = []
        self._moved_buffers: list[tuple[nn.Module, str, torch.Tensor]] = []

    def install(self, handle: Handle, streamed_blocks: StreamedBlocks) -> None:
        """Mark the model as fitted, with ``handle`` for its user to find."""
        model, triggers = self._model, [trigger for s in streamed_blocks for trigger in s.block.triggers]
        modules = {id(m): m for m in [model, *model.children(), *(model.get_submodule(t) for t in triggers)]}
        for module in modules.values():
            self.replace(module, "__deepcopy__", _refusal("be copied (copy.deepcopy)"))
            self.replace(module, "__reduce_ex__", _refusal("be pickled (pickle, torch.save of a module)"))
            self.replace(module, "_apply", _guarded_apply(module))
        for module in (model, *model.children()):  # the models of a pipeline are fitted again by themselves
            self.replace(module, HANDLE_ATTRIBUTE, handle)
        self._watch_states(streamed_blocks, [model.get_submodule(trigger) for trigger in triggers])

    def _watch_states(self, streamed_blocks: StreamedBlocks, units: Sequence[nn.Module]) -> None:
        """Hook ``state_dict`` and ``load_state_dict`` of the model and of every part."""
        streamed_of = {id(p): (s, i) for s in streamed_blocks for i, p in enumerate(s.parameters)}
        for module in self._model.modules():
            owned = {name: streamed_of[id(p)] for name, p in module._parameters.items() if id(p) in streamed_of}
            if owned:
                state = _OwnState(owned)
                self._hooks.append(module.register_state_dict_post_hook(lambda *args, s=state: s.fill(*args)))
                self._hooks.append(module.register_load_state_dict_pre_hook(lambda *args, s=state: s.prepare(*args)))
        for module in units:
            self._hooks.append(
                module.register_load_state_dict_post_hook(lambda *_: streamed_blocks.adopt_all_changes())
            )

    def restore_later(self, parameter: nn.Parameter) -> None:
        """Remember the device of a parameter before it is copied to the compute tier.

        A prediction remembers the tensor itself, which may have no memory; a copy of it would.
        """
        is_remembered = self._memory.fake and not self._memory.is_traced_on_device(parameter)
        before = parameter.data if is_remembered else None
        self._moved.append((parameter, parameter.device, before))

    def move_buffers(self, on_host: Collection[int]) -> None:
        """Move buffers to the compute device until ``remove``, which copies them back.

        ``on_host``: the modules (by ``id``) that the CPU computes.
        """
        for module in self._model.modules():
            memory, stays = self._memory, id(module) in on_host
            device = torch.device("cpu") if stays else memory.device
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.device.type != "cpu" if stays else not memory.is_compute(buffer.device):
                    self._moved_buffers.append((module, name, buffer))
                    module._buffers[name] = buffer.to(device)

    def look_up(self, module: nn.Module) -> None:
        """Keep compilers out of an embedding that picks rows of a table at rest."""
        self.replace(module, "forward", torch.compiler.disable(module.forward))

    def remove(self) -> None:
        for module, name, before in reversed(self._marked):
            vars(module).pop(name, None)
            if before is not _NOTHING:
                vars(module)[name] = before
        for hook in self._hooks:
            hook.remove()
        for parameter, device, before in self._moved:
            parameter.data = parameter.data.to(device, copy=True) if before is None else before
        for module, name, buffer in self._moved_buffers:
            moved = module._buffers[name]
            module._buffers[name] = buffer if moved is None else buffer.copy_(moved)
        self._marked, self._hooks, self._moved, self._moved_buffers = [], [], [], []

    def replace(self, module: Any, name: str, value: object) -> None:
        """Set an attribute of a module, or of the replacement of its call, until ``remove``."""
        self._marked.append((module, name, vars(module).get(name, _NOTHING)))
        vars(module)[name] = value


class _OwnState:
    """The streamed parameters of a module in ``state_dict`` and ``load_state_dict``.

    Most rest in views that can be read and written to; the others are hollow.
    """

    def __init__(self, owned: dict[str, tuple[StreamedBlock, int]]) -> None:
        self._owned = owned

    def fill(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name, (streamed, index) in self._owned.items():
            streamed.store.settle()
            parameter = streamed.parameters[index]
            if prefix + name not in state or module._parameters.get(name) is not parameter:
                continue
            if streamed.uses:  # in a slot, which another block will soon overwrite
                state[prefix + name] = parameter.detach().clone()
            elif streamed.is_hollow(index):
                state[prefix + name] = streamed.store.value(index)

    def prepare(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: object
    ) -> None:
        for streamed, index in [owned for name, owned in self._owned.items() if prefix + name in state]:
            if metadata.get("assign_to_params_buffers"):
                raise UnsupportedError(
                    "load_state_dict(assign=True) was called on a module fitted by brim.",
                    "It would replace the parameters that brim moves.",
                    "Leave out assign: the values are copied to where brim keeps them.",
                )
            streamed.store.settle()  # or a pending save would overwrite the loaded values
            if streamed.is_hollow(index):
                reveal(streamed.parameters[index], streamed.store.value(index))


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: object) -> NoReturn:
        raise UnsupportedError(
            f"A module fitted by brim cannot {what}.",
            "Its weights are not all in memory.",
            "Call .brim.remove() first, or save module.state_dict().",
        )

    return refuse


def _guarded_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """A replacement for ``module._apply`` that allows ``to``, ``cuda``, ``half`` only where they change nothing."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for tensor in [*module.parameters(), *module.buffers()]:
            sample = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            changed = function(sample)
            if (changed.dtype, changed.device) != (sample.dtype, sample.device):
                raise UnsupportedError(
                    f"Cannot move or cast a module fitted by brim to {changed.device}, {changed.dtype}.",
                    "brim decides where its weights are, and keeps their dtype.",
                    "Cast before brim.fit, or call .brim.remove() first.",
                )
        return module

    return apply
