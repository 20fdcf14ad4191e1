"""State of a run beside its weights: random generators and optimizer, as JSON and plain tensors. No pickle."""

from __future__ import annotations

import base64
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from brim import accelerator
from brim.errors import ModelError, UnsupportedError
from brim.techniques.blocks import moved
from brim.techniques.optimizer_offload.state_blocks import Field
from brim.techniques.optimizer_offload.states import copy_inner
from brim.techniques.optimizer_offload.step_context import place_counters
from brim.techniques.optimizer_offload.trial import StateTensor, Trial, kind

_BYTES = ".bytes"


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy (the global one), torch and each accelerator in use, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    return {
        "python": [version, list(words), python_gauss],
        "numpy": [kind, _text(torch.from_numpy(np.asarray(keys))), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
        accelerator.CUDA: [],
        **{kind: [_text(state) for state in states] for kind, states in accelerator.random_states().items()},
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the generators from ``rng_state``, those of accelerators only if they are present."""
    version, words, python_gauss = state["python"]
    random.setstate((version, tuple(words), python_gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    devices = {kind: [_tensor(text) for text in state.get(kind, [])] for kind in accelerator.kinds()}
    accelerator.set_random_states(devices)


def optimizer_numbers(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """State of the optimizer that is not tensors: its class, the groups' settings, plain values of its states.

    ``names``: parameter -> name. In the result, ``beside`` lists state tensors on the CPU whose parameter is
    elsewhere.
    """
    values: dict[str, dict[str, Any]] = {}
    beside = []
    for parameter, state in optimizer.state.items():
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        values[names[parameter]] = plain
        beside += [
            f"{names[parameter]}.{key}"
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.device != parameter.device
        ]
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "settings": {key: _plain(value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "values": values, "beside": beside}


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], *, values: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every state tensor, named ``PARAMETER.KEY`` (``model.norm.weight.exp_avg``). ``values`` False: on meta."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{names[parameter]}.{key}", value if values else StateTensor.of(key, value).like


class WrappedStates:
    """Converts the states of an optimizer that wrap other tensors to bytes and back (codes and scales of 8 bits).

    safetensors holds plain tensors only. ``names``: parameter -> name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._trial = functools.cache(lambda: Trial(optimizer))  # it refuses some that have no such states
        groups = enumerate(optimizer.param_groups)
        self._parameters = {names[p]: (number, p) for number, group in groups for p in group["params"]}

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield state ``tensors`` by name, the bytes of one that wraps others as ``NAME.bytes``.

        Raises UnsupportedError for one that the optimizer would not create for that parameter.
        """
        for name, value in tensors:
            if hasattr(value, "__tensor_flatten__"):
                field = self._field(name)
                if field is None or kind(field.like) != kind(value):
                    raise UnsupportedError(
                        f"Cannot save {name}.",
                        f"It is a {type(value).__name__}, which safetensors cannot hold.",
                        "Train with another optimizer, or save without its state.",
                    )
                flat = torch.zeros(field.bytes, dtype=torch.uint8, device="meta" if value.is_meta else "cpu")
                copy_inner(field.view(flat), value)
                name, value = name + _BYTES, flat
            yield name, value

    def unpacked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the states of ``packed``. Raises ModelError for bytes that are not those of a state."""
        for name, value in tensors:
            if name.endswith(_BYTES) and name.removesuffix(_BYTES) not in self._parameters:
                name = name.removesuffix(_BYTES)
                field = self._field(name)
                if field is None or field.bytes != value.numel():
                    raise _another(f"It has {value.numel()} bytes of {name}, which this optimizer does not keep so.")
                value = field.view(value)
            yield name, value

    def _field(self, name: str) -> Field | None:
        owner, _, key = name.rpartition(".")
        if owner not in self._parameters:
            return None
        try:
            states = self._trial().state_tensors(*self._parameters[owner])
        except UnsupportedError:  # no trial tells what it would be restored to
            return None
        return next((Field(parameter=0, key=key, like=s.like, offset=0) for s in states if s.key == key), None)


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    numbers: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    load: Callable[[str, torch.Tensor], None] | None = None,
) -> None:
    """Restore ``optimizer`` to the state of ``numbers`` and ``tensors``, bit for bit. ``load`` sets offloaded states.

    Raises ModelError for another class of optimizer or other parameters, naming the first; nothing has changed then.
    Raises it too when it comes to a state of a parameter that is not trained.
    """
    restore_settings(optimizer, names, numbers)
    parameters = {name: parameter for parameter, name in names.items()}
    if load is None:
        optimizer.state.clear()
    for name, plain in numbers["values"].items():
        if plain:
            optimizer.state[parameters[name]].update(plain)
    beside = set(numbers["beside"])
    for name, value in WrappedStates(optimizer, names).unpacked(tensors):
        if load is not None:
            load(name, value)
            continue
        owner, _, key = name.rpartition(".")
        parameter = parameters.get(owner)
        if parameter is None:
            raise _another(f"It has a state {key} of {owner}, a parameter that is not trained now.")
        device = "cpu" if name in beside else parameter.device
        optimizer.state[parameter][key] = moved(value, device)
    if load is None:
        place_counters(optimizer)  # it may have stepped in RAM when it was saved


def restore_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], numbers: Mapping[str, Any]
) -> None:
    """Restore only the groups' settings (learning rate and so on), without states."""
    _check_same(optimizer, names, numbers)
    for group, saved in zip(optimizer.param_groups, numbers["groups"], strict=True):
        for key, value in saved["settings"].items():
            group[key] = _like(group.get(key), value)


def _check_same(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], numbers: Mapping[str, Any]
) -> None:
    if numbers["class"] != type(optimizer).__name__:
        raise _another(f"It is of {numbers['class']}, not of {type(optimizer).__name__}.")
    if len(numbers["groups"]) != len(optimizer.param_groups):
        raise _another(f"It has {len(numbers['groups'])} parameter groups, not {len(optimizer.param_groups)}.")
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, numbers["groups"], strict=True)):
        ours, theirs = [names[parameter] for parameter in group["params"]], saved["parameters"]
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(ours), len(theirs)) if at is None else at
            raise _another(
                f"Parameter {at} of group {index} is {(theirs[at:] or ['missing'])[0]} in the checkpoint, "
                f"{(ours[at:] or ['missing'])[0]} in this training."
            )


def _another(problem: str) -> ModelError:
    return ModelError(
        "Cannot restore the optimizer's state from the checkpoint.",
        problem,
        "Resume with the model, method and optimizer that the checkpoint was written with.",
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _like(current: Any, value: Any) -> Any:
    """``value`` in the optimizer's own form."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
