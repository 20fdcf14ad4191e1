"""Precision: the dtypes of weights, arithmetic and updates.

| | weights | products | optimizer |
|---|---|---|---|
| ``fp32`` | float32 | float32 | float32 |
| ``tf32`` | float32 | TF32 (NVIDIA, Ampere and later) | float32 |
| ``bf16-mixed``, ``fp16-mixed`` | float32, below adapters as stored | autocast; float16: a scaled loss | float32 |
| ``bf16`` | bfloat16 | bfloat16 | bfloat16, to the nearest: small updates vanish |
| ``bf16-stochastic`` | bfloat16 | bfloat16 | in float32, rounded at random, kept in bfloat16 |
| ``bf16-master`` | bfloat16 | bfloat16 | float32, with float32 masters of the weights |
| ``stored`` | as stored, adapters float32 | in the weights' type | float32 |
| ``fp8`` | float32 or bfloat16 | float8 with dynamic scales (torchao) | as the weights |

Only ``fp32`` is lossless.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from brim.core.options import PRECISIONS
from brim.errors import UnsupportedError, UsageError
from brim.techniques.blocks import groups_within
from brim.units import MIB

_MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_MARK = "brim_precision"
_PURE = ("bf16", "bf16-stochastic", "bf16-master")
_STATES = {"bf16": torch.bfloat16, "bf16-stochastic": torch.bfloat16, "bf16-master": torch.float32}
_FP8_CAPABILITY = (8, 9)  # Ada Lovelace
_TF32_CAPABILITY = (8, 0)  # Ampere


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The autocast dtype of a mixed ``precision``; None for other precisions."""
    return _MIXED.get(precision)


def states_dtype(precision: str) -> torch.dtype | None:
    """The dtype of the optimizer's states; None: that of the weights."""
    return _STATES.get(precision)


