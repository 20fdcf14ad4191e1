"""Measure the seconds of a model's blocks on this machine by calls with random weights.

A roofline knows neither how a product of a few rows is divided among threads nor a kernel's launch time. So a block
of each kind runs for real: with random numbers, as the model may have no weights, and with several copies in turn
where blocks are small, as a run finds no weights in the processor's cache. Results are cached in the user's folder.
"""

from __future__ import annotations

import copy
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from brim import accelerator
from brim.core import Hardware
from brim.core.hardware import VRAM
from brim.estimation.step_memory import Inputs
from brim.measure.capacity import free_bytes
from brim.measure.probe import probe
from brim.measure.waiting import Stopwatch
from brim.memory.pool import HostSource
from brim.model_inputs import tensors_in
from brim.planning.seconds.block_calls import Call, Calls, Example, calls_of, copied, held_tensors
from brim.planning.seconds.block_seconds import OUTSIDE
from brim.planning.seconds.block_seconds import BlockSeconds as BlockSeconds
from brim.planning.seconds.measurement_cache import Remembered
from brim.planning.seconds.rated_seconds import triggers
from brim.predict.cost import flops_per_s
from brim.techniques.blocks import Partition, tensor_bytes

_METHOD = 2  # raised when the measurement changes
_COLD_BYTES = 256 << 20  # several times the last-level cache of most processors
_RAM_SHARE = 1 / 3  # of free memory, for a block and its copies
_RUNS, _MOST_RUNS = 3, 15
_ARITHMETIC = ("float32", "bfloat16", "float16")


def block_seconds(
    model: nn.Module,
    partition: Partition,
    inputs: Example,
    *,
    training: bool,
    limit_s: float = 3.0,
    calls: Calls | None = None,
) -> Mapping[str, BlockSeconds]:
    """Return the seconds of each block of ``partition`` in a step on this machine, and under ``""`` those outside.

    ``model`` may be on meta. ``inputs`` is an example of the model's inputs (its values do not matter), or ``Inputs``
    for the pass of a token with a full cache. Where a pass would take longer than ``limit_s``, fewer tokens are
    timed and scaled by arithmetic and bytes; a block without room in RAM is estimated from the machine's rates. A
    tied block has the seconds of all its uses. The backward pass outside of blocks is timed from the last block on.
    ``calls`` are the results of ``calls_of``, if known. Raises UnsupportedError where a pass needs values that only a
    real run has.
    """
    timing = _Timing(model, partition, training, limit_s)
    owners = triggers(partition)
    return timing.measured(inputs, calls_of(model, owners, inputs) if calls is None else calls.of(owners))


def _roofline_s(call: Call, hardware: Hardware) -> float:
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors_in(call.output, call.args, call.kwargs)]
    rate = flops_per_s(hardware, next((name for name in dtypes if name in _ARITHMETIC), "float32"))
    return max(call.flops / rate, call.bytes / hardware.tier(hardware.compute).bytes_per_s)


