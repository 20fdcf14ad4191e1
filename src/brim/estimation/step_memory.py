"""Observe a forward pass on fake tensors: peak of its activations, readers of each parameter, work of each
module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.model_cache import cache_input, cache_of
from brim.model_inputs import map_tensors
from brim.predict.compiled.torch_compile import as_written
from brim.predict.dispatch import RecordingMode
from brim.predict.modules import ModuleTracker
from brim.predict.recorder import Recorder
from brim.predict.values.assumptions import Values
from brim.techniques.blocks import Partition
from brim.techniques.dry_run import not_predictable

PROMPT, TOKEN = "prompt", "token"  # passes of a generation


class ModuleWork(NamedTuple):
    """Work of a module's own operations in a pass, without the modules inside it.

    ``bytes`` are read and written; ``kernels`` counts operations except views; ``dtype`` is that of most arithmetic.
    """

    flops: int
    bytes: int
    kernels: int
    dtype: str


PassWork = Mapping[str, ModuleWork]  # by the module's path


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Observations of a step. ``uses``: parameter -> the sets of modules that were active when it was read.

    ``passes``: the work of the named passes. ``waits``: those in which the host waits for values of tensors.
    """

    step_bytes: int
    uses: Mapping[str, frozenset[frozenset[str]]]
    passes: Mapping[str, PassWork] = field(default_factory=dict)
    waits: frozenset[str] = frozenset()

    def allows(self, partition: Partition) -> bool:
        """True if every block is read only during a call of one of its triggers.

        A module may read the weights of a child that it never calls (a fused path): the child cannot be moved alone
        then.
        """
        return all(
            any(trigger in active for trigger in block.triggers)
            for block in partition.blocks
            for name in block.tensors
            for active in self.uses.get(name, ())
        )


_ATEN = torch.ops.aten
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
_GIVEN = frozenset({Category.PARAMETER, Category.BUFFER, Category.INPUT})


