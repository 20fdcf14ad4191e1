"""Checkpointing: a block saves its inputs, and backward recomputes the rest.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. Selective: the outputs of matrix
products and attention are saved (many flops for each byte), all else is recomputed (many bytes for each flop), as in
Korthikanti et al., arXiv 2205.05198. Alternate: selective, with only the first, third, ... of a block's matrix
products saved, as torchtitan's ``selective_ac_option = "op"`` does. It uses the non-reentrant
``torch.utils.checkpoint``, which restores autocast and PyTorch's random numbers; ``ForwardState`` restores the rest.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import operator
import pickle
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from brim import accelerator
from brim.core import Category, Hardware, Phase, Trace
from brim.errors import UnsupportedError, UsageError
from brim.model_inputs import tensors_in
from brim.predict.cost import base_name, op_s
from brim.random_numbers import all_generators, default_generators, restored, set_state, state_of
from brim.techniques.base import Option, StandIn, in_force
from brim.techniques.blocks import Block, Partition, is_container, tensor_bytes

NAME = "checkpointing"
NONE, SELECTIVE, ALTERNATE, FULL = "none", "selective", "alternate", "full"
CHOICES = (NONE, SELECTIVE, ALTERNATE, FULL)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# The operations whose outputs selective checkpointing saves: products and attention.
SAVED = (
    "mm", "addmm", "bmm", "convolution", "_grouped_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_OF_MODULES = frozenset(vars(nn.Module()))
_LEAST_DIMS = 3  # (rows, tokens, channels) or (rows, channels, ...): with less, rows may be tokens of one sequence
_ROUNDING = 0.05  # of the largest value: kernels of another number of rows round otherwise, also in bfloat16
_ROUNDINGS = 4  # of the dtype: sums by several threads at once may come in another order


def blocks(model: nn.Module) -> list[str]:
    """The parts of repeated containers, in definition order: decoder layers, residual blocks.

    A stage, which only contains further repeated parts, is opened. Leaves are never blocks: they save about as much
    as their inputs anyway.
    """
    return list(_parts(model, "", False))


def partition_of(model: nn.Module) -> Partition:
    """``blocks`` as a partition of ``model``, for plans in which all weights are resident."""
    named = list(model.named_parameters())
    blocks_found = []
    for path in blocks(model):
        mine = [(name, p) for name, p in named if name.startswith(f"{path}.")]
        if mine:
            names, size = tuple(name for name, _ in mine), sum(tensor_bytes(p) for _, p in mine)
            blocks_found.append(Block(name=path, triggers=(path,), lookups=(), tensors=names, bytes=size))
    inside = {name for block in blocks_found for name in block.tensors}
    loose = [(name, p) for name, p in named if name not in inside]
    loose_bytes = sum(tensor_bytes(p) for _, p in loose) + sum(tensor_bytes(b) for b in model.buffers())
    return Partition(blocks=tuple(blocks_found), loose=tuple(name for name, _ in loose), loose_bytes=loose_bytes)


def every(model: nn.Module, k: int) -> dict[str, str]:
    """The choices for ``apply`` of full checkpointing of every ``k``-th block, starting with the first."""
    if type(k) is not int or k < 1:
        raise UsageError(f"Cannot checkpoint every {k!r}-th block.", "It must be a whole number from 1.")
    return {name: FULL if index % k == 0 else NONE for index, name in enumerate(blocks(model))}


def apply(model: nn.Module, choices: Mapping[str, str], *, rows: int = 0) -> Checkpointing:
    """Checkpoint modules of ``model`` by their paths, each by its choice of ``CHOICES``.

    With ``rows`` > 0 a checkpointed block takes its batch in pieces of so many rows, in forward and in backward, and
    its parameters get one gradient. A block whose rows are not independent (batch norm, a capacity of experts) takes
    the batch as a whole, with a warning.

    It acts in training mode with gradients enabled only. Without ``rows`` losses, gradients and buffers are bit for
    bit those of the model without it. A key-value cache that is passed to such a block is not appended to, with a
    warning (``use_cache=False`` avoids it).

    Raises UsageError for an unknown path or choice, a block inside another one, or a block that is checkpointed
    already, by brim or by its own library.
    """
    chosen = {name: choice for name, choice in choices.items() if _known(name, choice) != NONE}
    modules = {name: _module(model, name) for name in chosen}
    for name, module in modules.items():
        _refuse(name, module, modules)
    return Checkpointing({name: (module, chosen[name]) for name, module in modules.items()}, rows)


class Checkpointing:
    """The handle. ``choices`` are those of the checkpointed blocks."""

    def __init__(self, chosen: Mapping[str, tuple[nn.Module, str]], rows: int = 0) -> None:
        self.choices = {name: choice for name, (_, choice) in chosen.items()}
        self._warned: set[str] = set()
        tensors = [parameter for module, _ in chosen.values() for parameter in module.parameters()]
        is_traced = _is_traced(tensors) or any(tensor.is_meta for tensor in tensors)
        generators = default_generators() if is_traced else all_generators()
        self._placed = [
            _Checkpointed(module, choice, rows, generators, self._warn) for module, choice in chosen.values()
        ]

    def remove(self) -> None:
        for placed in self._placed:
            placed.remove()
        self._placed = []

    def _warn(self, message: str) -> None:
        """Warn once of each thing."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


