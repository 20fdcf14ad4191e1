"""Which splits of a job a search looks at: those that divide, and that ``brim train`` runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from brim.errors import UnsupportedError, UsageError
from brim.estimation.ranks.sizes import Shape
from brim.estimation.ranks.split import Split, check_context, check_experts, check_sizes, cuts_in_halves

_MICRO_BATCHES = (1, 2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 5, 6, 8)
_LEAST_TOKENS = 2048  # of a sequence on a rank beside tensors or stages: with fewer, keys take longer than products


def splits(
    shape: Shape, gpus: int, gpus_per_node: int, sequence: int, batch: int, *, sequences_beside: bool = False
) -> Iterator[Split]:  # fmt: skip
    """Tensors, pipelines, sequences and experts over ranks, as Megatron-LM would, and PyTorch's engine can.
    ``sequences_beside``: sequences over ranks beside tensors and pipelines too."""
    whole = shape.experts is not None or shape.latent is not None  # modelled on whole layers
    tensors = [n for n in range(1, min(gpus_per_node, gpus) + 1) if gpus_per_node % n == 0 or n == gpus]
    stages = [n for n in range(1, min(shape.layers, gpus) + 1) if gpus % n == 0]
    for tp, pp, chunks, micro in itertools.product([1] if whole else tensors, stages, _CHUNKS, _MICRO_BATCHES):
        if gpus % (tp * pp) or (chunks > 1 and (pp == 1 or shape.layers % (pp * chunks))):
            continue
        for own in _shared(shape, gpus, tp, pp, sequence // _LEAST_TOKENS if sequences_beside else 0):
            split = made(
                shape, sequence, gpus=gpus, gpus_per_node=gpus_per_node, tp=tp, pp=pp, interleave=chunks,
                micro_batch=micro, global_batch=batch, sequence_parallel=tp > 1, zero=1, **own,
            )  # fmt: skip
            if split is not None:
                yield split


def run_splits(shape: Shape, gpus: int, gpus_per_node: int, sequence: int, batch: int) -> Iterator[Split]:
    """All that ``brim train`` runs: each of these with ZeRO's stages, and pipelines without bubbles."""
    for split in splits(shape, gpus, gpus_per_node, sequence, batch, sequences_beside=True):
        if split.tp > 1 and shape.whole_tensors:
            continue
        yield split
        for zero in _further_stages(split):
            yield replace(split, zero=zero)
        if _takes_halves(split):
            yield replace(split, zero_bubble=True)


def _further_stages(split: Split) -> tuple[int, ...]:
    """Of ZeRO, where they differ from the first: one micro-batch's gradients are split at once anyway."""
    if split.shards == 1:
        return ()
    return (3,) if split.pp > 1 or split.micro_batches == 1 else (2, 3)


def _takes_halves(split: Split) -> bool:
    """Whether PyTorch's zero-bubble pipeline runs it."""
    return split.pp > 1 and split.micro_batches % split.pp == 0 and cuts_in_halves(split)


def _shared(shape: Shape, gpus: int, tp: int, pp: int, most: int) -> Iterator[dict[str, int]]:
    """What data-parallel ranks may share beside states: nothing, all sequences (``cp``), or experts (``ep``).
    ``most``: ranks that share sequences beside tensors and pipelines."""
    yield {}
    shards = gpus // (tp * pp)
    if shape.experts is not None:
        if tp == 1 and shards > 1 and shape.experts.count % shards == 0:
            yield {"ep": shards}
    elif shape.latent is None and not shape.windowed:
        most = shards if tp == pp == 1 else min(shards, most)
        yield from ({"cp": n} for n in range(2, most + 1) if shards % n == 0)


def made(shape: Shape, sequence: int, **fields: Any) -> Split | None:
    """The split where it divides and PyTorch's engine takes it, else None."""
    try:
        split = Split(**fields)
        check_sizes(split, shape.sizes(sequence))
        check_experts(split)
        check_context(split)
    except (UsageError, UnsupportedError):
        return None  # no candidate
    return split
