"""The state of a whole optimizer while a part of it is away: for ``state_dict`` and for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from brim.errors import UsageError
from brim.techniques.optimizer_offload.backing_store import States, as_number
from brim.techniques.optimizer_offload.states import StateBlock
from brim.techniques.optimizer_offload.trial import Trial


class WholeState:
    """``blocks`` are all of the optimizer's, ``leaving`` those whose states are in ``states``."""

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Mapping[int, StateBlock],
        leaving: Mapping[int, StateBlock],
        states: States,
        trial: Trial,
    ) -> None:
        self._optimizer, self._states, self._trial = optimizer, states, trial
        self._blocks, self._leaving = blocks, leaving
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._fill, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._loaded, prepend=True),
        ]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state as (parameter's name + "." + key, tensor on the CPU), one in memory at a time; numbers too."""
        for index, block in self._blocks.items():
            for number, (name, parameter) in enumerate(zip(block.names, block.parameters, strict=True)):
                away = self._states.away_keys(index, number) if index in self._leaving else []
                for key, value in list(self._optimizer.state.get(parameter, {}).items()):
                    if key in away:
                        yield f"{name}.{key}", self._states.value(index, number, key)
                    elif isinstance(value, torch.Tensor):
                        yield f"{name}.{key}", value.detach().cpu()
                    elif isinstance(value, (bool, int, float)):
                        yield f"{name}.{key}", torch.tensor(value)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Put back what ``items`` gave. Raises UsageError for a name or a shape that this optimizer has not."""
        path, _, key = name.rpartition(".")
        index = next((i for i, block in self._blocks.items() if path in block.names), None)
        if index is not None:
            number = self._blocks[index].names.index(path)
            parameter = self._blocks[index].parameters[number]
            groups = enumerate(self._optimizer.param_groups)
            group = next(g for g, options in groups if any(p is parameter for p in options["params"]))
            sample = self._trial.sample(group, parameter)
        if index is None or key not in sample:
            raise UsageError(
                f"Cannot load the optimizer state {name!r}.",
                f"{type(self._optimizer).__name__} has no such state.",
                "Load what was saved for this model with this kind of optimizer.",
            )
        if index in self._leaving:
            self._states.load(index, number, key, tensor, sample)
            return
        value = as_number(tensor, sample[key])
        moved = value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
        self._optimizer.state[parameter][key] = moved

    def _fill(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Complete what ``optimizer.state_dict()`` is about to return."""
        numbers = {
            id(p): n
            for packed, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
            for n, p in zip(packed["params"], group["params"], strict=True)
        }
        for index, block in self._leaving.items():
            for number, parameter in enumerate(block.parameters):
                away = self._states.away_keys(index, number)
                if away:
                    values_there = state["state"][numbers[id(parameter)]]
                    values = {key: self._states.value(index, number, key) for key in away}
                    state["state"][numbers[id(parameter)]] = {**values_there, **values}

    def _loaded(self, optimizer: Optimizer) -> None:
        self._states.take_all()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