class _Checkpointed(StandIn):
    """A checkpointed forward; the module's hooks stay outside and are not repeated."""

    def __init__(
        self, module: nn.Module, choice: str, rows: int, generators: Sequence[Any], warn: Callable[[str], None]
    ) -> None:
        super().__init__(module)
        self.choice, self._rows, self._warn = choice, rows, warn
        self._generators = generators
        self._has_independent_rows: bool | None = None  # not known yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._active and self._module.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._outside_graph(*args, **kwargs)
        return self._in_pieces(*args, **kwargs)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # imports the compiler when called, not when defined
    def _outside_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Break the graph around the block: the contexts of checkpoints cannot be compiled."""
        return self._in_pieces(*args, **kwargs)

    def _in_pieces(self, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint the batch in pieces: autograd differentiates one after the other, and adds up their gradients of
        the parameters before it sets them.
        """
        rows = _rows_of((args, kwargs)) if self._rows else 0
        if rows <= self._rows or not self._are_independent(args, kwargs, rows):
            return self._checkpointed(*args, **kwargs)
        parts = _pieces((args, kwargs), self._rows, rows)
        outputs = [self._checkpointed(*its_args, **its_kwargs) for its_args, its_kwargs in parts]
        output = _joined(outputs)
        return self._checkpointed(*args, **kwargs) if output is None else output

    def _are_independent(self, args: Any, kwargs: Any, rows: int) -> bool:
        if self._has_independent_rows is None:
            self._has_independent_rows = not _mixes_rows(self._module) and _computes_alike(
                self._module, self._forward, args, kwargs, rows
            )
            for device in {tensor.device for tensor in tensors_in(args, kwargs)}:
                if device.type in accelerator.kinds():
                    accelerator.of(device).empty_cache()  # the memory of two rows would fit nothing else
            if not self._has_independent_rows:
                name = type(self._module).__name__
                self._warn(f"{name} takes its batch as a whole: its rows are not computed independently.")
        return self._has_independent_rows

    def _checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        names, count = tuple(kwargs), len(args)
        # Positional: torch.utils.checkpoint saves positional arguments by saved-tensor hooks, others by reference.
        arguments = [copy_of_cache(value) if is_cache(value) else value for value in (*args, *kwargs.values())]
        caches = [value for value in arguments if is_cache(value)]
        unwritten = Unwritten(caches)
        if caches:
            self._warn(
                "use_cache is ignored, because checkpointed blocks cannot write to a KV cache. Pass use_cache=False."
            )

        def run(*values: Any) -> Any:
            values = tuple(copy_of_cache(value) if is_cache(value) else value for value in values)
            return self._forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        before = ForwardState(self._module, self._generators)
        output = checkpoint(run, *arguments, use_reentrant=False, context_fn=partial(self._contexts, before))
        before.forget_unused()
        unwritten.check(self._module)
        return output

    def _contexts(self, before: ForwardState) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self.choice == FULL:
            return nullcontext(), before
        forward, again = selective_contexts(alternate=self.choice == ALTERNATE)
        return forward, Together(before, again)


def _rows_of(arguments: Any) -> int:
    """The rows of a block's first tensor; 0 where another dimension is as long, so that it does not tell the rows."""
    first = next(iter(tensors_in(arguments)), None)
    if first is None or first.dim() < _LEAST_DIMS or first.shape[0] in first.shape[1:]:
        return 0
    return first.shape[0]


