"""Tensor parallelism by names and shapes: which products of a model are split by outputs, and which by inputs.

Within a block (a decoder layer) what reads the residual stream is split by its outputs and what writes to it by its
inputs, so that each block sends twice (Shoeybi et al., arXiv 1909.08053); under sequence parallelism norms and
residual stream are split along the sequence (Korthikanti et al., arXiv 2205.05198). Every split is DTensor's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
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

from brim.errors import UnsupportedError, UsageError

# Products that read the residual stream, and those that write to it, as transformers' models name them.
_READS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc", "c_attn")
_WRITES = ("o_proj", "out_proj", "down_proj", "fc2", "c_proj")
_FUSED = {"c_attn": 3}  # queries, keys and values side by side
_TOKENS = Shard(1)  # hidden states split along the sequence
_NORMS = ("Norm", "LayerNorm", "RMSNorm")


def split_block(path: str, block: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split a decoder layer (``path`` in its model) over ``mesh`` in place.

    Raises UsageError for a product that does not divide, UnsupportedError for a block that has none of the known
    names.
    """
    check_fused([block], mesh.size(), path)
    _linearize(block, mesh.size())
    plan = _block_plan(path, block, mesh.size(), sequence_parallel)
    parallelize_module(block, mesh, plan, src_data_rank=None)
    _narrow_heads(block, mesh.size())


def split_outside(
    model: nn.Module, blocks: Sequence[str], tied: Sequence[tuple[str, str]], mesh: DeviceMesh, *,
    sequence_parallel: bool,
) -> None:  # fmt: skip
    """Split what of ``model`` is outside its ``blocks``; ``tied`` are ``tied_weights`` of before."""
    parallelize_module(model, mesh, dict(_outer_plan(model, blocks, sequence_parallel)), src_data_rank=None)
    for first, second in tied:
        model.get_submodule(second).weight = model.get_submodule(first).weight


def fused_products(block: nn.Module) -> list[str]:
    """Products of a decoder layer that several are made one of, such as queries, keys and values: those of no known
    name beside one that is split by its inputs. A rank's rows of such a product are not its part of each."""
    linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear) or _is_turned(module)]
    parts = {name.rpartition(".")[0] for name in linear if name.rpartition(".")[2] in _WRITES}
    return [
        name for name in linear
        if name.rpartition(".")[0] in parts and name.rpartition(".")[2] not in (*_READS, *_WRITES)
    ]  # fmt: skip


def check_fused(blocks: Iterable[nn.Module], ranks: int, model: str) -> None:
    """Raise UnsupportedError for decoder layers whose products are not split by tensors."""
    found = next((names for block in blocks if (names := fused_products(block))), None)
    if ranks > 1 and found:
        raise UnsupportedError(
            f"--tp {ranks} was asked for {model}.",
            f"Of its layers {', '.join(found)} is one product each of what a rank needs its own part of.",
            "Split it by --zero or --pp.",
        )


def has_turned(block: nn.Module) -> bool:
    """Whether weights lie the other way round, with queries, keys and values in one: they can be traced when split,
    and no checkpoint would find their parts again."""
    return any(_is_turned(module) for module in block.modules())


def _is_turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _block_plan(path: str, block: nn.Module, ranks: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    parents: dict[str, None] = {}
    for name, module in block.named_modules():
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and leaf in (*_READS, *_WRITES):
            _check(f"{path}.{name}", module.out_features if leaf in _READS else module.in_features, ranks)
            parents[parent] = None
            if leaf in _READS:
                plan[name] = ColwiseParallel()
            elif sequence_parallel:
                plan[name] = RowwiseParallel(output_layouts=_TOKENS, use_local_output=False)
            else:
                plan[name] = RowwiseParallel()
        elif sequence_parallel and _is_norm(module):
            plan[name] = SequenceParallel()
    if not any(name.rpartition(".")[2] in _WRITES for name in plan):
        raise UnsupportedError(
            f"{path} was to be split over {ranks} ranks.",
            f"It has no products of the names {', '.join((*_READS, *_WRITES))}.",
            "Split its model over pipeline stages or by ZeRO.",
        )
    if sequence_parallel:
        for parent in parents:
            block.get_submodule(parent).register_forward_pre_hook(_gather_tokens, with_kwargs=True)
    return plan


def _gather_tokens(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A part of a block is given all tokens, once for all its products."""
    if args:
        return (_gathered(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _gathered(kwargs["hidden_states"])}


def _gathered(hidden: Any) -> Any:
    if isinstance(hidden, DTensor) and hidden.placements == (_TOKENS,):
        return hidden.redistribute(placements=[Replicate()])
    return hidden


def _outer_plan(
    model: nn.Module, blocks: Sequence[str], sequence_parallel: bool
) -> Iterator[tuple[str, ParallelStyle]]:
    """Embeddings split by their rows, the output layer by its outputs; norms along the sequence."""
    inside = tuple(f"{path}." for path in blocks)
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding):
            output = _TOKENS if sequence_parallel else Replicate()
            yield (
                name,
                RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=output, use_local_output=not sequence_parallel
                ),
            )
        elif isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("lm_head", "embed_out", "output"):
            yield name, ColwiseParallel(
                input_layouts=_TOKENS if sequence_parallel else Replicate(), output_layouts=Shard(-1),
                use_local_output=False,
            )  # fmt: skip
        elif sequence_parallel and _is_norm(module):
            yield name, SequenceParallel()


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_NORMS) and any(True for _ in module.parameters(recurse=False))


def _check(name: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise UsageError(f"{name} was to be split over {ranks} ranks.", f"Its size of {size:,} does not divide.")


def _linearize(block: nn.Module, ranks: int) -> None:
    """transformers' ``Conv1D`` is a linear layer whose weight lies the other way round: DTensor splits linear layers.

    Of queries, keys and values in one product every rank gets its part of each.
    """
    for name, module in list(block.named_modules()):
        if not _is_turned(module):
            continue
        parent, _, leaf = name.rpartition(".")
        weight = module.weight.detach().t()
        linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta", dtype=weight.dtype)
        parts = _FUSED.get(leaf, 1)
        linear.weight = nn.Parameter(_interleaved(weight, parts, ranks).contiguous())
        linear.bias = nn.Parameter(_interleaved(module.bias.detach(), parts, ranks))
        setattr(block.get_submodule(parent), leaf, linear)


def _interleaved(tensor: torch.Tensor, parts: int, ranks: int) -> torch.Tensor:
    """Rows in an order in which every rank's share has its part of each of ``parts``."""
    if parts == 1:
        return tensor
    pieces = [piece.chunk(ranks) for piece in tensor.chunk(parts)]
    return torch.cat([pieces[part][rank] for rank in range(ranks) for part in range(parts)])


def _narrow_heads(block: nn.Module, ranks: int) -> None:
    """Modules that count their own heads have this rank's only."""
    for module in block.modules():
        own: dict[str, Any] = vars(module)
        if "split_size" in own:  # GPT-2's: queries, keys and values are cut apart by it
            own["split_size"] //= ranks
            own["num_heads"] //= ranks


def tied_weights(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of modules that have one weight."""
    first: dict[int, str] = {}
    found = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in first:
            found.append((first[id(weight)], name))
        first.setdefault(id(weight), name)
    return found
