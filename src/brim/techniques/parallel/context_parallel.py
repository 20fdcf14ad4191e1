"""Context parallelism: each rank has two chunks of every sequence, and attends to all ranks' keys and values.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): keys and values are gathered over the ranks, and
chunks are distributed so that all ranks have equal work: rank ``r`` of ``n`` has chunks ``r`` and ``2n - 1 - r`` of
``2n``. All other operations of a layer work on each token separately. PyTorch's ring attention
(torch/distributed/tensor/experimental/_context_parallel/_attention.py, ``custom_ops``) replaces CUDA's kernels only;
this works on every device.

A chunk's queries look at their own chunk by a causal kernel and at all earlier ones by kernels without a mask; the
pieces are joined by the log-sum-exp of their scores. For the backward pass a rank keeps only its own keys and values,
and gathers the others' again: a piece's backward pass takes the output and the log-sum-exp over all pieces, which
determine the share of each score (Dao et al., arXiv 2205.14135, section 3.1; Liu et al., "Ring Attention",
arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from brim.errors import UnsupportedError
from brim.predict.compiled.torch_compile import is_captured
from brim.predict.lowering.cuda import attention as cuda_attention
from brim.predict.pretend import pretended_capability
from brim.techniques.micro_batch import IGNORED_LABEL
from brim.techniques.parallel.collectives import all_gather, gathered, reduce_scatter

_ATTENTION = "brim_context_parallel"
_SLIDING = ("sliding_window", "attention_chunk_size")
_GROWING = ("dynamic", "longrope")  # rotary positions whose frequencies depend on the longest sequence so far


def mesh_of(ranks: int, device: str, tensor_parallel: int = 1) -> DeviceMesh | None:
    """The mesh of ``ranks`` that share sequences, each with tensor parallel ranks of its own; None for one rank."""
    if ranks == 1:
        return None
    rest = dist.get_world_size() // (ranks * tensor_parallel)
    return init_device_mesh(device, (rest, ranks, tensor_parallel), mesh_dim_names=("rest", "cp", "tp"))["cp"]


def narrow(config: Any) -> str | None:
    """The setting of transformers' configuration by which attention does not reach all earlier tokens, or None."""
    setting = next((name for name in _SLIDING if getattr(config, name, None)), None)
    if setting is None and any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "layer_types"
    return setting


