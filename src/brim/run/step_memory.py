"""The peak of activations and temporaries of a forward pass, found on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from brim.errors import UnsupportedError, UsageError


class _LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that operations make, from their making until Python lets go of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """These exist already and are not counted."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def peak_bytes(model: nn.Module, run: Callable[[Callable[..., Any]], None]) -> int:
    """The peak over ``run(call)``, where ``call`` is the model on fake tensors under no_grad.

    Raises UnsupportedError when the forward needs values that only a real run has.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        state = {
            name: torch.empty(t.shape, dtype=t.dtype)
            for name, t in [*model.named_parameters(), *model.named_buffers()]
        }
        counter = _LiveBytes()
        counter.know(list(state.values()))

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(_faked(fake), (args, kwargs))
            counter.know([t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
            with counter:
                return torch.func.functional_call(model, state, args, kwargs)

        call.counter = counter  # type: ignore[attr-defined]  # for a run that looks at its parts
        try:
            run(call)
        except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
            raise UnsupportedError(
                f"The activations of {type(model).__name__} were to be predicted without running it.",
                f"{error}.",
                "Give them with activations=..., for instance activations='512MiB'.",
            ) from error
    return counter.peak_bytes


def step_bytes(model: nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> int:
    """Peak bytes of one forward pass on an input like ``example``, the input itself left out."""

    def run(call: Callable[..., Any]) -> None:
        if isinstance(example, Mapping):
            call(**example)
        else:
            call(*example)

    return peak_bytes(model, run)


def _faked(fake: FakeTensorMode) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor):
            return value
        return fake.from_tensor(value)

    return convert


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The largest step to make room for: ``batch`` sequences, ``prompt`` tokens at once, ``total`` in the cache."""

    batch: int = 1
    prompt: int
    total: int


def forward_bytes(module: nn.Module, inputs: Inputs) -> int:
    """Peak bytes of activations and KV cache of a transformers model over the prompt's pass and the last token's."""
    config: Any = module.config
    generates = hasattr(module, "generate") and module.can_generate() and not config.is_encoder_decoder  # type: ignore[operator]
    if not generates:
        return step_bytes(module, _dummy(module, inputs.batch, inputs.prompt))
    peaks = []

    def run(call: Callable[..., Any]) -> None:
        # The prompt's pass.
        call(**_dummy(module, inputs.batch, inputs.prompt), use_cache=True, logits_to_keep=1)

    def run_last(call: Callable[..., Any]) -> None:
        past = call(**_dummy(module, inputs.batch, max(inputs.total - 1, 1)), use_cache=True, logits_to_keep=1)
        cache = past.past_key_values
        del past
        counter = call.counter  # type: ignore[attr-defined]
        counter.peak_bytes = counter.live_bytes
        call(**_dummy(module, inputs.batch, 1), past_key_values=cache, use_cache=True, logits_to_keep=1)

    peaks = [peak_bytes(module, run), peak_bytes(module, run_last)]
    return max(peaks)


def _dummy(module: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of the right kind without values that matter."""
    config: Any = module.config
    name = getattr(module, "main_input_name", "input_ids")
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else side
        return {name: torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
    if name != "input_ids":
        raise UsageError(
            f"{type(module).__name__} takes {name}, whose size brim does not know.",
            todo="Build the module yourself and use brim.fit(module, example=...).",
        )
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :1]} if config.is_encoder_decoder else {"input_ids": ids}
