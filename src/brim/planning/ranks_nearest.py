"""Find small changes under which ``brim plan --gpus`` fits, each proved by planning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from brim import catalog
from brim.core.hardware import RAM, VRAM
from brim.core.options import build
from brim.errors import BrimError, BudgetError
from brim.planning.nearest import cards_with, largest
from brim.requests.plan import MeshRequest
from brim.units import format_bytes

# A limit in seconds would give other answers on a slower or busier computer.
_MOST_SEARCHES = 4
_DOUBLED = 10  # times
_SHORTEST = 64  # tokens
_CARDS, _LARGER = 3, 1.25  # the most cards that are tried, and their least ratio of sizes
_SHARE = 0.9  # of a node's RAM that plans may use (``request``)

Options = Mapping[str, Any]
Search = Callable[[Options], bool]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change in words, and its command."""

    change: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """The reason why nothing fits, the least bytes of each memory, and changes that fit."""

    why: str
    needs_bytes: Mapping[str, int]
    nearest: tuple[Change, ...]

    def to_json(self) -> dict[str, Any]:
        changes = [{"change": change.change, "command": change.command} for change in self.nearest]
        return {"why": self.why, "needs_bytes": dict(self.needs_bytes), "nearest": changes}


def infeasible(model: str, options: Options, refusal: BudgetError, plans: Callable[[Options], bool]) -> Infeasible:
    """Return the answer to refused ``options``. ``plans`` returns True where a search with other options finds a
    mesh; a BrimError means False."""
    prover = _Prover(plans)
    changes: list[Change] = []
    for search in (_more_gpus, _larger_gpus, _shorter, _more_ram):
        for changed, description in search(options, refusal.smallest_bytes, prover.fits):
            changes.append(
                Change(change=description, command=build(MeshRequest, {**changed, "model": model}).command())
            )
    why = " ".join(part for part in (refusal.asked, refusal.found) if part)
    return Infeasible(why=why, needs_bytes=refusal.smallest_bytes, nearest=tuple(changes))


class _Prover:
    """Search at most ``_MOST_SEARCHES`` times; later options count as not fitting."""

    def __init__(self, plans: Callable[[Options], bool]) -> None:
        self._plans, self._left = plans, _MOST_SEARCHES

    def fits(self, options: Options) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        try:
            return self._plans({**options, "top": 1})
        except BrimError:
            return False


_Changes = Iterator[tuple[dict[str, Any], str]]


def _more_gpus(options: Options, needs: Mapping[str, int], fits: Search) -> _Changes:
    """Try twice as many, four times, ...; numbers ruled out by states alone cost no search."""
    for doubled in range(1, _DOUBLED):
        changed = {**options, "gpus": options["gpus"] << doubled}
        if _has_room(changed, needs, options["gpus"]) and fits(changed):
            yield changed, f"{changed['gpus']:,} GPUs"
            return


def _has_room(changed: Options, needs: Mapping[str, int], gpus: int) -> bool:
    """Return True where the bytes that ``gpus`` GPUs need each fit when spread evenly over the changed number."""
    room = catalog.gpu(changed["gpu"]).capacity_bytes * int(changed["gpus"])
    return needs.get(VRAM, 0) * gpus <= room


def _larger_gpus(options: Options, needs: Mapping[str, int], fits: Search) -> _Changes:
    mine = catalog.gpu(options["gpu"])
    for card in islice(_ever_larger(mine, max(needs.get(VRAM, 0), mine.capacity_bytes + 1)), _CARDS):
        changed = {**options, "gpu": card.name}
        if fits(changed):
            more = format_bytes(card.capacity_bytes - mine.capacity_bytes)
            yield changed, f"{more} more on each GPU, as {card.name} ({format_bytes(card.capacity_bytes)}) has"
            return


def _ever_larger(mine: catalog.Gpu, least_bytes: int) -> Iterator[catalog.Gpu]:
    while cards := cards_with(least_bytes, mine.vendor):
        yield cards[0]
        least_bytes = int(_LARGER * cards[0].capacity_bytes)


def _shorter(options: Options, needs: Mapping[str, int], fits: Search) -> _Changes:
    tokens = largest(options["seq"], _SHORTEST, lambda count: fits({**options, "seq": count}))
    if tokens is not None:
        yield {**options, "seq": tokens}, f"sequences of {tokens:,} tokens"


def _more_ram(options: Options, needs: Mapping[str, int], fits: Search) -> _Changes:
    """Try the RAM per node that shards were found to need."""
    if RAM not in needs:
        return
    gib = -(-int(needs[RAM] / _SHARE) // (1 << 30)) + 1
    changed = {**options, "ram": f"{gib}GiB"}
    if fits(changed):
        yield changed, f"{gib} GiB of RAM in each node"