def length_dependent(config: Any) -> str | None:
    """The kind of rotary positions that depend on the length of the sequence, which ranks have parts of, or None."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return kind if kind in _GROWING else None


def apply(model: Any, mesh: DeviceMesh, place: int | None = None) -> Context:
    """Let transformers' causal language model ``model`` work on this rank's tokens, over ``mesh`` (one axis).
    ``place``: act as that one of these ranks, in a prediction.

    Raises UnsupportedError for layers that do not attend to all earlier tokens.
    """
    from transformers import AttentionInterface

    _check(model, mesh.size())
    context = Context(mesh, place)
    AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)
    attentions = [
        module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
    ]
    if not attentions or model.config._attn_implementation != _ATTENTION:
        raise UnsupportedError(
            f"Cannot use --cp {mesh.size()} for {type(model).__name__}.",
            "transformers cannot replace its attention.", "Leave out --cp.",
        )  # fmt: skip
    for module in attentions:
        vars(module)["context"] = context
    return context


def _check(model: Any, ranks: int) -> None:
    windowed, rotary = narrow(model.config), length_dependent(model.config)
    why = f"Its attention does not attend to all earlier tokens ({windowed})." if windowed else ""
    why = (
        why
        or f"Its rotary positions depend on the length of the sequence ({rotary}), and a rank has only a part of it."
    )
    if windowed or rotary:
        raise UnsupportedError(f"Cannot use --cp {ranks} for {type(model).__name__}.", why, "Leave out --cp.")


class Context:
    """The handle, which selects this rank's tokens."""

    def __init__(self, mesh: DeviceMesh, place: int | None = None) -> None:
        rank = mesh.get_local_rank() if place is None else place
        self.ring = Ring(group=mesh.get_group(), rank=rank, ranks=mesh.size())
        self._mask: torch.Tensor | None = None

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        return own(tokens, self.ring.rank, self.ring.ranks)

    def following(self, labels: torch.Tensor) -> torch.Tensor:
        """The label of the token after each of this rank's, out of (batch, sequence)."""
        return self.own(F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)).contiguous()

    def positions(self, count: int, device: torch.device) -> torch.Tensor:
        """The positions of this rank's ``count`` tokens in their sequence: (1, count)."""
        return _positions(self.ring.rank, self.ring.ranks, count, device)[None]

    def gather_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather (batch, heads, own tokens, width) to (batch, heads, all tokens, width), rank after rank."""
        rows = gathered(tensor.permute(2, 0, 1, 3), self.ring.group)
        return rows.permute(1, 2, 0, 3)

    def mask(self, count: int, device: torch.device) -> torch.Tensor:
        """The mask (1, 1, own, all) of this rank's tokens over all tokens, rank after rank. All layers share it,
        except compiled ones, whose graphs make their own.
        """
        if self._mask is not None and self._mask.shape[2] == count:
            return self._mask
        ranks = self.ring.ranks
        all_positions = torch.cat([_positions(rank, ranks, count, device) for rank in range(ranks)])
        mask = (all_positions[None] <= self.positions(count, device)[0][:, None])[None, None]
        if not is_captured():
            self._mask = mask
        return mask


def own(tokens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if ranks == 1:
        return tokens
    length = tokens.shape[1] // (2 * ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([tokens[:, start : start + length] for start in starts], 1)


def _positions(rank: int, ranks: int, count: int, device: torch.device) -> torch.Tensor:
    return own(torch.arange(count * ranks, device=device)[None], rank, ranks)[0]


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    **settings: Any,
) -> Any:  # fmt: skip
    """Attend to all ranks' keys and values, as a function of transformers' attention interface."""
    context: Context = vars(module)["context"]
    plain = not settings.get("dropout") and all(settings.get(name) is None for name in ("softcap", "position_bias"))
    kernel = kernel_for(query, key, value) if plain else None
    if kernel is None:
        return _masked(module, query, key, value, context, settings)
    return attention(query, key, value, context.ring, kernel, settings.get("scaling")), None


def _masked(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Context,
    settings: dict[str, Any],
) -> Any:  # fmt: skip
    """Attend by transformers' own function and a mask, where no fused kernel supports it, such as dropout."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = context.mask(query.shape[2], query.device)
    settings = {name: value for name, value in settings.items() if name != "is_causal"}
    return sdpa_attention_forward(
        module, query, context.gather_tokens(key), context.gather_tokens(value), mask, is_causal=False, **settings
    )


_aten = torch.ops.aten
_ALIGNED = 32  # the alignment of rows of the memory-efficient kernel's log-sum-exp (attention.cu, kAlignLSE)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values, or their gradients


