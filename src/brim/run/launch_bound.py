"""The most that a step of a model can take: of a copy without values that is run, its memory counted to be too much.

A prediction follows a step on tensors that pretend to lie on the CPU, and takes half a second and more. On tensors
without values ("meta") a step takes a twentieth of that, and allocates the same but for what is left out here or
counted twice: all small tensors stay, kernels keep all that they take inside until they return, attention writes
every score, and the largest parameters are updated one after the other. So what fits by this count fits.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from brim.memory.heap import KEPT_BYTES, OWN_MAPPING_BYTES
from brim.run.launch_unseen import unseen, without_dynamo
from brim.run.stand_in_loss import loss_of

META = torch.device("meta")
_PAGE_BYTES, _ALIGNMENT_BYTES, _HEADER_BYTES = 4096, 64, 16
_UPDATE_COPIES = 8  # of a parameter: no loop over parameters in torch.optim has more at once
_NUMBER_BYTES = 3 * 128  # counters of an optimizer for a parameter
_aten = torch.ops.aten
_Example = Mapping[str, Any] | Sequence[Any]


def most_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, example: _Example, *, trains: bool
) -> int | None:
    """The most of a forward pass, or with ``trains`` of any step, the first and later ones; None: it is not known."""
    if not trains:
        forward = _ran(model, example, trains=False)
        return None if forward is None else _held(model) + forward[0]
    found = (0, 0) if optimizer is None else _optimizer_bytes(optimizer, model)
    if found is None or any(isinstance(part, nn.RNNBase) for part in model.modules()):
        return None
    step = _ran(model, example, trains=True)
    if step is None:
        return None
    (states, update), (peak, left) = found, step
    # The heap's top may stay where updates of small parameters left it.
    return KEPT_BYTES + _held(model) + states + max(peak, _gradient_bytes(model) + left + update)


def least_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int | None:
    """Less than a bound can be: it is not worth looking for one where this is too much. None: there will be none."""
    if optimizer is None:
        return _held(model)
    found = _optimizer_bytes(optimizer, model)
    return None if found is None else _held(model) + _gradient_bytes(model) + sum(found)


def _gradient_bytes(model: nn.Module) -> int:
    return sum(_resident(_nbytes(p)) for p in model.parameters() if p.requires_grad)


# -- optimizers


def _adam(group: Mapping[str, Any]) -> tuple[int, int]:
    """torch/optim/adam.py: a root and its quotient; a gradient of its own where that is not the one that is there."""
    coupled = group["weight_decay"] and not group.get("decoupled_weight_decay")
    return 2 + bool(group["amsgrad"]), 2 + bool(group["maximize"] or coupled)


def _sgd(group: Mapping[str, Any]) -> tuple[int, int]:
    """torch/optim/sgd.py: of the gradients that it makes one after the other, two at a time."""
    made = [group["maximize"], group["weight_decay"], group["nesterov"]]
    return int(bool(group["momentum"])), min(2, sum(map(bool, made)))


def _rmsprop(group: Mapping[str, Any]) -> tuple[int, int]:
    return 1 + bool(group["momentum"]) + bool(group["centered"]), _UPDATE_COPIES


# What each keeps for a parameter, and how many copies of one its update makes, in copies of the parameter.
_KNOWN: dict[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.NAdam: lambda group: (2, _UPDATE_COPIES),
    torch.optim.RAdam: lambda group: (2, _UPDATE_COPIES),
    torch.optim.Adamax: lambda group: (2, _UPDATE_COPIES),
    torch.optim.Adadelta: lambda group: (2, _UPDATE_COPIES),
    torch.optim.Adagrad: lambda group: (1, _UPDATE_COPIES),
}


def _optimizer_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[int, int] | None:
    """What it keeps, and what its update makes; None where either is not known.

    A loop over the parameters makes so many copies of the one that it has come to, and what it made last of the one
    before is still there.
    """
    count, states, largest, copies = _KNOWN.get(type(optimizer)), 0, [0, 0], 0
    mine = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        if count is None or any(group.get(name) for name in ("foreach", "differentiable", "capturable")):
            return None
        kept, made = count(group)
        copies = max(copies, made)
        for parameter in group["params"]:
            if not parameter.is_floating_point() or id(parameter) not in mine:
                return None
            if parameter.requires_grad:
                size = _resident(_nbytes(parameter))
                states += _NUMBER_BYTES + kept * size
                largest.append(size)
    first, second = sorted(largest)[-2:][::-1]
    return states, copies * first + second


# -- a step


def _ran(model: nn.Module, example: _Example, *, trains: bool) -> tuple[int, int] | None:
    """The most that was held at once of inputs and what operations made, and what is left of that but gradients.

    None where it cannot be run without values.
    """
    rule_of: Callable[[Any], Any] = lambda func: None  # noqa: E731  # as predictions of forward passes
    if trains:
        from brim.predict.lowering import rules_for

        rule_of = rules_for("cpu", (0, 0))
    tally = _Tally(rule_of)
    try:
        with unseen(model), without_dynamo(), META, torch.set_grad_enabled(trains):
            tensors = [*model.parameters(), *model.buffers()]
            twin = copy.deepcopy(model, {id(tensor): hollow(tensor) for tensor in tensors})
            inputs = tree_map_only(torch.Tensor, hollow, example)
            tally.adopt([*twin.parameters(), *twin.buffers()])
            given = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
            tally.adopt(given)
            if trains:
                twin.train()
            with tally, _NoAutocast():
                made = twin(**inputs) if isinstance(inputs, Mapping) else twin(*inputs)
                if trains:
                    loss_of(made).backward()
    except Exception:  # whatever the model's own code raises for tensors without values
        return None
    given_bytes = 2 * sum(_resident(_nbytes(value)) for value in given)  # a loop may hold the next ones
    return given_bytes + tally.peak_bytes, given_bytes + tally.small_bytes


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without values."""
    made = torch.empty_like(tensor, device=META)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Tally(TorchDispatchMode):
    """Counts what operations make for as long as somebody has it. Raises RuntimeError where that says too little."""

    def __init__(self, rule_of: Callable[[Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule_of = rule_of
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._mapped = self._scores = 0
        self.peak_bytes = self.small_bytes = 0  # small: all that ever were, as the heap may keep them

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What PyTorch wraps every call in for that imports Dynamo."""
        return False

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there already."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        made = func(*args, **kwargs)
        if func.namespace != "profiler":
            self._count(func, args, kwargs, made)
        return made

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        read = list(_tensors((args, kwargs)))
        if not all(tensor.is_meta for tensor in read):
            raise RuntimeError("A tensor of the program's own, which must not be written to.")
        fresh: dict[int, torch.Tensor] = {}
        for tensor in _tensors(made):
            if (key := tensor.untyped_storage()._cdata) not in self._sizes:
                fresh.setdefault(key, tensor)
        if func._schema.is_mutable:
            self._check_sizes(read)
        outputs = list(fresh.values())
        sizes, inside = self._sizes_of(func, args, kwargs, outputs, made)
        for tensor, size in zip(outputs, sizes, strict=True):
            self._watch(tensor.untyped_storage(), size)
        self._scores = max(self._scores, _fused_bytes(func, read))
        self.peak_bytes = max(self.peak_bytes, self._mapped + self.small_bytes + self._scores + inside)

    def _sizes_of(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor], made: Any) -> Any:
        """Bytes of each output, and of all that the kernel takes inside."""
        sizes = [tensor.untyped_storage().nbytes() for tensor in outputs]
        rule, inside = self._rule_of(func), 0
        if rule is not None:
            from brim.predict.lowering.kernel import Kernel

            kernel = Kernel(func, args, kwargs, outputs, made)
            rule(kernel)
            for what, handle, count in kernel.script:
                if what == "out":
                    sizes[handle] = max(sizes[handle], count)
                elif what == "keep":
                    self.small_bytes += _resident(count)
                elif what == "alloc":
                    inside += _resident(count)
        return sizes, inside

    def _check_sizes(self, read: Sequence[torch.Tensor]) -> None:
        for tensor in read:
            storage = tensor.untyped_storage()
            if storage.nbytes() != self._sizes.get(storage._cdata, storage.nbytes()):
                raise RuntimeError("A tensor was resized.")

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key, count = storage._cdata, _resident(size)
        mapped = count >= OWN_MAPPING_BYTES

        def died(_: object) -> None:
            del self._sizes[key], self._watched[key]
            if mapped:
                self._mapped -= count

        self._sizes[key], self._watched[key] = storage.nbytes(), weakref.ref(storage, died)
        if mapped:
            self._mapped += count
        else:
            self.small_bytes += count


class _NoAutocast(TorchFunctionMode):
    """Raises RuntimeError under autocast, which does not cast tensors without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("Autocast is not followed here.")
        return func(*args, **(kwargs or {}))


def _fused_bytes(func: Any, read: Sequence[torch.Tensor]) -> int:
    """Beside attention that writes every score: what the fused kernel takes inside, whose scores are parts of them.

    At most 256 rows of 512 keys, twice, and as many rows of results, in each thread (see ``cpu_attention``).
    """
    if func not in (_aten._safe_softmax.default, _aten._softmax.default) or read[0].dim() != 4:
        return 0
    rows, columns = min(256, read[0].shape[-2]), min(512, read[0].shape[-1])
    return int(torch.get_num_threads() * rows * (2 * columns + 2 + 512) * 8)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _held(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(_resident(_nbytes(tensor)) for tensor in tensors.values())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _resident(count: int) -> int:
    """As the C library's heap gives it (see ``heap_growth``)."""
    length = -(-(count + _HEADER_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return length if length < OWN_MAPPING_BYTES else -(-length // _PAGE_BYTES) * _PAGE_BYTES