def apply(
    model: nn.Module,
    optimizer: Optimizer | None,
    precision: str,
    *,
    device: torch.device | None = None,
    seed: int = 0,
) -> PrecisionHandle:
    """Put ``precision``, one of ``PRECISIONS``, into force on ``model`` and on ``optimizer``'s steps.

    ``device`` is the compute device, by default that of the parameters. ``seed`` is for random rounding. Parameters
    stay the same objects, so an optimizer may be made before or after. Raises UsageError for an unknown precision or
    a second application, UnsupportedError without the device or the library that it needs.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"Unknown precision {precision!r}.", f"Known: {', '.join(PRECISIONS)}.")
    if _MARK in vars(model):
        raise UsageError(
            f"Cannot use precision={precision} for {type(model).__name__}.",
            f"It is in {vars(model)[_MARK]} already.",
            "Call .remove() on its handle first.",
        )
    first = next(model.parameters(), torch.empty(0))
    where = torch.device("cuda") if first.is_cuda else first.device
    return PrecisionHandle(model, optimizer, precision, device or where, seed)


class PrecisionHandle:
    """The steps of a training loop under a precision. Without a special need its methods do what plain training does.

    ``keeps_casts``: autocast caches its cast of each weight until the end of the forward pass, for weights that are
    used twice. With streamed or recomputed blocks, the cache would have a 16-bit copy of all weights. Without
    it, the gradients of a layer that is called twice are added in 32 bits instead of 16, so their bits differ.
    """

    keeps_casts = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, precision: str, device: torch.device, seed: int
    ) -> None:
        self.precision, self._optimizer, self._device = precision, optimizer, device
        self._undo: list[Callable[[], None]] = [lambda: vars(model).pop(_MARK)]
        self._wide: WideSteps | None = None
        self._settings: Callable[[], None] | None = None  # restores the settings of the process
        vars(model)[_MARK] = precision
        try:
            self._apply(model, optimizer, seed)
        except BaseException:
            self.remove()
            raise

    def _apply(self, model: nn.Module, optimizer: Optimizer | None, seed: int) -> None:
        precision = self.precision
        self._scaler = torch.amp.GradScaler(self._device.type) if precision == "fp16-mixed" else None
        if precision == "tf32":
            self._settings = _allow_tf32(model, self._device)
        if precision == "fp8":
            self._undo.append(_convert_to_float8(model, self._device))
        if precision in _PURE:
            self._make_bfloat16(model, seed)
        if self._wide is not None and optimizer is not None:
            self._undo.append(_Step(optimizer, self._wide).remove)
            if self._wide.masters is not None:
                self._undo.append(_load_wide(optimizer, self._wide))

    def forward(self) -> AbstractContextManager[Any]:
        """The context of the model's call and its loss."""
        dtype = _MIXED.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype, cache_enabled=self.keeps_casts)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients by the loss scale, to be clipped or read. Call it once before ``step``."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer. Returns False if the step was skipped: the scaled gradients were not finite."""
        if self._scaler is None:
            if self._wide is None or optimizer is self._optimizer:  # its step is replaced already
                optimizer.step()
            else:
                self._wide.step(optimizer, optimizer.step)
            return True
        has_values = not any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"])
        before = self._scaler.get_scale() if has_values else 0.0
        self._scaler.step(optimizer)
        self._scaler.update()
        return not has_values or self._scaler.get_scale() >= before

    def take_weights(self, value: Callable[[str], torch.Tensor]) -> None:
        """Set the masters, if any, to ``value`` of each name, for weights that were loaded after ``apply``."""
        if self._wide is not None:
            self._wide.take(value)

    def state_dict(self) -> dict[str, Any]:
        """The state that a later run needs to continue exactly: ``precision``, ``scaler`` (numbers), ``tensors``."""
        return {
            "precision": self.precision,
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            "tensors": {} if self._wide is None else self._wide.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same precision. Raises UsageError for another precision."""
        if state.get("precision") != self.precision:
            raise UsageError(
                f"Cannot load the state of precision {state.get('precision')}.",
                f"The precision in force is {self.precision}.",
                "Resume with the precision that the checkpoint was written with.",
            )
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))
        if self._wide is not None:
            self._wide.load_state(dict(state["tensors"]))

    def close(self) -> None:
        """Restore the settings of the process; the model and the optimizer stay as they are."""
        if self._settings is not None:
            self._settings()
        self._settings = None

    def remove(self) -> None:
        """Give weights their dtypes back, with their present values (those of the masters, if any)."""
        self.close()
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def _make_bfloat16(self, model: nn.Module, seed: int) -> None:
        wide = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p.requires_grad}
        if self.precision != "bf16":
            self._wide = WideSteps(wide, masters=self.precision == "bf16-master", device=self._device, seed=seed)
        originals = _cast(model)
        hook = model.register_forward_pre_hook(_CastInputs(), with_kwargs=True, prepend=True)
        masters = self._wide.masters if self._wide is not None else None

        def undo() -> None:
            hook.remove()
            for restore in originals:
                restore()
            for name, value in (masters or {}).items():
                wide[name].data = value.to(wide[name].dtype)

        self._undo.append(undo)


class _Step:
    """Replaces the step of an optimizer's instance, so that a user's own loop takes wide steps too."""

    def __init__(self, optimizer: Optimizer, wide: WideSteps) -> None:
        self._optimizer, self._wide = optimizer, wide
        self._before = vars(optimizer).get("step")  # for example an LR scheduler's counter
        self._active = True
        vars(optimizer)["step"] = self
        # LR schedulers read a method's function, and their own mark on it (torch/optim/lr_scheduler.py).
        self.__func__ = self
        if hasattr(self._before, "_wrapped_by_lr_sched"):
            self._wrapped_by_lr_sched = True

    def __get__(self, instance: object, owner: type | None = None) -> _Step:
        return self

    def __call__(self, closure: Any = None) -> Any:
        if self._active:
            return self._wide.step(self._optimizer, self._inner, closure)
        return self._inner() if closure is None else self._inner(closure)

    def remove(self) -> None:
        self._active = False
        if vars(self._optimizer).get("step") is self:
            if self._before is None:
                del vars(self._optimizer)["step"]
            else:
                vars(self._optimizer)["step"] = self._before

    def _inner(self, *args: Any) -> Any:
        if self._before is not None:
            return self._before(*args)
        return type(self._optimizer).step(self._optimizer, *args)


def _load_wide(optimizer: Optimizer, wide: WideSteps) -> Callable[[], None]:
    """Bind parameters to their masters in ``load_state_dict``, which casts a state to its parameter's dtype."""

    def load(state_dict: dict[str, Any]) -> None:
        with wide.at_masters(p for group in optimizer.param_groups for p in group["params"]):
            type(optimizer).load_state_dict(optimizer, state_dict)

    vars(optimizer)["load_state_dict"] = load

    def undo() -> None:
        del vars(optimizer)["load_state_dict"]

    return undo


class _CastInputs:
    """Casts the floating inputs of the model to the dtype of its weights."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(_narrow, args)), {name: _narrow(value) for name, value in kwargs.items()}


def _narrow(value: Any) -> Any:
    wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
    return value.to(torch.bfloat16) if wide else value


def _cast(model: nn.Module) -> list[Callable[[], None]]:
    """Cast floating parameters and buffers to bfloat16. Returns the functions that undo it.

    Buffers that are not part of the state are constants that the model computed (rotary frequencies): they keep their
    precision.
    """
    back: list[Callable[[], None]] = []
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.bfloat16:
            back.append(_undo_parameter(parameter, parameter.dtype))
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None if parameter.grad is None else parameter.grad.to(torch.bfloat16)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or name in module._non_persistent_buffers_set:
                continue
            if buffer.dtype is not torch.bfloat16:
                back.append(_undo_buffer(module, name, buffer))
                module._buffers[name] = buffer.to(torch.bfloat16)
    return back


def _undo_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> Callable[[], None]:
    def undo() -> None:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None if gradient is None else gradient.to(dtype)

    return undo


def _undo_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> Callable[[], None]:
    def undo() -> None:
        now = module._buffers[name]
        module._buffers[name] = None if now is None else buffer.copy_(now)

    return undo


def _allow_tf32(model: nn.Module, device: torch.device) -> Callable[[], None]:
    _need_gpu(model, device, "tf32", "TF32", _TF32_CAPABILITY)
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "tf32"

    def undo() -> None:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value

    return undo


def _convert_to_float8(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """Use torchao's dynamic tensor-wise scaling in all linear layers but the last whose sizes are multiples of 16."""
    _need_gpu(model, device, "fp8", "float8", _FP8_CAPABILITY)
    try:
        float8 = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise UnsupportedError(
            "Cannot use precision=fp8.", f"It needs torchao, which cannot be imported: {error}.",
            "Install torchao, or use bf16-mixed.",
        ) from error  # fmt: skip
    before = [(module, dict(module._modules)) for module in model.modules()]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def wanted(module: nn.Module, name: str) -> bool:
        sizes = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return name != linear[-1] and all(size % 16 == 0 for size in sizes)

    float8.convert_to_float8_training(model, module_filter_fn=wanted)

    def undo() -> None:
        for module, children in before:
            module._modules.update(children)

    return undo


def _need_gpu(model: nn.Module, device: torch.device, precision: str, kind: str, capability: tuple[int, int]) -> None:
    reason = "the model is on the CPU"
    if device.type == "cuda":
        has = torch.cuda.get_device_capability(device)
        if has >= capability:
            return
        reason = f"this GPU has {has[0]}.{has[1]}"
    needed = f"{kind} products need an NVIDIA GPU of compute capability {capability[0]}.{capability[1]}"
    raise UnsupportedError(
        f"Cannot use precision={precision} for {type(model).__name__}.", f"{needed}, and {reason}.", "Use bf16-mixed."
    )


# Bytes of parameters that are widened at once: enough for fused and foreach kernels, small beside a model.
_TOGETHER_BYTES = 64 * MIB
_KEPT_BITS = -65536  # 0xFFFF0000: the half of a float32 that a bfloat16 is


class WideSteps:
    """Steps of the user's optimizer in float32, some parameters at a time, on parameters that rest in bfloat16.

    A bfloat16 has 8 bits of precision: an update of less than 1/512 of a weight is lost in rounding to the nearest.
    Either float32 masters are kept beside (Micikevicius et al., arXiv 1710.03740), or updates are rounded up or down
    at random, right on average (Gupta et al., arXiv 1502.02551; Zamirai et al., arXiv 2010.06192).

    With ``masters`` the float32 values are kept for the next step, and so is the optimizer's state; without, both
    rest in bfloat16 and are rounded at random. ``parameters`` are those that were cast to bfloat16, by name. Updates
    are computed on ``device``, by default that of the parameters.
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
        """Step with ``inner``, the optimizer's own step, which must update each parameter independently."""
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step was called with a closure.",
                "A closure computes the loss in the middle of a step, when only some weights are cast to float32.",
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
        # A step may write to its group (a counter): once, not once per part.
        before = {name: value for name, value in group.items() if name != "params"}
        optimizer.param_groups = [group]
        try:
            for part in groups_within(everyone, _TOGETHER_BYTES, lambda parameter: 4 * parameter.numel()):
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
            parameter.grad = None  # its dtype must be that of the parameter
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
            return None  # no random numbers are drawn
        device = tensor.device
        if device not in self._generators:
            generator = torch.Generator(device).manual_seed(self._seed)
            if f"rounding.{device}" in self._pending:
                generator.set_state(self._pending.pop(f"rounding.{device}"))
            self._generators[device] = generator
        return self._generators[device]

    def take(self, value: Callable[[str], torch.Tensor]) -> None:
        """Set the masters to ``value`` of each name, for weights that were loaded since."""
        for name, master in (self.masters or {}).items():
            master.copy_(value(name))

    def state(self) -> dict[str, torch.Tensor]:
        """The state that a later run needs to continue exactly: ``rounding.DEVICE`` and ``master.NAME`` tensors."""
        state = dict(self._pending)
        state |= {f"rounding.{device}": generator.get_state() for device, generator in self._generators.items()}
        return state | {f"master.{name}": value for name, value in (self.masters or {}).items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load ``state``. Raises UsageError if it is of another precision or of other parameters."""
        masters = {name: value for name, value in state.items() if name.startswith("master.")}
        own_masters = {f"master.{name}": value for name, value in (self.masters or {}).items()}
        others = [name for name in state if name not in masters and not name.startswith("rounding.")]
        if masters.keys() != own_masters.keys() or others:
            raise UsageError(
                "Cannot load the saved state of the precision.",
                f"It has float32 copies of {len(masters)} weights; this model needs {len(own_masters)}.",
                "Load the state that the same model and precision wrote.",
            )
        for name, value in masters.items():
            own_masters[name].copy_(value)
        self._generators = {}
        self._pending = {name: value.cpu() for name, value in state.items() if name not in masters}


def round_at_random(wide: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round each float32 to a neighbouring bfloat16, the nearer one being likelier, so that the mean is exact.

    A random number below one unit of the bfloat16's last place is added, and the lower bits are cut off.
    """
    assert wide.dtype is torch.float32
    bits = wide.contiguous().view(torch.int32)
    noise = torch.empty_like(bits).random_(0, -_KEPT_BITS, generator=generator)
    noise.add_(bits).bitwise_and_(_KEPT_BITS)
    return noise.view(torch.float32).to(torch.bfloat16)


def _each_state(
    optimizer: Optimizer, parameter: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Apply ``change`` to every floating tensor of the parameter's state; counters (scalars) stay exact."""
    state: dict[str, Any] = optimizer.state.get(parameter) or {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            state[name] = change(value)