def _pieces(arguments: Any, size: int, rows: int) -> list[Any]:
    """The arguments of each ``size`` rows: parts of each tensor with ``rows`` rows; other values are in all parts."""
    count = -(-rows // size)
    columns = [leaf.split(size) if _has_rows(leaf, rows) else [leaf] * count for leaf in tree_leaves(arguments)]
    structure = tree_structure(arguments)
    return [tree_unflatten(list(values), structure) for values in zip(*columns, strict=True)]


def _joined(outputs: list[Any]) -> Any:
    """The output of a block from those of its pieces; None where they have values that no concatenation gives."""
    columns = list(zip(*map(tree_leaves, outputs), strict=True))
    if not all(first is None or (isinstance(first, torch.Tensor) and first.dim()) for first, *_ in columns):
        return None
    together = [None if column[0] is None else torch.cat(column) for column in columns]
    return tree_unflatten(together, tree_structure(outputs[0]))


def _mixes_rows(block: nn.Module) -> bool:
    """Return whether a part of ``block`` is known to compute with several rows at once: batch norm, or a capacity of
    experts over the batch.
    """
    return any(
        (isinstance(part, _BatchNorm) and (part.training or part.running_mean is None))
        or any("capacity" in name for name in vars(part))
        for part in block.modules()
    )


def _computes_alike(block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, rows: int) -> bool:
    """Return whether ``forward`` of ``block`` gives a row the same beside another row, beside itself and alone.

    Beside itself the kernels are the same, so the results are, up to a few roundings; alone, without dropout, they
    are about the same. A block that stores a tensor (a loss of its experts), writes to its input or cannot take some
    of the rows is not alike. A trace has no values: only the shapes are compared there.
    """
    leaves, structure = tree_leaves((args, kwargs)), tree_structure((args, kwargs))
    training, written = [part for part in block.modules() if part.training], False
    # Each call draws the same random numbers, and leaves the program's own as they were.
    devices = {tensor.device for tensor in [*tensors_in(leaves), *block.parameters()]}
    places = {device.index for device in devices if device.type in accelerator.kinds()}
    kind = next((device.type for device in devices if device.index in places), accelerator.CUDA)
    same_numbers = partial(torch.random.fork_rng, places, device_type=kind)

    def call(*chosen: int) -> list[Any]:
        nonlocal written
        taken = [leaf[list(chosen)] if _has_rows(leaf, rows) else leaf for leaf in leaves]
        taken = [copy_of_cache(leaf) if is_cache(leaf) else leaf for leaf in taken]
        taken = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in taken]
        its_args, its_kwargs = tree_unflatten(taken, structure)
        own = ForwardState(block, default_generators(), attributes=False)
        with own, nullcontext() if _is_traced(leaves) else same_numbers():
            outputs = tree_leaves(forward(*its_args, **its_kwargs))
        written |= any(tensor._version > 0 for tensor in tensors_in(taken))
        return outputs

    def agree(pair: list[Any], row: int, other: list[Any], tolerance: float | None = None) -> bool:
        return all(_is_alike(one, row, two, tolerance) for one, two in zip(pair, other, strict=True))

    attributes = _Attributes([*block.modules()])
    try:
        with torch.no_grad():
            pair, stored = call(0, 1), _stored(block)
            is_alike = agree(pair, 0, call(0, 0))
            block.eval()  # without dropout, which differs from call to call
            pair = call(0, 1)
            is_alike = is_alike and agree(pair, 0, call(0), _ROUNDING) and agree(pair, 1, call(1), _ROUNDING)
        now = _stored(block)
        return is_alike and not written and len(stored) == len(now) and all(map(operator.is_, stored, now))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False  # all rows at once raise the user's own error, if there is one
    finally:
        attributes.set()
        for part in training:
            part.training = True


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:1] == (rows,)


def _stored(block: nn.Module) -> list[torch.Tensor]:
    """The tensors that are attributes of parts of ``block``, but no parameters or buffers."""
    return [value for part in block.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]


def _is_alike(pair: Any, row: int, other: Any, tolerance: float | None) -> bool:
    """Return whether ``row`` of ``pair`` is the first row of ``other``, up to ``tolerance`` of the largest value, or
    (None) a few roundings of its dtype.
    """
    if pair is None or other is None:
        return pair is other
    if not isinstance(pair, torch.Tensor) or pair.shape[:1] != (2,) or pair.shape[1:] != other.shape[1:]:
        return False  # T5's position bias has no rows
    if _is_traced(pair):
        return True
    if not pair.is_floating_point():
        return torch.equal(pair[row], other[0])
    share = _ROUNDINGS * torch.finfo(pair.dtype).eps if tolerance is None else tolerance
    return bool((pair[row] - other[0]).abs().max() <= share * pair.abs().max())


