"""Precision: in which types weights, arithmetic and updates are.

| | weights | products | optimizer |
|---|---|---|---|
| ``fp32`` | float32 | float32 | float32 |
| ``tf32`` | float32 | TF32 (NVIDIA, Ampere and later) | float32 |
| ``bf16-mixed``, ``fp16-mixed`` | float32 | autocast; float16 with a scaled loss | float32 |
| ``bf16`` | bfloat16 | bfloat16 | bfloat16, to the nearest: small updates vanish |
| ``bf16-stochastic`` | bfloat16 | bfloat16 | in float32, rounded at random, kept in bfloat16 |
| ``bf16-master`` | bfloat16 | bfloat16 | float32, with float32 masters of the weights |
| ``fp8`` | float32 or bfloat16 | float8 with dynamic scales (torchao) | as the weights |

Only ``fp32`` is lossless.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from brim.errors import UnsupportedError, UsageError
from brim.techniques.optimizer_offload.rounding import WideSteps

PRECISIONS = ("fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16", "bf16-stochastic", "bf16-master", "fp8")
_MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
_MARK = "brim_precision"
_PURE = ("bf16", "bf16-stochastic", "bf16-master")
_STATES = {"bf16": torch.bfloat16, "bf16-stochastic": torch.bfloat16, "bf16-master": torch.float32}
_FP8_CAPABILITY = (8, 9)  # Ada Lovelace
_TF32_CAPABILITY = (8, 0)  # Ampere


def states_dtype(precision: str) -> torch.dtype | None:
    """What the optimizer's states are kept in. None: as the weights."""
    return _STATES.get(precision)


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Within, autocast keeps what it makes of weights only if it did before, and ``enabled``."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def apply(
    model: nn.Module,
    optimizer: Optimizer | None,
    precision: str,
    *,
    device: torch.device | None = None,
    seed: int = 0,
) -> PrecisionHandle:
    """Put ``precision``, one of ``PRECISIONS``, into force on ``model`` and on ``optimizer``'s steps.

    ``device`` is where the model will compute; where its parameters are now unless told. ``seed`` is for random
    rounding. Parameters stay the objects that they are, so an optimizer may be made before or after. Raises
    UsageError
    for an unknown precision or a second application, UnsupportedError where the device or a library that it needs is
    not there.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"Unknown precision {precision!r}.", f"Known: {', '.join(PRECISIONS)}.")
    if _MARK in vars(model):
        raise UsageError(
            f"Cannot use precision={precision} for {type(model).__name__}.",
            f"It is in {vars(model)[_MARK]} already.",
            "Remove the first handle before.",
        )
    first = next(model.parameters(), torch.empty(0))
    where = torch.device("cuda") if first.is_cuda else first.device
    return PrecisionHandle(model, optimizer, precision, device or where, seed)


class PrecisionHandle:
    """How a training loop computes under this precision. All its methods do the plain thing where that is right.

    ``keeps_casts``: autocast keeps what it made of each weight until the forward pass is over, for weights that are
    used twice. Where blocks are streamed or computed again, that would hold all weights once more, in 16 bits.
    Without it, the gradients of a layer that is called twice are added in 32 bits instead of 16: not the same bits.
    """

    keeps_casts = True

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, precision: str, device: torch.device, seed: int
    ) -> None:
        self.precision, self._optimizer, self._device = precision, optimizer, device
        self._undo: list[Callable[[], None]] = [lambda: vars(model).pop(_MARK)]
        self._wide: WideSteps | None = None
        self._settings: Callable[[], None] | None = None  # gives the process back what it had
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
        """Around the model's call and its loss."""
        dtype = _MIXED.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype, cache_enabled=self.keeps_casts)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Make gradients what they are without a scaled loss, to be clipped or looked at. Once before ``step``."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """The optimizer's step. False where it was left out: the scaled gradients were not finite."""
        if self._scaler is None:
            if self._wide is None or optimizer is self._optimizer:  # whose step has been taken over
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
        """Masters, if any, become what ``value`` gives by name: for weights that came after this was applied."""
        if self._wide is not None:
            self._wide.take(value)

    def state_dict(self) -> dict[str, Any]:
        """``precision``, ``scaler`` (numbers) and ``tensors``: all that a later run needs to go on bit for bit."""
        return {
            "precision": self.precision,
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            "tensors": {} if self._wide is None else self._wide.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError where it is another precision's."""
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
        """Give the process its settings back; the model and the optimizer stay as they are."""
        if self._settings is not None:
            self._settings()
        self._settings = None

    def remove(self) -> None:
        """Weights get the types that they had, with the values that they have now (those of the masters, if any)."""
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
    """Stands in an optimizer's instance for its step, so that a user's own loop takes wide steps too."""

    def __init__(self, optimizer: Optimizer, wide: WideSteps) -> None:
        self._optimizer, self._wide = optimizer, wide
        self._before = vars(optimizer).get("step")  # an LR scheduler's counter, say
        self._active = True
        vars(optimizer)["step"] = self
        # What LR schedulers look for (torch/optim/lr_scheduler.py): a method's function, and their own mark on it.
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
    """``Optimizer.load_state_dict`` casts the state to its parameter's type: it must find the masters there."""

    def load(state_dict: dict[str, Any]) -> None:
        with wide.at_masters(p for group in optimizer.param_groups for p in group["params"]):
            type(optimizer).load_state_dict(optimizer, state_dict)

    vars(optimizer)["load_state_dict"] = load

    def undo() -> None:
        del vars(optimizer)["load_state_dict"]

    return undo


class _CastInputs:
    """Floating inputs of the whole model, made what its weights are."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(_narrow, args)), {name: _narrow(value) for name, value in kwargs.items()}


def _narrow(value: Any) -> Any:
    wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
    return value.to(torch.bfloat16) if wide else value


def _cast(model: nn.Module) -> list[Callable[[], None]]:
    """Floating parameters and buffers to bfloat16; the way back for each.

    Buffers that are not part of the state are constants that a model computed for itself (rotary frequencies): they
    stay as precise as they are.
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
    """torchao's dynamic tensor-wise scaling in linear layers with sizes in multiples of 16, but the last one."""
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
        f"Cannot use precision={precision} for {type(model).__name__}.",
        f"{needed}, and {reason}.",
        "Use bf16-mixed.",
    )
