"""Work of one operation: floating-point operations, bytes moved, and the dtype that sets its rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from brim.catalog.gpus import read_facts
from brim.core.hardware import filled

aten = torch.ops.aten

_OPERATORS = {kind: frozenset(names) for kind, names in read_facts("operators.json")["work"].items()}
_KINDS = read_facts("operators.json")["kernels"]
_MATRICES = ("mm", "addmm", "bmm", "baddbmm")

# Attention kernels for (batch, rows, heads, width), while PyTorch's own counts expect the heads first;
# with the position of the argument for the offsets of sequences of different lengths.
_ROWS_BEFORE_HEADS = {
    aten._efficient_attention_forward: 4, aten._efficient_attention_backward: 6, aten._flash_attention_forward: 3,
    aten._flash_attention_backward: 6,
}  # fmt: skip
OVER = "@"  # in the name of a functional collective, before that of its group


class Work(NamedTuple):
    """Floating-point operations and bytes of one operation, and what decides its kernels' rate (as in ``Op``)."""

    flops: int
    read_bytes: int
    written_bytes: int
    dtype: str
    kernel: str = ""
    fill: float = 1.0


def op_name(func: OpOverload, args: Sequence[Any]) -> str:
    """Return PyTorch's name; for a functional collective with its group, which is the last argument."""
    if func.namespace == "_c10d_functional" and args and isinstance(args[-1], str):
        return f"{func}{OVER}{args[-1]}"
    return str(func)


def op_work(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work:
    """All of an operation's work. It depends on ``func``, the layouts of arguments and results, and plain values."""
    read_bytes, written_bytes = op_bytes(func, args, kwargs, out)
    kernel, fill = _kernel(func, args)
    return Work(op_flops(func, args, kwargs, out), read_bytes, written_bytes, op_dtype(args, out), kernel, fill)


def _kernel(func: OpOverload, args: Sequence[Any]) -> tuple[str, float]:
    """Return the kind of kernel, and the share of its tiles that a product's matrices fill."""
    name = _base_name(func)
    if name in ("convolution", "convolution_backward"):
        gradients = name != "convolution"
        x, weight = args[gradients], args[gradients + 1]
        groups, layout = args[8 + gradients], "" if x.dim() == 4 and x.stride(1) == 1 else "planar "
        if groups > 1 and weight.size(1) == 1:
            return "depthwise", 1.0
        taps = math.prod(weight.shape[2:])
        kind = "grouped" if groups > 1 else "convolution" if taps > 1 else "product"
        return layout + kind, filled(weight.size(0) // groups, weight.size(1) * taps)
    if name in _MATRICES:
        left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        kind = "batched" if left.dim() == 3 else "product"
        return kind, filled(left.size(-2), left.size(-1), right.size(-1))
    if name == "native_batch_norm" and not args[5]:  # it only scales
        return "", 1.0
    return next((kind for part, kind in _KINDS.items() if part in name), ""), 1.0


def op_flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of one aten operation, forward or backward; works on fake and meta tensors.

    Products by PyTorch's own registry (``torch/utils/flop_counter.py``: two per multiply-add), with the products that
    it lacks; anything else that computes is one per element of its largest tensor; views, copies, gathers and fills
    are 0. Unlike the registry, fused attention does not count scores that a causal mask hides: its kernels skip them.
    """
    if attention := _attention().get(func.overloadpacket):
        return attention(*args, causal=_is_causal(func, args, kwargs))
    if func.overloadpacket is aten.convolution_backward:  # the registry's ignores groups
        points = args[bool(args[7])]  # of the result; of the input where that is the smaller
        return int(2 * points.numel() // points.size(1) * args[2].numel() * sum(args[10][:2]))
    if count := flop_registry.get(func.overloadpacket):
        lengths = _ROWS_BEFORE_HEADS.get(func.overloadpacket)
        if lengths is not None and args[lengths] is None:
            args = [arg.transpose(1, 2) if isinstance(arg, torch.Tensor) and arg.dim() == 4 else arg for arg in args]
        if func._overloadname == "dtype":  # a product's ``out_dtype``, which PyTorch's counts do not take
            args = args[:-1]
        return int(count(*args, **kwargs, out_val=out))
    if product := _products().get(func.overloadpacket):
        return product(*args, **kwargs)
    if is_view(func) or _base_name(func) in _OPERATORS["moves"]:
        return 0
    return _elements(args, kwargs, out)


def op_bytes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> tuple[int, int]:
    """Bytes that one operation reads and writes: each tensor once, as a kernel that caches well does.

    Views and allocations move none; a fill or a copy does not read what it overwrites; a gather reads the rows that
    it writes and its indices.
    """
    name = _base_name(func)
    if is_view(func) or name in _OPERATORS["allocations"]:
        return 0, 0
    changed = [t for i in _changed_arguments(func) if i < len(args) for t in leaves(args[i])]
    target = {id(t) for t in changed}
    written = sum(map(_nbytes, changed)) + sum(_nbytes(t) for t in leaves(out) if id(t) not in target)
    inputs = list(leaves([*args, *kwargs.values()]))
    if name in _OPERATORS["gathers"]:
        return written + sum(_nbytes(t) for t in inputs if not t.is_floating_point()), written
    overwritten = target if name in _OPERATORS["moves"] else set()
    return sum(_nbytes(t) for t in inputs if id(t) not in overwritten), written


def op_dtype(args: Sequence[Any], out: Any) -> str:
    """The dtype that an operation computes in: of its first input that is not an index, else of its result."""
    for tensor in (*leaves(list(args)), *leaves(out)):
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in (torch.int8, torch.uint8):
            return str(tensor.dtype).removeprefix("torch.")
    first = next(leaves(out), None)
    return "" if first is None else str(first.dtype).removeprefix("torch.")


@functools.cache
def is_view(func: OpOverload) -> bool:
    """The result shares an input's storage and nothing is written: no kernel runs."""
    return bool(func.is_view) or func.overloadpacket is aten._unsafe_view


@functools.cache
def _changed_arguments(func: OpOverload) -> tuple[int, ...]:
    """Return the positions of the written arguments: ``self`` of ``add_``, the lists of ``_fused_adamw_``."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


@functools.cache
def _base_name(func: OpOverload) -> str:
    """``aten::index_put_`` -> ``index_put``."""
    return str(func.overloadpacket._qualified_op_name).partition("::")[2].rstrip("_")


@functools.cache
def _products() -> dict[Any, Callable[..., int]]:
    """Matrix products and attention kernels that PyTorch's registry does not have."""
    mm = flop_registry[aten.mm]
    return {
        aten.dot: lambda a, b: 2 * a.numel(),
        aten.mv: lambda a, b: 2 * a.numel(),
        aten.addmv: lambda c, a, b, **_: 2 * a.numel(),
        aten.addbmm: lambda c, a, b, **_: int(flop_registry[aten.bmm](a, b)),
        aten._addmm_activation: lambda c, a, b, **_: int(mm(a, b)),
        aten._int_mm: lambda a, b: int(mm(a, b)),
        aten._grouped_mm: lambda a, b, *_, **__: _grouped(a, b),
        aten._scaled_grouped_mm: lambda a, b, *_, **__: _grouped(a, b),
        aten._weight_int8pack_mm: lambda a, b, *_: 2 * a.numel() * b.shape[0],
        aten.linear: lambda a, b, *_: 2 * a.numel() * b.shape[0],
        aten._cudnn_rnn: lambda source, weights, *_, **__: _recurrent(source, weights),
        aten._cudnn_rnn_backward: lambda source, weights, *_, **__: 2 * _recurrent(source, weights),
        aten.mkldnn_rnn_layer: lambda source, *weights, **__: _recurrent(source, weights[:2]),
        aten.mkldnn_rnn_layer_backward: lambda source, *weights, **__: 2 * _recurrent(source, weights[:2]),
    }


@functools.cache
def _attention() -> dict[Any, Callable[..., int]]:
    """Fused attention: two products forward, five backward (the scores again; gradients of q, k, v and the scores).

    PyTorch's registry has the same counts of whole matrices of scores, but before 2.13 it refuses fewer key than
    query heads.
    """

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, causal: bool) -> int:
        return _score_count(q, k, causal) * (q.shape[-1] + v.shape[-1])

    def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, causal: bool) -> int:
        return _score_count(q, k, causal) * (3 * q.shape[-1] + 2 * v.shape[-1])

    kinds = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    names = [f"_scaled_dot_product_{kind}" for kind in (*kinds, "fused_attention_overrideable")]
    counts = dict.fromkeys(names, forward) | {f"{name}_backward": backward for name in names}
    return {getattr(aten, name): count for name, count in counts.items() if hasattr(aten, name)}