def _is_traced(*arguments: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(arguments))


def selective_contexts(*, alternate: bool = False) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts, for ``torch.utils.checkpoint``'s ``context_fn``, that save the outputs of ``SAVED`` operations;
    with ``alternate`` those of every other matrix product only."""
    saved = [getattr(torch.ops.aten, name).default for name in SAVED]
    product = torch.ops.aten.mm.default
    # Separate counts, because only some versions of PyTorch call the policy again during recomputation.
    products = {again: itertools.count() for again in (False, True)}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op in saved and not (op is product and next(products[context.is_recompute]) % 2)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = create_selective_checkpoint_contexts(
        policy if alternate else saved
    )
    return contexts


def options(trace: Trace, hardware: Hardware, names: Sequence[str]) -> list[Option]:
    """The options of each block of ``names``, from the last step of a ``trace`` without checkpointing."""
    start = trace.step_starts[-1]
    ops = sorted((op for op in trace.ops if op.at >= start and op.phase is Phase.FORWARD), key=lambda op: op.at)
    backward = min((op.at for op in trace.ops if op.at >= start and op.phase is Phase.BACKWARD), default=start)
    ticks = [op.at for op in ops]
    rows = []
    for name in names:
        inside = sorted(
            (s for s in trace.storages if start <= s.born < backward and _within(s.module, name)),
            key=lambda s: s.born,
        )
        makers = {s.id: base_name(ops[index - 1].name) for s in inside if (index := bisect_right(ticks, s.born))}
        kept = [s for s in inside if s.category is Category.ACTIVATION]
        saved = {s.id for s in inside if makers.get(s.id) in SAVED}
        again = [op for op in ops if _within(op.module, name)]
        for choice in (SELECTIVE, FULL):
            selective = choice == SELECTIVE
            # The last storage is the block's output, which the next block saves.
            saves_bytes = sum(s.bytes for s in kept[:-1] if not (selective and s.id in saved))
            if selective:  # also what the plain pass frees
                saves_bytes -= sum(s.bytes for s in inside if s.category is Category.TEMPORARY and s.id in saved)
            seconds = sum(op_s(op, hardware) for op in again if not (selective and base_name(op.name) in SAVED))
            rows.append(Option(block=name, choice=choice, saves_bytes=saves_bytes, compute_s=seconds))
    return rows


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _parts(module: nn.Module, path: str, repeated: bool) -> Iterator[str]:
    if repeated and not _is_stage(module):
        if any(True for _ in module.children()):
            yield path
        return
    parts = is_container(module)
    for name, child in module.named_children():
        yield from _parts(child, f"{path}.{name}" if path else name, parts)


def _is_stage(module: nn.Module) -> bool:
    """Return whether a module consists mostly of repeated parts: a container, or the owner of a large one."""
    if isinstance(module, _CONTAINERS):
        return any(_is_composite(child) for child in module.children())
    inner = [child for child in module.children() if isinstance(child, _CONTAINERS)]
    if len(inner) != 1 or len({type(part) for part in inner[0].children()}) != 1:
        return False  # parts of several kinds are a single block (T5's attention and feed-forward)
    composite = all(_is_composite(part) for part in inner[0].children())
    return composite and 2 * _count(inner[0]) > _count(module) > 0


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _known(name: str, choice: str) -> str:
    if choice not in CHOICES:
        raise UsageError(f"Unknown checkpointing={choice!r} for {name}.", f"Known: {', '.join(CHOICES)}.")
    return choice


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise UsageError(
            f"Cannot checkpoint {name!r} of {type(model).__name__}.",
            "It has no such part.",
            f"Its blocks are {', '.join(blocks(model)) or 'unknown'}.",
        ) from error


def _refuse(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    if any(isinstance(placed, _Checkpointed) for placed in in_force(module)):
        raise UsageError(
            f"Cannot checkpoint {name}.", "It is checkpointed already.", "Call .remove() on its handle first."
        )
    inside = {id(part): path for path, part in modules.items() if part is not module}
    for part in module.modules():
        if id(part) in inside:
            raise UsageError(f"Cannot checkpoint both {name} and {inside[id(part)]}.", "One is inside the other.")
        if getattr(part, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"Cannot checkpoint {name}.",
                f"Its library checkpoints {type(part).__name__} already.",
                "Call the model's gradient_checkpointing_disable() first.",
            )


class ForwardState:
    """A context for the recomputation of ``module``'s forward, with the present state of what a forward may change.

    Buffers: batch norm and spectral norm write to theirs; copies replace the module's own and are dropped. Attributes
    of parts, with the contents of lists, dicts and sets: counters, losses of experts. Random ``generators`` that the
    forward uses. At the end all is as at the beginning. It may be entered more than once.
    """

    def __init__(self, module: nn.Module, generators: Sequence[Any], *, attributes: bool = True) -> None:
        with torch.no_grad():
            self._copies = [
                (owner, name, buffer.clone())
                for owner in module.modules()
                for name, buffer in owner._buffers.items()
                if buffer is not None
            ]
        self._attributes = _Attributes([*module.modules()] if attributes else [])
        self._states = [(one, state_of(one)) for one in generators if one is not torch.default_generator]
        self._undo = ExitStack()

    def forget_unused(self) -> None:
        """Forget the generators that the forward did not use: other threads may use them."""
        self._states = [(one, state) for one, state in self._states if not _is_same(state, state_of(one))]

    def __enter__(self) -> None:
        undo = self._undo = ExitStack()
        undo.enter_context(restored([generator for generator, _ in self._states]))
        for generator, state in self._states:
            set_state(generator, state)
        undo.callback(_Attributes(self._attributes.parts).set)
        self._attributes.set()
        for owner, name, before in self._copies:
            undo.callback(owner._buffers.__setitem__, name, owner._buffers[name])
            with torch.no_grad():
                owner._buffers[name] = before.clone()

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class _Attributes:
    """The present attributes of ``parts``, without those that every module has, and the contents of containers."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts
        self._values = [
            (vars(part), {name: value for name, value in vars(part).items() if name not in _OF_MODULES})
            for part in parts
        ]
        self._contents = [
            (value, value.copy())
            for _, values in self._values
            for value in values.values()
            if type(value) in (list, dict, set)
        ]

    def set(self) -> None:
        for attributes, values in self._values:
            for name in attributes.keys() - values.keys() - _OF_MODULES:
                del attributes[name]
            attributes.update(values)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


