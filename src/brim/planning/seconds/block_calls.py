"""Observe how a step calls a model's parts: with which tensors, how often, and with how much work.

The step runs on fake tensors, which need no memory; ``block_timing`` then runs one call of each kind for real.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from brim.estimation.step_memory import Inputs, watch_step
from brim.model_cache import cache_input, cache_of
from brim.model_inputs import Changing, tensors_in
from brim.predict.flops import op_bytes, op_flops
from brim.predict.lowering.fakes import FAKES

Example = Inputs | Mapping[str, Any] | Sequence[Any]

# Settings that number layers and do not affect their work.
_NUMBERING = re.compile(r"(^|_)(idx|index|id|number)$")
_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A kind of call of a module. ``args``, ``kwargs`` and ``output`` hold fake tensors.

    ``read`` are the storages (by address) that the module's operations touched: of a cache with an entry per layer,
    only one. Its ``kernels`` compute ``flops``, and read and write ``bytes``.
    """

    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    read: frozenset[int] = frozenset()
    flops: int = 0
    bytes: int = 0
    written_bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The calls of a pass: those of parts, in order, as (path, kind), and that of the model itself."""

    parts: Sequence[tuple[str, str]]
    kinds: Mapping[str, Call]
    model: Call

    def of(self, paths: Collection[str]) -> Calls:
        """Restrict the pass to calls of the parts at ``paths``."""
        calls = [(path, kind) for path, kind in self.parts if path in paths]
        kinds = {kind: self.kinds[kind] for _, kind in calls}
        return Calls(parts=calls, kinds=kinds, model=self.model)


def calls_of(model: nn.Module, paths: Collection[str], example: Example) -> Calls:
    """Observe the calls of the modules at ``paths`` in a forward pass on ``example``.

    ``Inputs`` are for a generating model of transformers: the pass is that of the last token, with a full cache.
    Raises UnsupportedError where a pass needs values that only a real run has.
    """
    heard = _Heard()

    def run(call: Callable[..., Any], watch: Any) -> None:
        args, kwargs = _arguments(model, call, example)
        with heard.listening(model, paths), _Work() as work:
            call(*args, **kwargs)
        assert heard.model is not None, "the model was called"
        heard.model = work.of(heard.model)
        owners = {kind: model.get_submodule(path) for path, kind in heard.parts}
        heard.kinds = {kind: _with_work(owners[kind], call) for kind, call in heard.kinds.items()}

    watch_step(model, run)
    assert heard.model is not None, "the model was called"
    return Calls(parts=heard.parts, kinds=heard.kinds, model=heard.model)


def _arguments(model: Any, call: Callable[..., Any], example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the pass's arguments: for ``Inputs``, a token and a cache that a longer pass has filled."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if not isinstance(example, Inputs):
        return tuple(example), {}
    token = torch.zeros(example.batch, 1, dtype=torch.long)
    if model.config.is_encoder_decoder:
        prompt = torch.zeros(example.batch, example.prompt, dtype=torch.long)
        encoded = call(input_ids=prompt, decoder_input_ids=token).encoder_last_hidden_state
        return (), {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": token}
    takes = inspect.signature(model.forward).parameters
    last = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in takes else {})
    past: dict[str, Any] = {}
    if example.total > 1:
        ids = torch.zeros(example.batch, example.total - 1, dtype=torch.long)
        past = cache_input(model, _roomy(cache_of(call(input_ids=ids, **last))))
    return (), {"input_ids": token, **last, **past}


def _roomy(cache: Any) -> Any:
    """Give the cache room for another token, as a run has it; transformers' own would be copied."""
    if type(cache) is DynamicCache:
        cache.layers = [_Room(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _Room(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A cache layer with all tokens but the last, which is written in place."""

    is_sliding = False

    def __init__(self, full: DynamicLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert full.keys is not None and full.values is not None
        self.is_initialized = True
        self.keys, self.values = (
            torch.empty(*tensor.shape[:2], tensor.shape[2] + 1, tensor.shape[3], dtype=tensor.dtype)
            for tensor in (full.keys, full.values)
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[:, :, -key_states.shape[2] :].copy_(key_states)
        self.values[:, :, -value_states.shape[2] :].copy_(value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return int(self.keys.shape[2]) - 1

    def get_max_length(self) -> int:
        return self.get_seq_length() + 1


@dataclass
class _Heard:
    """Hooks that record the calls of parts."""

    parts: list[tuple[str, str]] = field(default_factory=list)
    kinds: dict[str, Call] = field(default_factory=dict)
    model: Call | None = None

    @contextmanager
    def listening(self, model: nn.Module, paths: Collection[str]) -> Iterator[None]:
        hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        for path in paths:
            module, settings = model.get_submodule(path), _settings(model.get_submodule(path))
            hooks += self._hear(module, path, settings)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = copied((args, kwargs), lambda tensor: tensor)
        self.model = Call(kind="", args=args, kwargs=kwargs)

    def _hear(self, module: nn.Module, path: str, settings: str) -> list[Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kind = _digest(settings, *_shapes((args, kwargs)))
            self.parts.append((path, kind))
            if kind not in self.kinds:
                args, kwargs = copied((args, kwargs), lambda tensor: tensor)
                self.kinds[kind] = Call(kind=kind, args=args, kwargs=kwargs)

        def leave(module: nn.Module, args: object, kwargs: object, output: Any) -> None:
            kind = next(kind for other, kind in reversed(self.parts) if other == path)
            if self.kinds[kind].output is None:
                output = copied(output, lambda tensor: tensor)
                self.kinds[kind] = replace(self.kinds[kind], output=output)

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, with_kwargs=True),
        ]


def copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Deep-copy ``value`` with every tensor in it, in any object, replaced by ``change(tensor)``."""
    with Changing(change):
        return copy.deepcopy(value)


class _Work(TorchDispatchMode):
    """Sum the FLOPs and bytes of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes = self.written_bytes = self.kernels = 0
        self.read: set[int] = set()

    def of(self, call: Call) -> Call:
        return replace(
            call,
            read=frozenset(self.read),
            flops=self.flops,
            bytes=self.bytes,
            written_bytes=self.written_bytes,
            kernels=self.kernels,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.read |= {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
        result = FAKES.get(func, func)(*args, **kwargs)
        if func.namespace == "prim":  # asks a tensor for its device
            return result
        flops = op_flops(func, args, kwargs, result)
        read_bytes, written_bytes = op_bytes(func, args, kwargs, result)
        self.flops += flops
        self.bytes += read_bytes + written_bytes
        self.written_bytes += written_bytes
        self.kernels += bool(flops or written_bytes)  # the others are views
        return result


def _with_work(module: nn.Module, call: Call) -> Call:
    """Repeat the call alone and count its operations."""
    state = [*module.named_parameters(), *module.named_buffers()]
    values = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state}
    args, kwargs = copied((call.args, call.kwargs), lambda tensor: tensor)
    with _Work() as work:
        torch.func.functional_call(module, values, args, kwargs)
    counted: Call = work.of(call)
    return counted


def _settings(module: nn.Module) -> str:
    """Return a digest of a module's settings and shapes, without its layer number."""
    settings: list[object] = []
    for path, part in module.named_modules():
        simple = {k: v for k, v in vars(part).items() if isinstance(v, _SIMPLE) and not _NUMBERING.search(k)}
        named_tensors = [*part._parameters.items(), *part._buffers.items()]
        tensors = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors if tensor is not None]
        settings.append((path, type(part).__qualname__, sorted(simple.items()), tensors))
    return _digest(*settings)


def _shapes(value: Any) -> list[tuple[object, ...]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value)]


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def held_tensors(value: Any) -> list[torch.Tensor]:
    """Return each tensor that any object holds, once."""
    tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    copied(value, note)
    return list(tensors.values())
