"""The running module, and storages of parameters, buffers, gradients, optimizer state and a KV cache.

Uses PyTorch's global hooks only; all are removed when the tracker is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optim_hooks

from brim.model_cache import cache_of
from brim.predict import failures


class ModuleTracker:
    """The stack of running modules, by their numbers in order of appearance; -1 stands for code outside of any.

    It has weak references only, so layers that a program replaces or drops are freed.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._classes: list[str] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.on_cache: Callable[[Any], None] = lambda cache: None  # called with every KV cache that a module returns
        self._stepping: list[torch.optim.Optimizer] = []
        self._index: dict[int, int] = {}
        self._stack: list[int] = []
        self._by_sequence: dict[int, int] = {}

    def current(self) -> int:
        """The innermost module; in the backward pass the one whose forward made the graph's node."""
        if self._stack:
            if torch._C._current_graph_task_id() == -1:
                # Only the first operation after a new node finds it here; later operations may create no nodes.
                self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._stack[-1])
            return self._stack[-1]
        if torch._C._current_graph_task_id() == -1:
            return -1
        node = torch._C._current_autograd_node()
        return self._by_sequence.get(node._sequence_nr(), -1) if node is not None else -1

    def running(self) -> Iterator[nn.Module]:
        """The modules that are being called, from the outside in."""
        return (module for index in self._stack if (module := self._modules[index]()) is not None)

    @property
    def in_optimizer(self) -> bool:
        """Return True while an optimizer steps."""
        return bool(self._stepping)

    def optimizer_asks(self) -> bool:
        """Return True if an optimizer's own code runs in its step, not its closure."""
        return bool(self._stepping) and failures.asking_module() in {
            kind.__module__ for kind in type(self._stepping[-1]).__mro__
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            hooks.register_module_parameter_registration_hook(self._registered),
            hooks.register_module_buffer_registration_hook(self._registered),
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
            optim_hooks.register_optimizer_step_pre_hook(self._optimizer_starts),
            optim_hooks.register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def modules(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that are alive, with their numbers."""
        for index, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                yield index, module

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for reference in self._optimizers:
            if (optimizer := reference()) is not None:
                yield optimizer

    def roots(self) -> list[nn.Module]:
        """Return the modules that no other module contains. Containers are not recorded: their modules count."""
        alive = [module for _, module in self.modules()]
        below = {id(child) for module in alive for child in module.modules() if child is not module}
        return [module for module in alive if id(module) not in below]

    def paths(self) -> list[str]:
        """The qualified name of every module seen, in their order, then "" for code outside of any module."""
        roots = self.roots()
        names: dict[int, str] = {}
        for root in roots:
            prefix = "" if len(roots) == 1 else type(root).__name__
            for path, module in root.named_modules():
                names.setdefault(id(module), ".".join(part for part in (prefix, path) if part))
        found = list(self._classes)
        for index, module in self.modules():
            found[index] = names.get(id(module), found[index])
        return [*found, ""]

    def _number(self, module: nn.Module) -> int:
        index = self._index.get(id(module))
        if index is None:
            key = id(module)
            index = self._index[key] = len(self._modules)
            self._modules.append(weakref.ref(module, lambda _: self._index.pop(key, None)))
            self._classes.append(type(module).__name__)
        return index

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        self._number(module)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._number(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        cache = None if isinstance(output, torch.Tensor) else cache_of(output)
        if cache is not None:
            self.on_cache(cache)

    def _optimizer_starts(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.append(optimizer)
        if all(optimizer is not other for other in self.optimizers()):
            self._optimizers.append(weakref.ref(optimizer))

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]  # with those whose steps failed