class Kernel(Protocol):
    """A kernel for queries (batch, heads, tokens, width), keys and values (batch, heads, keys, width). ``grouped``:
    heads of queries may share a head of keys and values."""

    grouped: bool

    def forward(self, inputs: Three, causal: bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp (batch, heads, tokens) of each query's scores."""

    def backward(
        self, gradient: torch.Tensor, inputs: Three, output: torch.Tensor, sums: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Three:  # fmt: skip
        """The gradients of queries, keys and values; ``output`` and ``sums`` are those over all pieces."""


class OnCpu:
    grouped = False

    def forward(self, inputs: Three, causal: bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
        return outputs[0], outputs[1]

    def backward(
        self, gradient: torch.Tensor, inputs: Three, output: torch.Tensor, sums: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Three:  # fmt: skip
        gradients: Three = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *inputs, output, sums, 0.0, causal, scale=scale
        )
        return gradients


class Flash:
    """CUDA's flash attention."""

    grouped = True

    def forward(self, inputs: Three, causal: bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=scale)
        return outputs[0], outputs[1]

    def backward(
        self, gradient: torch.Tensor, inputs: Three, output: torch.Tensor, sums: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Three:  # fmt: skip
        state = torch.empty(2, dtype=torch.uint64, device=gradient.device)  # of dropout, which is off
        lengths = inputs[0].shape[2], inputs[1].shape[2]
        gradients: Three = _aten._scaled_dot_product_flash_attention_backward(
            gradient, *inputs, output, sums.contiguous(), None, None, *lengths, 0.0, causal, state, state, scale=scale
        )
        return gradients


class Efficient:
    """CUDA's memory-efficient attention, also in float32."""

    grouped = False

    def forward(self, inputs: Three, causal: bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _aten._scaled_dot_product_efficient_attention(*inputs, None, True, 0.0, causal, scale=scale)
        return outputs[0], outputs[1][..., : inputs[0].shape[2]]

    def backward(
        self, gradient: torch.Tensor, inputs: Three, output: torch.Tensor, sums: torch.Tensor, causal: bool,
        scale: float | None,
    ) -> Three:  # fmt: skip
        state = torch.zeros((), dtype=torch.int64, device=gradient.device)
        aligned = F.pad(sums, (0, -sums.shape[-1] % _ALIGNED), value=torch.inf).contiguous()
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            *inputs,
            None,
            output,
            aligned,
            state,
            state,
            0.0,
            (True, True, True, False),
            causal,
            scale=scale,
        )
        return gradients[0], gradients[1], gradients[2]


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    """The kernel for these tensors on their device, or on the GPU of a trace; None if there is none."""
    if query.shape[-1] != value.shape[-1] or query.dtype not in _FLOATS:
        return None
    capability = pretended_capability()
    if capability is not None:
        return _of_name(cuda_attention.with_sums(query, key, value, capability))
    if query.device.type == "cuda":
        return _on_cuda(query, key, value)
    return OnCpu() if query.device.type == "cpu" else None


def _on_cuda(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Kernel | None:
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    make: Any = SDPAParams
    if query.shape[-1] % 8 == 0 and can_use_flash_attention(make(query, key, value, None, 0.0, False, True)):
        return Flash()
    ungrouped = [tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value)]
    return Efficient() if can_use_efficient_attention(make(query, *ungrouped, None, 0.0, False, False)) else None


def _of_name(name: str | None) -> Kernel | None:
    if name is None:
        return None
    return Flash() if name == "flash" else Efficient()


@dataclass(frozen=True, kw_only=True)
class Ring:
    """``rank`` of the ``ranks`` of ``group`` that share sequences."""

    group: dist.ProcessGroup
    rank: int
    ranks: int


@dataclass(frozen=True)
class _Piece:
    """The keys ``[start, stop)`` of all ranks' first chunks (``part`` 0) or second chunks (1), in the ranks' order;
    the second are counted from the sequence's end.
    """

    part: int
    start: int
    stop: int
    causal: bool = False


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, kernel: Kernel, scale: float | None
) -> torch.Tensor:
    """The attention output (batch, tokens, heads, width) of this rank's (batch, heads, tokens, width)."""
    output: torch.Tensor = _Attention.apply(query, key, value, ring, kernel, scale)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, kernel: Kernel,
        scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        parts = _gathered(key, value, ring)
        length = query.shape[2] // 2
        merged_chunks = []
        for chunk in (0, 1):
            own = query.narrow(2, chunk * length, length)
            merged: tuple[torch.Tensor, torch.Tensor] | None = None
            for piece in _pieces(ring, chunk, length):
                partial = kernel.forward((own, *_piece_of(parts, piece, query, kernel)), piece.causal, scale)
                merged = partial if merged is None else _merged(merged, partial)
                del partial
            assert merged is not None
            merged_chunks.append((merged[0].to(query.dtype), merged[1]))
        output = torch.cat([of_chunk.transpose(1, 2) for of_chunk, _ in merged_chunks], 1)
        ctx.save_for_backward(query, key, value, output, *(sums for _, sums in merged_chunks))
        ctx.ring, ctx.kernel, ctx.scale = ring, kernel, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, *sums = ctx.saved_tensors
        ring, kernel = ctx.ring, ctx.kernel
        parts = _gathered(key, value, ring)
        totals = [torch.zeros_like(part) for part in parts]
        length = query.shape[2] // 2
        of_query = []
        for chunk in (0, 1):
            own = [
                tensor.narrow(dim, chunk * length, length).contiguous() if dim == 1
                else tensor.narrow(dim, chunk * length, length)
                for tensor, dim in ((gradient, 1), (query, 2), (output, 1))
            ]  # fmt: skip
            total: torch.Tensor | None = None
            for piece in _pieces(ring, chunk, length, most_keys=2 * length):
                inputs = own[1], *_piece_of(parts, piece, query, kernel)
                partial: Three = kernel.backward(
                    own[0].transpose(1, 2), inputs, own[2].transpose(1, 2), sums[chunk], piece.causal, ctx.scale
                )
                total = partial[0].to(sums[chunk].dtype) if total is None else total.add_(partial[0])
                _add(totals[piece.part], piece, partial[1:], key.shape[1])
                del partial, inputs
            assert total is not None
            of_query.append(total.to(query.dtype))
        del parts
        mine = torch.cat([reduce_scatter(total, ring.group) for total in totals])  # (tokens, 2, batch, heads, width)
        of_key, of_value = (mine[:, index].permute(1, 2, 0, 3) for index in (0, 1))
        return torch.cat(of_query, 2), of_key, of_value, None, None, None


def _pieces(ring: Ring, chunk: int, length: int, most_keys: int | None = None) -> Iterator[_Piece]:
    """The pieces that the queries of this rank's ``chunk`` attend to, without a mask at most ``most_keys`` keys
    at once.
    """
    mine = ring.rank * length
    yield _Piece(chunk, mine, mine + length, causal=True)
    earlier = [(0, 0, mine)] if chunk == 0 else [(0, 0, ring.ranks * length), (1, mine + length, ring.ranks * length)]
    for part, start, stop in earlier:
        step = most_keys or max(stop - start, 1)
        for at in range(start, stop, step):
            yield _Piece(part, at, min(at + step, stop))


def _gathered(key: torch.Tensor, value: torch.Tensor, ring: Ring) -> list[torch.Tensor]:
    """The keys and values (tokens, 2, batch, heads, width) of all ranks' first chunks, and of their second ones."""
    own = torch.stack([tensor.permute(2, 0, 1, 3) for tensor in (key, value)], 1)
    return [all_gather(half, ring.group) for half in own.chunk(2)]


def _piece_of(
    parts: Sequence[torch.Tensor], piece: _Piece, query: torch.Tensor, kernel: Kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a piece (batch, heads, tokens, width), with as many heads as the kernel needs."""
    both = parts[piece.part][piece.start : piece.stop]
    key, value = (both[:, index].permute(1, 2, 0, 3) for index in (0, 1))
    times = query.shape[1] // key.shape[1]
    if times > 1 and not kernel.grouped:
        return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return key, value


def _add(total: torch.Tensor, piece: _Piece, gradients: Sequence[torch.Tensor], heads: int) -> None:
    """Add the gradients of a piece's keys and values, summed over the query heads that share them."""
    for index, gradient in enumerate(gradients):
        if gradient.shape[1] != heads:
            gradient = gradient.unflatten(1, (heads, -1)).sum(2)
        total[piece.start : piece.stop, index].add_(gradient.permute(2, 0, 1, 3))


def _merged(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join outputs and log-sum-exps over disjoint keys, in the dtype of the latter."""
    share = torch.sigmoid(second[1] - first[1])[..., None]
    dtype = first[1].dtype
    return torch.lerp(first[0].to(dtype), second[0].to(dtype), share), torch.logaddexp(first[1], second[1])