class _Timing:
    def __init__(self, model: nn.Module, partition: Partition, training: bool, limit_s: float) -> None:
        self._model, self._partition, self._training = model, partition, training
        self._limit_s = limit_s
        self._hardware = probe()
        self._device = torch.device("cuda" if self._hardware.compute == VRAM else "cpu")
        self._owners = triggers(partition)

    @cached_property
    def _memory(self) -> Remembered:
        facts = (_METHOD, self._hardware.name, torch.__version__, torch.get_num_threads(), str(self._device))
        return Remembered("block-seconds", facts)

    def measured(self, inputs: Example, calls: Calls) -> dict[str, BlockSeconds]:
        # Cached seconds need no pass.
        seconds = {kind: remembered for kind in calls.kinds if (remembered := self._known(kind)) is not None}
        rest = self._known(_outside_key(calls))
        if len(seconds) < len(calls.kinds) or rest is None:
            seconds, rest = self._measure(calls, inputs, seconds)
            kept = seconds | {_outside_key(calls): rest}
            self._memory.keep({self._key(kind): [t.forward_s, t.backward_s] for kind, t in kept.items()})
        total = {block.name: BlockSeconds(forward_s=0.0) for block in self._partition.blocks}
        for path, kind in calls.parts:
            block = self._owners[path]
            total[block] = _sum(total[block], seconds[kind])
        return total | {OUTSIDE: rest}

    def _key(self, kind: str) -> str:
        return f"{kind} {'trained' if self._training else 'forward'}"

    def _known(self, kind: str) -> BlockSeconds | None:
        value = self._memory.get(self._key(kind), count=2)
        return None if value is None else BlockSeconds(forward_s=value[0], backward_s=value[1])

    def _measure(
        self, calls: Calls, inputs: Example, known_seconds: Mapping[str, BlockSeconds]
    ) -> tuple[dict[str, BlockSeconds], BlockSeconds]:
        """Return the seconds by kind of call, and those outside of blocks; a large step is timed by a smaller one."""
        small = calls
        while self._estimate_s(small) > self._limit_s:
            fewer = _smaller(inputs)
            if fewer is None:
                break
            smaller = calls_of(self._model, self._owners, fewer)
            if self._estimate_s(smaller) >= self._estimate_s(small):
                break
            inputs, small = fewer, smaller
        owners = {kind: path for path, kind in small.parts}  # a module of each kind
        budget_s = self._limit_s / max(1, len(small.kinds))
        seconds, timed = dict(known_seconds), {}
        for (_, kind), (_, like) in zip(calls.parts, small.parts, strict=True):
            if kind in seconds:
                continue
            if like not in timed:
                timed[like] = self._time(owners[like], small.kinds[like], budget_s)
            share = self._roofline_s(calls.kinds[kind]) / max(1e-12, self._roofline_s(small.kinds[like]))
            seconds[kind] = _scaled(timed[like], share if kind != like else 1.0)
        full_s = sum(self._roofline_s(call) for call in calls.kinds.values())
        small_s = sum(self._roofline_s(call) for call in small.kinds.values())
        return seconds, _scaled(self._time_rest(small), full_s / max(1e-12, small_s))

    def _estimate_s(self, calls: Calls) -> float:
        passes = (1 + _RUNS) * (3 if self._training else 1)
        return passes * sum(self._roofline_s(call) for call in calls.kinds.values())

    def _roofline_s(self, call: Call) -> float:
        return _roofline_s(call, self._hardware)

    # -- a block

    def _time(self, path: str, call: Call, budget_s: float) -> BlockSeconds:
        original = self._model.get_submodule(path)
        size = sum(tensor_bytes(t) for t in (*original.parameters(), *original.buffers()))
        room = free_bytes(self._hardware.compute) * _RAM_SHARE - call.written_bytes
        takes = size * (2 if self._training else 1)  # gradients
        if takes > room:
            forward_s = self._roofline_s(call)
            return BlockSeconds(forward_s=forward_s, backward_s=2 * forward_s * self._training)
        like = sum(type(part) is type(original) for part in self._model.modules())
        count = max(1, min(like, -(-_COLD_BYTES // max(1, size)), int(room // max(1, takes))))
        copies = [_copy(original, self._device, self._training) for _ in range(count)]
        args, kwargs = copied((call.args, call.kwargs), lambda t: _real(t, self._device, call.read))

        def run_once(index: int) -> BlockSeconds:
            inputs = copied((args, kwargs), lambda tensor: tensor)  # a cache grows with every call
            return self._run(copies[index % count], *inputs)

        return _median(run_once, budget_s)

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockSeconds:
        if not self._training:
            with torch.inference_mode():
                return BlockSeconds(forward_s=self._clock(lambda: module(*args, **kwargs))[0])
        for tensor in tensors_in(args, kwargs):
            if tensor.is_floating_point() and tensor.is_leaf:
                tensor.requires_grad_(True)
                tensor.grad = None
        module.zero_grad(set_to_none=True)
        with torch.enable_grad():
            forward_s, output = self._clock(lambda: module(*args, **kwargs))
        loss = getattr(output, "loss", None)
        ends = [
            t for t in ([loss] if isinstance(loss, torch.Tensor) else tensors_in(output)) if t.grad_fn is not None
        ]
        gradients = [torch.ones_like(t) for t in ends]
        backward_s = self._clock(lambda: torch.autograd.backward(ends, gradients))[0] if ends else 0.0
        return BlockSeconds(forward_s=forward_s, backward_s=backward_s)

    def _clock(self, work: Callable[[], Any]) -> tuple[float, Any]:
        if self._device.type == "cpu":
            watch = Stopwatch()
            output = work()
            return watch.read_s(), output
        on = accelerator.of(self._device)
        on.synchronize()
        began_s = time.perf_counter()
        output = work()
        on.synchronize()
        return time.perf_counter() - began_s, output

    # -- the rest

    def _time_rest(self, calls: Calls) -> BlockSeconds:
        """Time the model with parts replaced by stubs that return recorded outputs."""
        if "" in self._owners:
            return BlockSeconds(forward_s=0.0)
        given_bytes = sum(tensor_bytes(t) for t in held_tensors((calls.model.args, calls.model.kwargs)))
        if given_bytes > free_bytes(self._hardware.compute) * _RAM_SHARE:  # no room for the cache
            parts_s = sum(self._roofline_s(calls.kinds[kind]) for _, kind in calls.parts)
            forward_s = max(0.0, self._roofline_s(calls.model) - parts_s)
            return BlockSeconds(forward_s=forward_s, backward_s=2 * forward_s * self._training)
        memo: dict[int, Any] = {}
        outputs = {
            kind: copied(call.output, lambda t: _real(t, self._device, None)) for kind, call in calls.kinds.items()
        }
        for path, _ in calls.parts:
            part = self._model.get_submodule(path)
            memo[id(part)] = _Stub(part, [outputs[kind] for other, kind in calls.parts if other == path])
        model = _copy(self._model, self._device, self._training, memo)
        args, kwargs = copied(
            (calls.model.args, calls.model.kwargs), lambda t: _real(t, self._device, calls.model.read)
        )

        def run_once(index: int) -> BlockSeconds:
            for stub in model.modules():
                if isinstance(stub, _Stub):
                    stub.rewind(self._training)
            return self._run(model, *copied((args, kwargs), lambda tensor: tensor))

        return _median(run_once, self._limit_s / 10)


class _Stub(nn.Module):
    """Stand in for a part: return its recorded outputs, and expose its attributes."""

    def __init__(self, original: nn.Module, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._known = (original,)  # in a tuple, so that its parameters are not this module's
        self._outputs, self._turn = list(outputs), 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_known"][0], name)

    def rewind(self, training: bool) -> None:
        self._turn = 0
        for tensor in tensors_in(self._outputs):
            if training and tensor.is_floating_point():
                tensor.requires_grad_(True)
                tensor.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._outputs[self._turn % len(self._outputs)]
        self._turn += 1
        return output


def _outside_key(calls: Calls) -> str:
    """Return the cache key of the seconds outside of blocks: a digest of all calls, in order."""
    return "rest " + hashlib.sha256(repr([kind for _, kind in calls.parts]).encode()).hexdigest()[:16]


def _smaller(inputs: Example) -> Example | None:
    """Halve the sequences, or the tokens of one sequence; None where neither can be halved."""
    if isinstance(inputs, Inputs):
        if inputs.batch > 1:
            return replace(inputs, batch=inputs.batch // 2)
        return None if inputs.total < 2 else replace(inputs, prompt=1, total=inputs.total // 2)
    tensors = [t for t in tensors_in(inputs) if t.dim()]
    rows = {t.shape[0] for t in tensors}
    lengths = {t.shape[1] for t in tensors if t.dim() == 2}
    if len(rows) == 1 and (count := min(rows)) > 1:
        return _mapped(inputs, lambda t: t[: count // 2] if t.dim() else t)
    # Only tensors of tokens can be cut: an image's second dimension is no sequence.
    if len(lengths) == 1 and all(t.dim() == 2 for t in tensors) and (count := min(lengths)) > 1:
        return _mapped(inputs, lambda t: t[:, : count // 2] if t.dim() else t)
    return None


def _mapped(inputs: Example, change: Callable[[torch.Tensor], torch.Tensor]) -> Example:
    changed: Example = tree_map_only(torch.Tensor, change, inputs)
    return changed


def _copy(original: nn.Module, device: torch.device, training: bool, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module with random values for all its tensors; ``memo`` has replacements for some of its parts."""
    replacements = dict(memo or {})
    inside = [
        t for part in _parts(original, replacements) for t in (*part._parameters.values(), *part._buffers.values())
    ]
    for tensor in inside:
        if tensor is None or id(tensor) in replacements:
            continue
        value = _random(tensor, device) if tensor.is_meta or isinstance(tensor, nn.Parameter) else tensor.to(device)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=training and tensor.requires_grad)
        replacements[id(tensor)] = value
    copied: nn.Module = copy.deepcopy(original, replacements)
    return copied.train(training)


def _parts(module: nn.Module, memo: Mapping[int, Any]) -> list[nn.Module]:
    if id(module) in memo:
        return []
    return [module, *(part for child in module.children() for part in _parts(child, memo))]


def _real(tensor: torch.Tensor, device: torch.device, read: frozenset[int] | None) -> torch.Tensor:
    """Replace a fake tensor by random values where it is ``read`` (None: always), else by an expanded zero."""
    if read is not None and tensor.untyped_storage()._cdata not in read:
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return _random(tensor, device)


def _random(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Create values as small as those of a trained model; integers are 0, which is a valid index."""
    if tensor.dtype == torch.bool:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    count = tensor.numel()
    with torch.inference_mode(False):
        values = torch.empty(count, dtype=tensor.dtype, device=device)
        if device.type == "cpu":  # in pages as large as those of a run
            values = HostSource().make(count * tensor.element_size()).view(tensor.dtype)
        generator = torch.Generator().manual_seed(0)  # not the user's
        few = torch.rand(min(count, 1 << 18), generator=generator).sub_(0.5).mul_(0.04)
        few = few.to(device=device, dtype=tensor.dtype)
        whole = count // max(1, len(few)) * len(few)
        if whole:
            values[:whole].view(-1, len(few)).copy_(few)
        values[whole:].copy_(few[: count - whole])
        return values.view(tensor.shape)


def _median(run: Callable[[int], BlockSeconds], budget_s: float) -> BlockSeconds:
    """Return the median of as many runs as fit ``budget_s``, or the first run."""
    began_s = time.perf_counter()
    first = run(0)
    runs: list[BlockSeconds] = []
    while len(runs) < _MOST_RUNS:
        spent_s = time.perf_counter() - began_s
        if spent_s + spent_s / (len(runs) + 1) > budget_s and (runs or spent_s > budget_s):
            break
        runs.append(run(len(runs) + 1))
    return BlockSeconds(
        forward_s=statistics.median(t.forward_s for t in runs or [first]),
        backward_s=statistics.median(t.backward_s for t in runs or [first]),
    )


def _sum(first: BlockSeconds, second: BlockSeconds) -> BlockSeconds:
    return BlockSeconds(forward_s=first.forward_s + second.forward_s, backward_s=first.backward_s + second.backward_s)


def _scaled(seconds: BlockSeconds, factor: float) -> BlockSeconds:
    return BlockSeconds(forward_s=seconds.forward_s * factor, backward_s=seconds.backward_s * factor)