class StepWatch(RecordingMode):
    """Records operations as a trace does, without workspaces of kernels; notes which modules read which parameter."""

    def __init__(self, model: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
        super().__init__(Recorder(), ModuleTracker(), Values(), lambda func: None)
        self.uses: dict[str, set[frozenset[str]]] = {}
        self.waits: set[str] = set()
        self._pass = ""
        self._pauses: list[range] = []
        self._passes: dict[str, range] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
        for tensor in given.values():
            self.adopt(tensor, Category.PARAMETER)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                name = self._names.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    self.uses.setdefault(name, set()).add(self._running())
        if _needs_values(func, args):
            self.waits.add(self._pass)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _running(self) -> frozenset[str]:
        """Paths of the modules that are being called; "" for a module that is not the model's."""
        return frozenset(self._paths.get(id(module), "") for module in self.modules.running())

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the peak out while the context is open; allocations that remain afterwards count."""
        first = self.recorder.tick()
        yield
        self._pauses.append(range(first, self.recorder.tick()))

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Record the pass ``name`` while the context is open; of several with the same name the first counts."""
        first, self._pass = len(self.recorder.runs), name
        yield
        self._pass = ""
        self._passes.setdefault(name, range(first, len(self.recorder.runs)))

    def passes(self) -> dict[str, PassWork]:
        return {name: self._work(indices) for name, indices in self._passes.items()}

    def _work(self, indices: range) -> PassWork:
        modules = {-1: "", **{index: self._paths.get(id(part), "") for index, part in self.modules.modules()}}
        work: dict[str, list[int]] = {}
        most: dict[str, tuple[int, str]] = {}
        for run in self.recorder.runs[indices.start : indices.stop]:
            path, moved = modules.get(run.module, ""), run.work.read_bytes + run.work.written_bytes
            total = work.setdefault(path, [0, 0, 0])
            total[0] += run.work.flops
            total[1] += moved
            total[2] += bool(run.work.flops or run.work.written_bytes)
            most[path] = max(most.get(path, (-1, "")), (run.work.flops, run.work.dtype))
        return {
            path: ModuleWork(flops=flops, bytes=moved, kernels=kernels, dtype=most[path][1])
            for path, (flops, moved, kernels) in work.items()
        }

    def peak_bytes(self) -> int:
        """Peak of the bytes allocated by operations."""
        allocated = [life for life in self.recorder.lives if life.category not in _GIVEN]
        changes = [(life.born, life.bytes) for life in allocated]
        changes += [(life.died, -life.bytes) for life in allocated if life.died is not None]
        held = peak = 0
        for tick, bytes in sorted(changes):
            before, held = held, held + bytes
            if not any(tick in pause for pause in self._pauses):
                peak = max(peak, before, held)
        return peak


def watch_step(model: nn.Module, run: Callable[[Callable[..., Any], StepWatch], None]) -> Observation:
    """Observe ``run(call, watch)``, where ``call`` is the model on fake tensors under no_grad.

    Raises UnsupportedError if the forward pass needs values of tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad(), torch.inference_mode(False):
        parameters = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
        buffers = {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}
        watch = StepWatch(model, parameters)
        for buffer in buffers.values():
            watch.adopt(buffer, Category.BUFFER)

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map(_faked(fake), (args, kwargs))
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and watch.life_of(tensor) is None:
                    watch.adopt(tensor, Category.INPUT)
            with watch.modules.watching(), as_written(watch.recorder.not_modelled), watch:
                return torch.func.functional_call(model, parameters | buffers, args, kwargs)

        try:
            run(call, watch)
        except (RuntimeError, UnsupportedError) as error:  # fake kernels raise RuntimeError and subclasses
            raise not_predictable(f"a step of {type(model).__name__}", error) from error
    uses = {name: frozenset(readers) for name, readers in watch.uses.items()}
    return Observation(step_bytes=watch.peak_bytes(), uses=uses, passes=watch.passes(), waits=frozenset(watch.waits))


def _needs_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the host waits for values in ``func``: for a number, or for the size of the result."""
    if func in _INDEXED:  # by positions, or by a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def watch_example(model: nn.Module, example: Mapping[str, Any] | Sequence[Any]) -> Observation:
    """Observe a forward pass on an input like ``example``; the input itself is not counted."""

    def run(call: Callable[..., Any], watch: StepWatch) -> None:
        inputs = map_tensors(example, _hollow)
        with watch.named(PROMPT):
            if isinstance(inputs, Mapping):
                call(**inputs)
            else:
                call(*inputs)

    return watch_step(model, run)


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` on the CPU; under a fake mode it has no values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _faked(fake: FakeTensorMode) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor):
            return value
        if value.device.type not in ("cpu", "meta"):
            return torch.empty(value.shape, dtype=value.dtype)  # on the parameters' device, and fake
        return fake.from_tensor(value)

    return convert


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The largest step of a generation, for which memory is reserved.

    Attributes:
        batch: Sequences at once.
        prompt: Tokens of a sequence that the model processes at once.
        total: Tokens of each sequence in the KV cache at the end, including the prompt.
    """

    batch: int = 1
    prompt: int
    total: int


def watch_inference(module: nn.Module, inputs: Inputs) -> Observation:
    """Observe the prompt's pass and the last token's of a transformers model; its KV cache counts as activations."""
    config: Any = module.config
    if not generates(module) or config.is_encoder_decoder:
        return watch_example(module, dummy_inputs(module, inputs.batch, inputs.prompt))

    def run(call: Callable[..., Any], watch: StepWatch) -> None:
        with watch.named(PROMPT):
            call(**dummy_inputs(module, inputs.batch, inputs.prompt), use_cache=True, logits_to_keep=1)
        with watch.uncounted():  # a run fills the cache token by token, not at once
            past = call(
                **dummy_inputs(module, inputs.batch, max(inputs.total - 1, 1)), use_cache=True, logits_to_keep=1
            )
            state = cache_input(module, cache_of(past))
            del past
        with watch.named(TOKEN):
            call(**dummy_inputs(module, inputs.batch, 1), **state, use_cache=True, logits_to_keep=1)

    return watch_step(module, run)


def generates(module: nn.Module) -> bool:
    """True for a transformers model that generates text."""
    return hasattr(module, "generate") and bool(module.can_generate())  # type: ignore[operator]


def dummy_inputs(module: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of the right type and shape, with arbitrary values."""
    config: Any = module.config
    name = getattr(module, "main_input_name", "input_ids")
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else side
        return {name: torch.zeros(batch, getattr(config, "num_channels", 3), height, width)}
    if name != "input_ids":
        raise UsageError(
            f"{type(module).__name__} takes {name}, and brim does not know its size.",
            todo="Build the module yourself and use brim.fit(module, example=...).",
        )
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :1]} if config.is_encoder_decoder else {"input_ids": ids}
