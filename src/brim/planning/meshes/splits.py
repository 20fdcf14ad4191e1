"""Enumerate the splits of a job for a search: those that divide, and those that ``brim train`` runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brim.errors import UnsupportedError, UsageError
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split, check_context, check_experts, check_sizes

_MICRO_BATCHES = (1, 2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 5, 6, 8)
_LEAST_TOKENS = 2048  # of a sequence on a rank: with fewer, sending keys takes longer than matrix products


def splits(
    shape: Shape, gpus: int, gpus_per_node: int, sequence: int, batch: int, *, sequences_beside: bool = False
) -> Iterator[Split]:  # fmt: skip
    """Yield splits of tensors, pipelines, sequences and experts that Megatron-LM and PyTorch's engine support;
    ``sequences_beside`` combines sequence splits with tensors and pipelines."""
    whole = shape.experts is not None or shape.latent is not None  # the model of costs does not split such tensors
    tensors = [n for n in range(1, min(gpus_per_node, gpus) + 1) if gpus_per_node % n == 0 or n == gpus]
    stages = [n for n in range(1, min(shape.layers, gpus) + 1) if gpus % n == 0]
    for tp, pp, chunks, micro in itertools.product([1] if whole else tensors, stages, _CHUNKS, _MICRO_BATCHES):
        if gpus % (tp * pp) or (chunks > 1 and (pp == 1 or shape.layers % (pp * chunks))):
            continue
        for own in _shared(shape, gpus, tp, pp, sequence // _LEAST_TOKENS if sequences_beside else 0):
            split = valid_split(
                shape, sequence, gpus=gpus, gpus_per_node=gpus_per_node, tp=tp, pp=pp, interleave=chunks,
                micro_batch=micro, global_batch=batch, sequence_parallel=tp > 1, zero=1, **own,
            )  # fmt: skip
            if split is not None:
                yield split


def run_splits(shape: Shape, gpus: int, gpus_per_node: int, sequence: int, batch: int) -> Iterator[Split]:
    """Yield all splits that ``brim train`` runs: also with ZeRO's stages."""
    for split in splits(shape, gpus, gpus_per_node, sequence, batch, sequences_beside=True):
        if split.tp > 1 and shape.whole_tensors:
            continue
        yield split
        for zero in _further_stages(split):
            yield replace(split, zero=zero)


def _further_stages(split: Split) -> tuple[int, ...]:
    """Return ZeRO's stages that differ from the first: a single micro-batch's gradients are sharded anyway."""
    if split.shards == 1:
        return ()
    return (3,) if split.pp > 1 or split.micro_batches == 1 else (2, 3)


def _shared(shape: Shape, gpus: int, tp: int, pp: int, most: int) -> Iterator[dict[str, int]]:
    """Yield the splits among data-parallel ranks beside states: none, sequences (``cp``), or experts (``ep``).
    ``most`` limits the ranks that split sequences together with tensors or pipelines."""
    yield {}
    shards = gpus // (tp * pp)
    if shape.experts is not None:
        if tp == 1 and shards > 1 and shape.experts.count % shards == 0:
            yield {"ep": shards}
    elif shape.latent is None and not shape.windowed:
        most = shards if tp == pp == 1 else min(shards, most)
        yield from ({"cp": n} for n in range(2, most + 1) if shards % n == 0)


def valid_split(shape: Shape, sequence: int, **fields: Any) -> Split | None:
    """Return the split if it divides and PyTorch's engine supports it, else None."""
    try:
        split = Split(**fields)
        check_sizes(split, shape.sizes(sequence))
        check_experts(split)
        check_context(split)
    except (UsageError, UnsupportedError):
        return None
    return split
