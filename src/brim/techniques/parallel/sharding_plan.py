"""Tensor parallelism by names and shapes: the products of a model that are split by outputs or by inputs.

Within a block (a decoder layer) products that read the residual stream are split by outputs, those that write to it
by inputs, so that each block sends twice (Shoeybi et al., arXiv 1909.08053); under sequence parallelism norms and the
residual stream are split along the sequence (Korthikanti et al., arXiv 2205.05198). All splits are DTensor's.

Under expert parallelism each data-parallel rank computes some of a layer's experts for all ranks' tokens (Lepikhin et
al., arXiv 2006.16668). Hidden states are all-gathered, and the experts' outputs reduce-scattered, as in Megatron-LM's
``allgather`` token dispatcher (megatron/core/transformer/moe/token_dispatcher.py). So no token is dropped and no size
depends on the choices of other ranks' routers. In between, transformers' own forward computes a rank's experts on
their rows only. An expert's gradient is the sum over all ranks' tokens, where FSDP2 gives other weights the mean over
ranks: ``settle`` divides it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map

from brim.errors import UnsupportedError, UsageError
from brim.techniques.blocks import is_transposed
from brim.techniques.experts.technique import find_experts
from brim.techniques.parallel.collectives import gathered, scattered
from brim.techniques.parallel.tensor_parts import FUSED, READS, WRITES, TensorParts, check_parts, is_norm, parts_of

_HEADS = ("lm_head", "embed_out", "output", "output_projection", "proj_out")
_OF_HEADS = ("q_proj", "c_attn")
# The attributes of an attention that count heads; and GPT-2's size of the queries, at which it splits its product.
_COUNTS = {
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_heads",
    "n_head",
    "split_size",
}
_TOKENS = Shard(1)  # hidden states split along the sequence


def split_block(path: str, block: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split a decoder layer (``path`` in its model) over ``mesh`` in place.

    Raises UsageError for a product that does not divide, UnsupportedError for a block without known names.
    """
    check_parts([block], mesh.size(), path)
    parts = parts_of(block)
    _linearize(block, mesh.size())
    plan = _block_plan(path, block, parts, mesh, sequence_parallel)
    parallelize_module(block, mesh, plan, src_data_rank=None)
    for name in filter(parts.in_unsplit, parts.writes):  # a view, which experts' outputs are added to in place
        block.get_submodule(name).register_forward_hook(lambda module, args, output: output.clone())
    _narrow_heads(block, parts, mesh.size())


def split_outside(
    model: nn.Module, blocks: Sequence[str], tied: Sequence[tuple[str, str]], mesh: DeviceMesh, *,
    sequence_parallel: bool,
) -> None:  # fmt: skip
    """Split the parts of ``model`` outside of its ``blocks``; ``tied`` are the ``tied_weights`` from before."""
    heads = {*_HEADS, *(second.rpartition(".")[2] for _, second in tied)}
    plan = dict(_outer_plan(model, blocks, heads, mesh, sequence_parallel))
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for first, second in tied:
        model.get_submodule(second).weight = model.get_submodule(first).weight