def _is_same(state: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(state, torch.Tensor):  # no operation compares them: a trace may run
        return ctypes.string_at(state.data_ptr(), state.nbytes) == ctypes.string_at(other.data_ptr(), other.nbytes)
    return bool(state == other) if isinstance(state, tuple) else pickle.dumps(state) == pickle.dumps(other)  # arrays


class Together:
    """Several reusable context managers as a single one."""

    def __init__(self, *parts: AbstractContextManager[Any]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *failure: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*failure)


def is_cache(value: object) -> bool:
    """Return whether ``value`` is a key-value cache like those of transformers, which forward appends to."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("update", "get_seq_length"))


def copy_of_cache(cache: Any) -> Any:
    """A copy of a cache with the same tensors, which can be appended to without changing the original."""
    copied = copy.copy(cache)
    for name, value in vars(copied).items():
        vars(copied)[name] = _copy_of_part(value)
    return copied


def _is_part(value: object) -> bool:
    """Return whether ``value`` is a layer of a cache, or a cache in a cache."""
    return is_cache(value) or (hasattr(value, "update_conv_state") and not isinstance(value, type))


def _copy_of_part(value: Any) -> Any:
    if _is_part(value):
        return copy_of_cache(value)
    if isinstance(value, list):
        return [_copy_of_part(item) for item in value]
    if type(value) is dict:
        return {name: _copy_of_part(item) for name, item in value.items()}
    return value


class Unwritten:
    """Checks that no existing tensor of a cache is written to: the recomputation would write it again."""

    def __init__(self, caches: Iterable[Any]) -> None:
        self._versions = [(tensor, tensor._version) for cache in caches for tensor in _tensors(vars(cache))]

    def check(self, block: nn.Module) -> None:
        """Raise UnsupportedError if a tensor was written to."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                f"Cannot checkpoint {type(block).__name__} with a cache that it writes to in place.",
                "Its forward pass runs again during backward and would write a second time.",
                "Pass use_cache=False, or leave this block out.",
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif _is_part(value):
        yield from _tensors(vars(value))
