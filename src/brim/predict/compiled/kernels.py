"""Group a graph into Inductor's kernels: which values they write to memory, and when these are freed.

Chains of pointwise operations and reductions are one kernel each, and values inside a chain are in no memory. In
memory are the inputs and results of products, attention and collectives, the graph's results, and sums. A kernel
writes a value over an input of the same size that nothing else reads later, be it in the same kernel
(torch/_inductor/scheduler.py, ``decide_inplace_update``), and joins others that read the same (``can_fuse``).
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from brim.predict.flops import is_view

_NOTHING = ("_assert_tensor_metadata",)  # checked while the graph is captured
_REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "var_mean", "max", "min", "argmax", "any", "all", "prod")


@dataclass(frozen=True)
class Kernel:
    """``nodes`` are written, ``reads`` read, and ``frees`` read for the last time. ``over``: the input over which a
    node is written. Without ``nodes``, ``call`` is run as it stands in the graph."""

    nodes: tuple[fx.Node, ...] = ()
    call: fx.Node | None = None
    reads: tuple[fx.Node, ...] = ()
    frees: tuple[fx.Node, ...] = ()
    over: dict[fx.Node, fx.Node] = field(default_factory=dict)


class Program:
    """The kernels of ``graph`` in order. ``given``: indices of inputs that have other owners and may not be written
    over; the rest are the program's own."""

    def __init__(self, graph: fx.Graph, given: Iterable[int] | None = None) -> None:
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        output = next(node for node in graph.nodes if node.op == "output")
        self.outputs: Sequence[Any] = output.args[0]
        kept = range(len(self.inputs)) if given is None else given
        self._results = {_base(node) for node in self.outputs if isinstance(node, fx.Node)}
        self._lasting = {self.inputs[at] for at in kept} | self._results
        self._written = _written(graph)
        self._known_reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_nothing(node)]
        self.kernels = self._with_ends(self._in_order())

    def play(self, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the kernels on fake tensors; ``inputs`` is emptied, so that each is freed after its last use."""
        env: dict[fx.Node, Any] = dict(zip(self.inputs, inputs, strict=True))
        inputs.clear()
        for node in [node for node in self.inputs if node not in self._read | self._results]:
            del env[node]
        for kernel in self.kernels:
            _run(kernel, env)
        return [_seen(node, env) if isinstance(node, fx.Node) else None for node in self.outputs]

    # -- which kernels -------------------------------------------------------------------------------------------

    def _is_real(self, node: fx.Node) -> bool:
        """Return True if the node lies in memory; a view lies there if its base does."""
        if node.op == "placeholder":
            return True
        if _is_view(node):
            return self._is_real(node.all_input_nodes[0])
        return node in self._written or not _is_fusible(node)

    def _reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes in memory from which the node's kernel computes it."""
        if node not in self._known_reads:
            read_nodes: dict[fx.Node, None] = {}
            seen: set[fx.Node] = set()
            todo = list(node.all_input_nodes)
            while todo:
                candidate = todo.pop()
                if candidate not in seen and self._is_real(candidate):
                    read_nodes[_base(candidate)] = None
                elif candidate not in seen:
                    todo.extend(candidate.all_input_nodes)
                seen.add(candidate)
            self._known_reads[node] = tuple(read_nodes)
        return self._known_reads[node]

    def _in_order(self) -> list[Kernel]:
        """Kernels in the order of their first nodes, each after those that it reads from (``topological_sort``)."""
        units = self._units()
        number = {node: index for index, unit in enumerate(units) for node in unit}
        waits = [self._before(unit, number) for unit in units]
        behind: dict[int, list[int]] = {}
        for index, others in enumerate(waits):
            for other in others:
                behind.setdefault(other, []).append(index)
        ready = [index for index, others in enumerate(waits) if not others]
        heapq.heapify(ready)
        kernels = []
        while ready:
            index = heapq.heappop(ready)
            kernels.append(self._kernel(units[index]))
            for later in behind.get(index, ()):
                waits[later].discard(index)
                if not waits[later]:
                    heapq.heappush(ready, later)
        assert len(kernels) == len(units), "kernels wait for one another"
        return kernels

    def _kernel(self, unit: Sequence[fx.Node]) -> Kernel:
        if not _is_fusible(unit[0]):
            return Kernel(call=unit[0], reads=self._all_reads(unit[0]))
        reads = dict.fromkeys(read for node in unit for read in self._reads(node) if read not in unit)
        return Kernel(nodes=tuple(unit), reads=tuple(reads))

    def _all_reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        if _is_fusible(node):
            return self._reads(node)
        return tuple(dict.fromkeys(map(_base, node.all_input_nodes)))

    def _units(self) -> list[list[fx.Node]]:
        """Group written nodes into kernels, in the order of first nodes. Nodes with the same elements and inputs are
        joined, unless a kernel in between depends on one and feeds the other (``will_fusion_create_cycle``)."""
        units: list[list[fx.Node]] = []
        for node in self._nodes:
            if _is_view(node) or not self._is_real(node):
                continue
            fits = [unit for unit in units if self._shared_bytes(unit, node)] if _is_fusible(node) else []
            for unit in sorted(fits, key=lambda unit: -self._shared_bytes(unit, node)):
                if not self._closes_circle(units, unit, node):
                    unit.append(node)
                    break
            else:
                units.append([node])
        return units

    def _shared_bytes(self, unit: Sequence[fx.Node], node: fx.Node) -> int:
        if not _is_fusible(unit[0]) or _elements(unit[0]) != _elements(node):
            return 0
        there = {read for member in unit for read in self._reads(member)} | set(unit)
        return sum(read.meta["val"].nbytes for read in self._reads(node) if read in there)

    def _closes_circle(self, units: Sequence[list[fx.Node]], unit: list[fx.Node], node: fx.Node) -> bool:
        """Return whether the node reads a value that another kernel computes from the unit's results."""
        number = {member: index for index, other in enumerate(units) for member in other}
        own = number[unit[0]]
        todo = [number[read] for read in self._reads(node) if read in number and number[read] != own]
        seen = set(todo)
        while todo:
            before = self._before(units[todo.pop()], number)
            if own in before:
                return True
            todo += before - seen
            seen |= before
        return False

    def _before(self, unit: Sequence[fx.Node], number: Mapping[fx.Node, int]) -> set[int]:
        """The kernels that the unit reads from."""
        return {number[read] for node in unit for read in self._all_reads(node) if read in number} - {number[unit[0]]}

    def _with_ends(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Add to each kernel the nodes that it reads for the last time."""
        last: dict[fx.Node, int] = {}
        for at, kernel in enumerate(kernels):
            for node in (*kernel.reads, *kernel.nodes, *((kernel.call,) if kernel.call is not None else ())):
                last[node] = at
        self._read = set(last)
        ends: dict[int, list[fx.Node]] = {}
        for node, at in last.items():
            if node not in self._results:
                ends.setdefault(at, []).append(node)
        return [self._ended(kernel, ends.get(at, ())) for at, kernel in enumerate(kernels)]

    def _ended(self, kernel: Kernel, ends: Iterable[fx.Node]) -> Kernel:
        over: dict[fx.Node, fx.Node] = {}
        for node in ends:
            readers = [reader for reader in kernel.nodes if node in self._reads(reader)]
            if len(readers) != 1 or node in self._lasting or _is_shared(node):
                continue
            reader = readers[0]
            if reader not in over and _same_size(node, reader):
                over[reader] = node
        return Kernel(nodes=kernel.nodes, call=kernel.call, reads=kernel.reads, frees=tuple(ends), over=over)


def _run(kernel: Kernel, env: dict[fx.Node, Any]) -> None:
    if kernel.call is not None:
        arguments = fx.node.map_arg((kernel.call.args, kernel.call.kwargs), lambda node: _seen(node, env))
        env[kernel.call] = kernel.call.target(*arguments[0], **arguments[1])  # type: ignore[operator]
    else:
        fresh = [node for node in kernel.nodes if node not in kernel.over]
        places = list(kernel.over.values())
        reads = [env[node] for node in kernel.reads if node not in places]
        results = _fused(reads, [node.meta["val"] for node in fresh], [env[node] for node in places])
        env.update(zip(fresh, results, strict=True))
        for node, place in kernel.over.items():
            value = node.meta["val"]
            env[node] = env[place].as_strided(value.shape, value.stride())
    for node in kernel.frees:
        env.pop(node, None)


def _seen(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    """A node's value; for a view, a view of its base's value."""
    if node in env:
        return env[node]
    base = _base(node)
    value, there, tensor = node.meta["val"], base.meta["val"], env[base]
    offset = tensor.storage_offset() + value.storage_offset() - there.storage_offset()
    return tensor.as_strided(value.shape, value.stride(), offset)


# -- kinds of nodes --------------------------------------------------------------------------------------------------


@cache
def _op_lists() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _is_nothing(node: fx.Node) -> bool:
    return getattr(_packet(node), "__name__", "") in _NOTHING


def _is_view(node: fx.Node) -> bool:
    """Return True if the node is a view: other sizes and strides of a storage."""
    if not isinstance(node.target, OpOverload) or not is_view(node.target):
        return False
    value, input_value = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == input_value.dtype
        and value.is_conj() == input_value.is_conj()
    )


def _is_fusible(node: fx.Node) -> bool:
    """Return True if Inductor writes the kernel itself, which it does not for complex numbers."""
    if node.op != "call_function" or node.target is operator.getitem or _is_view(node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return False
    reads = (input_node.meta.get("val") for input_node in node.all_input_nodes)
    if any(isinstance(read, torch.Tensor) and read.is_complex() for read in reads):
        return False
    return _packet(node) in _op_lists().fusible_ops


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values kernels write to memory."""
    written = set()
    for node in graph.nodes:
        if _is_fusible(node) and (_is_sum(node) or any(_is_read_elsewhere(user, node) for user in node.users)):
            written.add(node)
    return written


def _is_sum(node: fx.Node) -> bool:
    return getattr(_packet(node), "__name__", "") in _REDUCTIONS and bool(node.all_input_nodes) and (
        node.meta["val"].numel() < max(input_node.meta["val"].numel() for input_node in node.all_input_nodes)
    )  # fmt: skip


def _is_read_elsewhere(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a product, a collective or the caller reads it, directly or as a view."""
    if user.op == "output" or not (_is_fusible(user) or _is_view(user) or _is_nothing(user)):
        return True
    return _is_view(user) and any(_is_read_elsewhere(other, user) for other in user.users)


def _elements(node: fx.Node) -> tuple[int, int]:
    """The number of elements of a kernel's loop; and its number of sums, unless there is one for each row."""
    if not _is_sum(node):
        return node.meta["val"].numel(), 0
    most = max((input_node.meta["val"] for input_node in node.all_input_nodes), key=torch.Tensor.numel)
    last = _last_dimensions(node, most.dim())
    if last and math.prod(most.shape[:-last]) == node.meta["val"].numel():
        return most.numel(), 0
    return most.numel(), node.meta["val"].numel()


def _last_dimensions(node: fx.Node, dimensions: int) -> int:
    """The number of elements summed over, if these are the last dimensions; else 0."""
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(dims, (list, tuple)):
        return 0
    summed = sorted(int(dim) % dimensions for dim in dims)
    return len(summed) if summed == list(range(dimensions - len(summed), dimensions)) else 0


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_shared(node: fx.Node) -> bool:
    """Return whether another node shares its memory: a view as another dtype."""
    users = list(node.users)
    for user in users:
        users += user.users if _is_view(user) else ()
    return _is_alias(node) or any(map(_is_alias, users))


def _is_alias(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_view(node.target) and not _is_view(node)


def _same_size(node: fx.Node, other: fx.Node) -> bool:
    there, here = node.meta.get("val"), other.meta["val"]
    return isinstance(there, torch.Tensor) and there.dtype == here.dtype and there.numel() == here.numel()


# -- the operation that stands for a kernel in a trace: it reads its inputs and allocates its results ----------------

# Defined by hand: ``custom_op`` adds autograd and checks to every call, of which a trace makes thousands.
_LIBRARY = torch.library.Library("brim", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] inputs, str layouts) -> Tensor[]")
_LIBRARY.define("fused_(Tensor[] inputs, Tensor(a!)[] over, str layouts) -> Tensor[]")


def _on_fake_tensors(*arguments: Any) -> list[torch.Tensor]:
    layouts = arguments[-1]
    return [_empty(layout) for layout in layouts.split("|")] if layouts else []


torch.library.register_fake("brim::fused", _on_fake_tensors, lib=_LIBRARY)
torch.library.register_fake("brim::fused_", _on_fake_tensors, lib=_LIBRARY)


def _fused(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], over: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Run one kernel that reads ``inputs``; return tensors laid out like ``results``.

    Its other results are written ``over`` inputs: without new tensors it still runs, and is recorded.
    """
    layouts = "|".join(map(_layout, results))
    outputs: list[torch.Tensor] = (
        torch.ops.brim.fused_(list(inputs), list(over), layouts)
        if over
        else torch.ops.brim.fused(list(inputs), layouts)
    )
    return outputs


def _layout(tensor: torch.Tensor) -> str:
    """``bfloat16:2,8:8,1``: plain data, so that fake kernels' results can be cached."""
    numbers = (",".join(map(str, values)) for values in (tensor.shape, tensor.stride()))
    return ":".join((str(tensor.dtype).removeprefix("torch."), *numbers))


def _empty(layout: str) -> torch.Tensor:
    dtype, size, stride = layout.split(":")
    return torch.empty_strided(_numbers(size), _numbers(stride), dtype=getattr(torch, dtype))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
