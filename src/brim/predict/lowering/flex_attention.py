"""FlexAttention as its compiled kernel takes memory: results, and one sum per query row for the backward pass. What a
score function or a block mask computes inside of the kernel takes none.

Run as it is written, without a compiler, FlexAttention makes the whole matrix of scores, and makes it once more in
the backward pass: then PyTorch's own functions run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex, mod_index
from torch._higher_order_ops.flex_attention import flex_attention as OPERATION
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

_pytorch: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # the package names the operator as the module
UNFUSED: dict[Any, Callable[..., Any]] = {
    OPERATION: _pytorch.sdpa_dense,
    _pytorch.flex_attention_backward: _pytorch.sdpa_dense_backward,
}
NOTE = "flex_attention: as its compiled kernel"
__all__ = ["NOTE", "OPERATION", "UNFUSED", "attention", "unfused_attention"]


def unfused_attention(
    unseen: Callable[[], AbstractContextManager[None]], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    score_mod: Callable[..., Any], block_mask: Any, scale: float, kernel_options: Any, *nothing: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute :func:`attention` by products, a softmax and every step of the score function. ``unseen``: within
    it nothing is recorded, as of graphs that are made of functions."""
    score_mod, captured = _lifted(unseen, query, score_mod)
    graphs = _pytorch.create_fw_bw_graph

    def quietly(*args: Any) -> Any:
        with unseen():
            return graphs(*args)

    with mock.patch.object(_pytorch, "create_fw_bw_graph", quietly):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = OPERATION(
            query, key, value, score_mod, block_mask, scale, kernel_options, captured
        )
    return made


def _index(source: torch.Tensor, indices: list[torch.Tensor]) -> Any:
    """Index a tensor in a score function: the gradient is of all positions together."""
    return mod_index(source, indices)


def _lifted(
    unseen: Callable[[], AbstractContextManager[None]], query: torch.Tensor, score_mod: Callable[..., Any]
) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """The score function with the tensors that it captures as arguments: they have gradients."""
    with torch.no_grad(), unseen(), TransformGetItemToIndex():
        indices = [torch.empty((), dtype=torch.int) for _ in range(4)]
        graph = make_fx(score_mod)(torch.empty((), dtype=query.dtype), *indices)
    captured: dict[str, torch.Tensor] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.index.Tensor:
            node.target = _index
        if node.op != "get_attr" or not isinstance(tensor := getattr(graph, node.target), FakeTensor):
            continue
        captured[node.name] = tensor
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"captured_{node.name}")
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    return GraphModule(graph, graph.graph), tuple(captured.values())


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, heads, tokens, head size) attended; logarithms of sums; the maxima that nobody asked for."""
    return _Flex.apply(query, key, value)  # type: ignore[no-any-return,no-untyped-call]


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        rows = query.shape[:-1]
        output = query.new_empty((*rows, value.size(-1)))
        sums = query.new_empty(rows, dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums)
        nothing = query.new_empty((0,), dtype=torch.float32)
        context.mark_non_differentiable(nothing)
        context.set_materialize_grads(False)
        return output, sums, nothing

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, *others: Any) -> Any:
        query, key, value, output, _ = context.saved_tensors
        # The sum of output times gradient in each row.
        row_sums = output.new_empty(output.shape[:-1], dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del row_sums
        return gradients