def _is_causal(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("is_causal")
    return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))


def _score_count(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """Twice the number of computed scores of q (batch, heads, queries, width) and k (batch, ..., keys, width): all,
    or each query's of the keys up to its own."""
    queries, keys = q.shape[-2], k.shape[-2]
    whole = min(queries, keys)
    scores = whole * (whole + 1) // 2 + max(queries - keys, 0) * keys if causal else queries * keys
    return 2 * math.prod(q.shape[:-2]) * scores


def _recurrent(source: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Every step of ``source`` (steps, batch, inputs) meets every matrix of the layers once."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * (source.numel() // source.shape[-1]) * matrices


def _grouped(a: torch.Tensor, b: torch.Tensor) -> int:
    """``a`` (tokens, k) @ ``b`` (groups, k, n): each token meets one group. Both 2-D: a gradient of the weights,
    (k, tokens) @ (tokens, n). Both 3-D: a batched product."""
    if a.dim() == b.dim() == 3:
        return int(flop_registry[aten.bmm](a, b))
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _elements(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Elements of the largest tensor; of the largest list for operations on lists of tensors (``_foreach_add``)."""
    values = [*args, *kwargs.values(), out]
    values += [item for value in values if isinstance(value, tuple) for item in value]
    return max((_count(value) for value in values), default=0)


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, list):
        return sum(t.numel() for t in leaves(value))
    return 0


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes in memory: an expanded dimension counts once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sizes if stride or size == 0)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
