"""Steps of an optimizer in float32 on parameters that rest in bfloat16.

A bfloat16 has 8 bits of precision: an update of less than 1/512 of a weight is lost in rounding to the nearest.
Either float32 masters are kept beside (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740), or updates
are rounded up or down at random, right on average (Gupta et al., arXiv 1502.02551; Zamirai et al., arXiv 2010.06192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from brim.errors import UnsupportedError, UsageError

# Parameters that are widened at once: enough for the fused and foreach kernels, small beside a model.
_TOGETHER_BYTES = 64 << 20
_KEPT_BITS = -65536  # 0xFFFF0000: the half of a float32 that a bfloat16 is


class WideSteps:
    """Lets the user's optimizer step on float32 values, some parameters at a time, and puts them back in bfloat16.

    With ``masters`` the float32 values are kept for the next step, and so is the optimizer's state; without, both
    rest in bfloat16 and are rounded at random. ``parameters`` maps names to what was made bfloat16. ``device`` is
    where updates are computed; where the parameters are now unless told.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], *, masters: bool, seed: int, device: torch.device | None = None
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.masters: dict[str, torch.Tensor] | None = {} if masters else None
        if masters:
            self.masters = {name: p.detach().to(device or p.device).float() for name, p in parameters.items()}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def step(self, optimizer: Optimizer, inner: Callable[..., Any], closure: Any = None) -> Any:
        """``inner`` is the optimizer's own step. Every parameter is updated from its own gradient and state only."""
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step was called with a closure.",
                "Its parameters are cast to float32 a few at a time: the loss cannot be computed again meanwhile.",
                "Use precision bf16-mixed.",
            )
        groups, result = optimizer.param_groups, None
        try:
            for group in groups:
                result = self._step_group(optimizer, inner, group)
        finally:
            optimizer.param_groups = groups
        return result

    def _step_group(self, optimizer: Optimizer, inner: Callable[..., Any], group: dict[str, Any]) -> Any:
        everyone, result = group["params"], None
        # What a step writes to its group (a counter) must be written once, not once per part.
        before = {name: value for name, value in group.items() if name != "params"}
        optimizer.param_groups = [group]
        try:
            for part in _parts(everyone):
                group.update(before)
                group["params"] = part
                with self._widened(optimizer, [p for p in part if id(p) in self._names and p.grad is not None]):
                    result = inner()
        finally:
            group["params"] = everyone
        return result

    @contextmanager
    def _widened(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        narrow = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
        for parameter, data, gradient in narrow:
            assert gradient is not None
            parameter.grad = None  # its dtype must be that of the values
            parameter.data = self._wide(parameter, data)
            parameter.grad = gradient.float()
            if self.masters is None:
                _each_state(optimizer, parameter, torch.Tensor.float)
        try:
            yield
        finally:
            for parameter, data, gradient in narrow:
                parameter.grad = None
                wide, parameter.data = parameter.data, data
                parameter.grad = gradient
                self._narrow(wide, data)
                if self.masters is None:
                    _each_state(optimizer, parameter, self._rounded)

    @contextmanager
    def at_masters(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """While open, parameters have the values and the type of their masters."""
        narrow = [(parameter, parameter.data) for parameter in parameters if id(parameter) in self._names]
        for parameter, data in narrow:
            parameter.data = self._wide(parameter, data)
        try:
            yield
        finally:
            for parameter, data in narrow:
                parameter.data = data

    def _wide(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        return data.float() if self.masters is None else self.masters[self._names[id(parameter)]]

    def _narrow(self, wide: torch.Tensor, data: torch.Tensor) -> None:
        if self.masters is None:
            data.copy_(self._rounded(wide))
        else:
            data.copy_(wide)

    def _rounded(self, wide: torch.Tensor) -> torch.Tensor:
        return round_at_random(wide, self._generator(wide))

    def _generator(self, tensor: torch.Tensor) -> torch.Generator | None:
        if isinstance(tensor, FakeTensor):
            return None  # nothing random is drawn
        device = tensor.device
        if device not in self._generators:
            generator = torch.Generator(device).manual_seed(self._seed)
            if f"rounding.{device}" in self._pending:
                generator.set_state(self._pending.pop(f"rounding.{device}"))
            self._generators[device] = generator
        return self._generators[device]

    def take(self, value: Callable[[str], torch.Tensor]) -> None:
        """Make the masters what ``value`` gives by name: the weights have come since these were made."""
        for name, master in (self.masters or {}).items():
            master.copy_(value(name))

    def state(self) -> dict[str, torch.Tensor]:
        """What a later run needs to go on bit for bit: ``rounding.DEVICE`` generators, ``master.NAME`` values."""
        state = dict(self._pending)
        state |= {f"rounding.{device}": generator.get_state() for device, generator in self._generators.items()}
        return state | {f"master.{name}": value for name, value in (self.masters or {}).items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Raise UsageError where ``state`` is not of this kind of precision and these parameters."""
        masters = {name: value for name, value in state.items() if name.startswith("master.")}
        own_masters = {f"master.{name}": value for name, value in (self.masters or {}).items()}
        others = [name for name in state if name not in masters and not name.startswith("rounding.")]
        if masters.keys() != own_masters.keys() or others:
            raise UsageError(
                "Cannot load the state of a precision.",
                f"It has {len(masters)} float32 masters where this model has {len(own_masters)}.",
                "Load the state that the same model and precision wrote.",
            )
        for name, value in masters.items():
            own_masters[name].copy_(value)
        self._generators = {}
        self._pending = {name: value.cpu() for name, value in state.items() if name not in masters}


def round_at_random(wide: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """A bfloat16 neighbour of every float32, the nearer one the likelier, so that the mean is exact.

    A random number below one unit of the bfloat16's last place is added, and what is too fine is cut off.
    """
    assert wide.dtype is torch.float32
    bits = wide.contiguous().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, -_KEPT_BITS, generator=generator)
    noise.add_(bits).bitwise_and_(_KEPT_BITS)
    return noise.view(torch.float32).to(torch.bfloat16)


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In their order, up to a limit of bytes in float32, one at least."""
    part: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if part and size + 4 * parameter.numel() > _TOGETHER_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += 4 * parameter.numel()
    if part:
        yield part


def _each_state(
    optimizer: Optimizer, parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """``change`` on every floating tensor of the parameter's state; counters (scalars) stay exact."""
    state: dict[str, Any] = optimizer.state.get(parameter) or {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            state[name] = change(value)
