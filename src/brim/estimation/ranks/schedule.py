"""The order of a pipeline rank's micro-batches: 1F1B or interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from brim.estimation.ranks.split import Split


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A forward or backward of one micro-batch through one of the rank's model chunks."""

    micro_batch: int
    chunk: int
    forward: bool

    @property
    def kind(self) -> tuple[int, bool]:
        """The key that turns of other micro-batches share."""
        return self.chunk, self.forward


def turns(split: Split, stage: int) -> list[Turn]:
    """All turns of pipeline rank ``stage`` in one step.

    Without interleaving: ``p - stage - 1`` forwards ahead, then one forward and one backward in turn (Narayanan et
    al., arXiv 2104.04473). Interleaved: as megatron/core/pipeline_parallel/schedules.py does it, ``p``
    micro-batches at a time through each chunk, backward in the chunks' reverse order.
    """
    forwards = list(_order(split))
    if split.pp == 1:
        ahead = 0
    elif split.interleave == 1:
        ahead = split.pp - stage - 1
    else:
        ahead = (split.pp - stage - 1) * 2 + (split.interleave - 1) * split.pp
    ahead = min(ahead, len(forwards))
    last = split.interleave - 1
    schedule = [Turn(micro_batch=m, chunk=c, forward=True) for m, c in forwards[:ahead]]
    for index, (m, c) in enumerate(forwards[ahead:]):
        schedule.append(Turn(micro_batch=m, chunk=c, forward=True))
        schedule.append(_backward(forwards[index], last))
    schedule += [_backward(turn, last) for turn in forwards[len(forwards) - ahead :]]
    return schedule


def brief(split: Split, stage: int) -> Split:
    """The same split with the fewest micro-batches that show every kind of turn of this rank."""
    few = min(split.micro_batches, 3 * split.pp if split.interleave > 1 else split.pp - stage + 2)
    return replace(split, global_batch=few * split.micro_batch * split.dp)


def _order(split: Split) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, chunk) of every forward."""
    if split.interleave == 1:
        yield from ((m, 0) for m in range(split.micro_batches))
        return
    for first in range(0, split.micro_batches, split.pp):
        for chunk in range(split.interleave):
            for m in range(first, min(first + split.pp, split.micro_batches)):
                yield m, chunk


def _backward(turn: tuple[int, int], last: int) -> Turn:
    micro_batch, chunk = turn
    return Turn(micro_batch=micro_batch, chunk=last - chunk, forward=False)
