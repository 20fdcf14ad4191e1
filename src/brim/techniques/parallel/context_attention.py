"""Attention of a rank's tokens, two chunks of every sequence, over the tokens of all ranks, without a mask.

Of ``n`` ranks, rank ``r`` has chunks ``r`` and ``2n - 1 - r`` of ``2n``, so that all have as much to do (Llama 3,
arXiv 2407.21783, section 3.3.2). A chunk's queries look at their own chunk by a causal kernel and at all earlier ones
by kernels without a mask; what these give is put together by the log-sum-exp of their scores. For the backward pass
a rank keeps its own keys and values only, and gathers the others' again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from brim.techniques.parallel.attention_kernels import Kernel, Three
from brim.techniques.parallel.collectives import all_gather, reduce_scatter


@dataclass(frozen=True, kw_only=True)
class Ring:
    """``rank`` of the ``ranks`` of ``group`` that share sequences."""

    group: dist.ProcessGroup
    rank: int
    ranks: int


@dataclass(frozen=True)
class _Piece:
    """Keys ``[start, stop)`` of all ranks' first chunks (``part`` 0) or second ones (1): in the ranks' order, where
    the second are those of the sequence from its end."""

    part: int
    start: int
    stop: int
    causal: bool = False


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, kernel: Kernel, scale: float | None
) -> torch.Tensor:
    """Of this rank's (batch, heads, tokens, width): (batch, tokens, heads, width)."""
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
                partial = kernel.forward(own, *_of(parts, piece, query, kernel), piece.causal, scale)
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
            for piece in _pieces(ring, chunk, length, most=2 * length):
                keys, values = _of(parts, piece, query, kernel)
                partial: Three = kernel.backward(
                    own[0].transpose(1, 2), own[1], keys, values, own[2].transpose(1, 2), sums[chunk], piece.causal,
                    ctx.scale,
                )  # fmt: skip
                total = partial[0].to(sums[chunk].dtype) if total is None else total.add_(partial[0])
                _add(totals[piece.part], piece, partial[1:], key.shape[1])
                del partial, keys, values
            assert total is not None
            of_query.append(total.to(query.dtype))
        del parts
        mine = torch.cat([reduce_scatter(total, ring.group) for total in totals])  # (tokens, 2, batch, heads, width)
        of_key, of_value = (mine[:, index].permute(1, 2, 0, 3) for index in (0, 1))
        return torch.cat(of_query, 2), of_key, of_value, None, None, None


def _pieces(ring: Ring, chunk: int, length: int, most: int | None = None) -> Iterator[_Piece]:
    """What the queries of one of this rank's chunks look at; ``most`` keys at once of what needs no mask."""
    mine = ring.rank * length
    yield _Piece(chunk, mine, mine + length, causal=True)
    earlier = [(0, 0, mine)] if chunk == 0 else [(0, 0, ring.ranks * length), (1, mine + length, ring.ranks * length)]
    for part, start, stop in earlier:
        step = most or max(stop - start, 1)
        for at in range(start, stop, step):
            yield _Piece(part, at, min(at + step, stop))


def _gathered(key: torch.Tensor, value: torch.Tensor, ring: Ring) -> list[torch.Tensor]:
    """Keys and values of all ranks' first chunks, and of their second ones: (tokens, 2, batch, heads, width)."""
    own = torch.stack([tensor.permute(2, 0, 1, 3) for tensor in (key, value)], 1)
    return [all_gather(half, ring.group) for half in own.chunk(2)]


def _of(
    parts: Sequence[torch.Tensor], piece: _Piece, query: torch.Tensor, kernel: Kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a piece (batch, heads, tokens, width), with as many heads as the kernel needs."""
    both = parts[piece.part][piece.start : piece.stop]
    key, value = (both[:, index].permute(1, 2, 0, 3) for index in (0, 1))
    times = query.shape[1] // key.shape[1]
    if times > 1 and not kernel.grouped:
        return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return key, value


def _add(total: torch.Tensor, piece: _Piece, gradients: Sequence[torch.Tensor], heads: int) -> None:
    """Those of a piece's keys and values, summed over the queries' heads that share one of theirs."""
    for index, gradient in enumerate(gradients):
        if gradient.shape[1] != heads:
            gradient = gradient.unflatten(1, (heads, -1)).sum(2)
        total[piece.start : piece.stop, index].add_(gradient.permute(2, 0, 1, 3))


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps over disjoint keys as those over all of them, in the type of the latter."""
    share = torch.sigmoid(other[1] - one[1])[..., None]
    kind = one[1].dtype
    return torch.lerp(one[0].to(kind), other[0].to(kind), share), torch.logaddexp(one[1], other[1])