def _block_plan(
    path: str, block: nn.Module, parts: TensorParts, mesh: DeviceMesh, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    ranks = mesh.size()
    if not parts.writes:
        raise UnsupportedError(
            f"Cannot split {path} over {ranks} ranks.",
            f"It has no linear layers of the names {', '.join((*READS, *WRITES))}.",
            "Split the model over pipeline stages or by ZeRO.",
        )
    plan: dict[str, ParallelStyle] = {}
    for name in parts.reads:
        _check(f"{path}.{name}", cast(nn.Linear, block.get_submodule(name)).out_features, ranks)
        # The input of a part is gathered for all its products.
        layouts = _TOKENS if sequence_parallel and "." not in name else Replicate()
        plan[name] = ColwiseParallel(input_layouts=layouts)
    for name in parts.writes:
        _check(f"{path}.{name}", cast(nn.Linear, block.get_submodule(name)).in_features, ranks)
        apart = sequence_parallel and not parts.in_unsplit(name)
        plan[name] = RowwiseParallel(output_layouts=_TOKENS, use_local_output=False) if apart else RowwiseParallel()
    for name in parts.head_norms:  # along any dimension: each rank has other heads, and the gradients are added
        plan[name] = SequenceParallel(sequence_dim=0, use_local_output=True)
    if sequence_parallel:
        _take_tokens_apart(block, parts, plan, mesh)
    return plan


def _take_tokens_apart(
    block: nn.Module, parts: TensorParts, plan: dict[str, ParallelStyle], mesh: DeviceMesh
) -> None:
    """Give norms a rank's tokens, and parts of a layer all tokens, whose results are split again."""
    for name, module in block.named_modules():
        if is_norm(module) and name not in plan and not parts.in_unsplit(name):
            plan[name] = SequenceParallel()
    for parent in parts.parents:
        if parent and not parts.in_unsplit(parent):
            block.get_submodule(parent).register_forward_pre_hook(_gather_tokens, with_kwargs=True)
    for name in parts.unsplit:
        module = block.get_submodule(name)
        module.register_forward_pre_hook(_localize_tokens, with_kwargs=True)
        module.register_forward_hook(_divider(mesh))


def _gather_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather all tokens for a part of a block, once for all its products."""
    if args:
        return (_gathered(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _gathered(kwargs["hidden_states"])}


def _localize_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Give an unsplit part all tokens as plain tensors, so that it computes the same on every rank."""
    return tree_map(_localized, (args, kwargs))


def _localized(hidden: Any) -> Any:
    gathered = _gathered(hidden)
    return gathered if gathered is hidden else gathered.to_local(grad_placements=[Replicate()])


def _divider(mesh: DeviceMesh) -> Callable[[nn.Module, Any, Any], Any]:
    def divide(module: nn.Module, args: Any, output: Any) -> Any:
        """Split the hidden states, the first of the outputs, which every rank has, along the sequence."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        own = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).redistribute(placements=[_TOKENS])
        return (own, *others) if isinstance(output, tuple) else own

    return divide


def _gathered(hidden: Any) -> Any:
    if isinstance(hidden, DTensor) and hidden.placements == (_TOKENS,):
        return hidden.redistribute(placements=[Replicate()])
    return hidden


def _outer_plan(
    model: nn.Module, blocks: Sequence[str], heads: Collection[str], mesh: DeviceMesh, sequence_parallel: bool
) -> Iterator[tuple[str, ParallelStyle]]:
    """The plan outside of blocks: embeddings are split by rows, the output layer by outputs, norms by tokens."""
    inside = tuple(f"{path}." for path in blocks)
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding):
            if len(inspect.signature(type(module).forward).parameters) != 2:  # of positions, which the model computes
                if sequence_parallel:
                    module.register_forward_hook(_divider(mesh))
                continue
            output = _TOKENS if sequence_parallel else Replicate()
            yield (
                name,
                RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=output, use_local_output=not sequence_parallel
                ),
            )
        elif isinstance(module, nn.Linear) and name.rpartition(".")[2] in heads:
            yield name, ColwiseParallel(
                input_layouts=_TOKENS if sequence_parallel else Replicate(), output_layouts=Shard(-1),
                use_local_output=False,
            )  # fmt: skip
        elif sequence_parallel and is_norm(module):
            yield name, SequenceParallel()


def _check(name: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise UsageError(
            f"Cannot split {name} over {ranks} ranks.", f"Its size of {size:,} is not a multiple of the ranks."
        )


def _linearize(block: nn.Module, ranks: int) -> None:
    """Replace transformers' ``Conv1D``, a linear layer with a transposed weight, by linear layers, which DTensor
    splits.

    Of queries, keys and values in one product every rank gets its part of each.
    """
    for name, module in list(block.named_modules()):
        if not is_transposed(module):
            continue
        parent, _, leaf = name.rpartition(".")
        weight = module.weight.detach().t()
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=weight.dtype)
        parts = FUSED.get(leaf, 1)
        linear.weight = nn.Parameter(_interleaved(weight, parts, ranks).contiguous())
        linear.bias = nn.Parameter(_interleaved(module.bias.detach(), parts, ranks))
        setattr(block.get_submodule(parent), leaf, linear)


def _interleaved(tensor: torch.Tensor, parts: int, ranks: int) -> torch.Tensor:
    """The rows, ordered so that every rank's share has its part of each of ``parts``."""
    if parts == 1:
        return tensor
    pieces = [piece.chunk(ranks) for piece in tensor.chunk(parts)]
    return torch.cat([pieces[part][rank] for rank in range(ranks) for part in range(parts)])


def _narrow_heads(block: nn.Module, parts: TensorParts, ranks: int) -> None:
    """Divide the counts of heads in modules by the number of ranks."""
    for parent in {name.rpartition(".")[0] for name in parts.reads if name.endswith(_OF_HEADS)}:
        own: dict[str, Any] = vars(block.get_submodule(parent))
        for name in _COUNTS & own.keys():
            own[name] //= ranks


def tied_weights(model: nn.Module) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    pairs = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in first:
            pairs.append((first[id(weight)], name))
        first.setdefault(id(weight), name)
    return pairs


def spread_experts(block: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> SpreadExperts:
    """Reduce each layer of experts in ``block``, in place, to those of this rank on ``mesh`` (one axis).

    ``dtype`` is that of computation, None for that of the weights. Raises UsageError if experts do not divide,
    UnsupportedError for experts in a list of modules.
    """
    experts = []
    for layer in find_experts(block):
        if layer.modules:
            raise UnsupportedError(
                f"Cannot spread the experts {layer.path} over {mesh.size()} ranks.",
                "They are a list of modules, not tensors of all experts.", "Leave out --ep.",
            )  # fmt: skip
        if layer.count % mesh.size():
            raise UsageError(
                f"Cannot spread the {layer.count} experts of {layer.path} over {mesh.size()} ranks.",
                "The number of experts is not a multiple of the ranks.",
            )
        experts.append(_Experts(block.get_submodule(layer.path), mesh, dtype))
    return SpreadExperts(experts, mesh.size())


@dataclass(eq=False)
class SpreadExperts:
    """The handle: the experts of a block on this rank."""

    _experts: list[_Experts]
    _ranks: int

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of experts, which no other rank has."""
        for experts in self._experts:
            yield from experts.module.parameters(recurse=False)

    def settle(self) -> None:
        """Turn the complete gradients of a step from sums over ranks into means. Experts without tokens get gradients
        of zero, as if all experts were in a single tensor."""
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().div_(self._ranks)
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class _Experts:
    """Replaces the forward of an experts module's instance."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.module, self._dtype = module, dtype
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        own: Any = module
        self._count = own.num_experts // self._ranks
        self._first = mesh.get_local_rank() * self._count
        own.num_experts = self._count
        for name, parameter in module.named_parameters(recurse=False):
            share = parameter.detach()[self._first : self._first + self._count].clone()
            placed = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)
            module._parameters[name] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        self._forward = module.forward
        vars(module)["forward"] = self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The output for hidden states (tokens, hidden), with each token's experts and their weights (tokens, k)."""
        hidden = gathered(hidden_states, self._group)
        index = _choices(top_k_index, self._group)
        weights = gathered(top_k_weights, self._group)
        with torch.no_grad():
            mine = (index >= self._first) & (index < self._first + self._count)
            token, slot = mine.nonzero(as_tuple=True)
            own = (index[token, slot] - self._first)[:, None]
        rows, shares = hidden[token], weights[token, slot][:, None]
        # Without rows nothing is computed, but backward must send as on all other ranks.
        computed = self._computed(rows, own, shares) if len(token) else rows * shares
        return scattered(torch.zeros_like(hidden).index_add(0, token, computed), self._group)

    def _computed(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Call transformers' forward with this rank's shares as plain tensors."""
        parameters = self.module._parameters
        sharded = dict(parameters)
        try:
            for name, parameter in sharded.items():
                if isinstance(parameter, DTensor):
                    share: Any = parameter.to_local()
                    parameters[name] = share if self._dtype is None else share.to(self._dtype)
            output: torch.Tensor = self._forward(*inputs)
            return output
        finally:
            parameters.update(sharded)


def _choices(index: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' choices of experts. In a fake process group all ranks choose the same."""
    if dist.get_backend(group) == "fake":
        return index.repeat(group.size(), 1)
    return gathered(index, group)
