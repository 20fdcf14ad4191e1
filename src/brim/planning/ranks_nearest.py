"""Find small changes under which ``brim plan --gpus`` fits, each proved by planning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from brim import catalog
from brim.core.hardware import RAM, VRAM
from brim.errors import BrimError, BudgetError
from brim.planning.nearest import cards_with, largest
from brim.planning.ranks import card_of, gpus_of
from brim.planning.request import Nearest
from brim.requests.plan import MeshRequest
from brim.units import format_bytes

# A limit in seconds would give other answers on a slower or busier computer.
_MOST_SEARCHES = 4
_DOUBLED = 10  # times
_SHORTEST = 64  # tokens
_CARDS, _LARGER = 3, 1.25  # the most cards that are tried, and their least ratio of sizes
_SHARE = 0.9  # of a node's RAM that plans may use (``request``)

Search = Callable[[MeshRequest], bool]


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """The reason why nothing fits, the least bytes of each memory, and changes that fit."""

    why: str
    needs_bytes: Mapping[str, int]
    nearest: tuple[Nearest, ...]

    def to_json(self) -> dict[str, Any]:
        nearest = [vars(change) for change in self.nearest]
        return {**vars(self), "needs_bytes": dict(self.needs_bytes), "nearest": nearest}


def infeasible(request: MeshRequest, refusal: BudgetError, plans: Search) -> Infeasible:
    """Return the answer to a refused ``request``. ``plans`` returns True where a search for another one finds a mesh;
    a BrimError means False."""
    prover = _Prover(plans)
    changes: list[Nearest] = []
    for search in (_more_gpus, _larger_gpus, _shorter, _more_ram):
        for changed, description in search(request, refusal.smallest_bytes, prover.fits):
            changes.append(Nearest(change=description, command=changed.command()))
    why = " ".join(part for part in (refusal.asked, refusal.found) if part)
    return Infeasible(why=why, needs_bytes=refusal.smallest_bytes, nearest=tuple(changes))


class _Prover:
    """Search at most ``_MOST_SEARCHES`` times; later requests count as not fitting."""

    def __init__(self, plans: Search) -> None:
        self._plans, self._left = plans, _MOST_SEARCHES

    def fits(self, request: MeshRequest) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        try:
            return self._plans(replace(request, top=1))
        except BrimError:
            return False


_Changes = Iterator[tuple[MeshRequest, str]]


def _more_gpus(request: MeshRequest, needs: Mapping[str, int], fits: Search) -> _Changes:
    """Try twice as many, four times, ...; numbers ruled out by states alone cost no search."""
    for doubled in range(1, _DOUBLED):
        changed = replace(request, gpus=gpus_of(request) << doubled)
        if _has_room(changed, needs, gpus_of(request)) and fits(changed):
            yield changed, f"{changed.gpus:,} GPUs"
            return


def _has_room(changed: MeshRequest, needs: Mapping[str, int], gpus: int) -> bool:
    """Return True where the bytes that ``gpus`` GPUs need each fit when spread evenly over the changed number."""
    room = card_of(changed).capacity_bytes * gpus_of(changed)
    return needs.get(VRAM, 0) * gpus <= room


def _larger_gpus(request: MeshRequest, needs: Mapping[str, int], fits: Search) -> _Changes:
    mine = card_of(request)
    for card in islice(_ever_larger(mine, max(needs.get(VRAM, 0), mine.capacity_bytes + 1)), _CARDS):
        changed = replace(request, gpu=card.name)
        if fits(changed):
            more = format_bytes(card.capacity_bytes - mine.capacity_bytes)
            yield changed, f"{more} more on each GPU, as {card.name} ({format_bytes(card.capacity_bytes)}) has"
            return


def _ever_larger(mine: catalog.Gpu, least_bytes: int) -> Iterator[catalog.Gpu]:
    while cards := cards_with(least_bytes, mine.vendor):
        yield cards[0]
        least_bytes = int(_LARGER * cards[0].capacity_bytes)


def _shorter(request: MeshRequest, needs: Mapping[str, int], fits: Search) -> _Changes:
    tokens = largest(request.seq, _SHORTEST, lambda count: fits(replace(request, seq=count)))
    if tokens is not None:
        yield replace(request, seq=tokens), f"sequences of {tokens:,} tokens"


def _more_ram(request: MeshRequest, needs: Mapping[str, int], fits: Search) -> _Changes:
    """Try the RAM per node that shards were found to need."""
    if RAM not in needs:
        return
    gib = -(-int(needs[RAM] / _SHARE) // (1 << 30)) + 1
    changed = replace(request, ram=f"{gib}GiB")
    if fits(changed):
        yield changed, f"{gib} GiB of RAM in each node"
