"""Find small changes that make a request fit, each proved by planning it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from brim import catalog
from brim.catalog import Gpu
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.planning.factory import is_factory
from brim.planning.file import described_source, parameter_count
from brim.planning.proof import Bytes, sufficient
from brim.planning.request import LOSSY, Machine, Nearest, Proposal, Request, machine_of, ram_option
from brim.planning.training import states_of
from brim.units import exact_bytes, format_bytes

Planner = Callable[[Request, Machine], list[Proposal]]

# The most plans for more memory and for other changes: a limit in seconds would give other answers on a slower or
# busier computer.
_MEMORY_PLANS, _OTHER_PLANS = 4, 8
_RAISES = 4  # plans in budgets that errors called the smallest
_SHORTEST, _FEWEST = 64, 1  # tokens, sequences
_OPTIMIZERS = ("adamw8bit", "lion", "sgd")  # each keeps less than the one before
_MODELS = 3
_ROUNDED_BYTES = 1 << 20  # amounts that people can type
_LEAST_BYTES = 1  # a budget that nothing fits
_T = TypeVar("_T")


class _Enough(Exception):
    """The limit of plans is reached."""


class _Prover:
    """Plan a limited number of times."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self.left = planner, 0

    def refusal(self, request: Request, machine: Machine) -> BudgetError | None:
        """Return the error where ``request`` does not fit ``machine``, else None. Raises UnsupportedError."""
        if self.left == 0:
            raise _Enough
        self.left -= 1
        try:
            self._planner(replace(request, top=1), machine)
        except BudgetError as error:
            return error
        return None

    def fits(self, request: Request, machine: Machine) -> bool:
        """Return True where ``request`` fits; an unsupported one (an optimizer of a missing library) does not."""
        try:
            return self.refusal(request, machine) is None
        except UnsupportedError:
            return False


def nearest(
    request: Request, machine: Machine, error: BudgetError, planner: Planner
) -> tuple[dict[str, int], list[Nearest]]:
    """Return the bytes per tier with which ``request`` fits, and changes under which it does.

    ``error`` is the planner's refusal. The bytes are proved, or else those of ``error``.
    """
    prover = _Prover(planner)
    changes: list[Nearest] = []
    needs = {tier: count for tier, count in error.smallest_bytes.items() if count > machine.budget_bytes.get(tier, 0)}
    prover.left = _MEMORY_PLANS
    with suppress(_Enough):  # the changes until then are the answer
        enough = _enough(prover, request, machine, needs)
        if enough is not None:
            needs = enough
            for change in _more_memory(prover, request, machine, needs):
                changes.append(change)
    prover.left = _OTHER_PLANS  # the user may not have more memory
    with suppress(_Enough):
        for search in (_other_ways, _shorter, _fewer, _smaller_models):
            for change in search(prover, request, machine, needs):
                changes.append(change)  # one by one, to keep those before the limit
    return needs, changes


def _enough(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> dict[str, int] | None:
    """Return proved bytes of the tiers that are short, other tiers unchanged; None where none was proved."""

    def plan(budget: Bytes) -> dict[str, int]:
        refused = prover.refusal(request, _with(machine, budget))
        if refused is not None:
            raise refused
        return {tier: count for tier, count in budget.items() if count > machine.budget_bytes.get(tier, 0)}

    def doubled(budget: Bytes, refused: BudgetError) -> Bytes | None:
        # The error's smallest bytes fall short again, by a little less each time: the difference is added twice.
        more = {
            tier: _rounded(2 * count - budget.get(tier, count))
            for tier, count in refused.smallest_bytes.items()
            if count > max(budget.get(tier, 0), machine.budget_bytes.get(tier, 0))
        }
        return {**budget, **more} if more else None

    rounded = {tier: _rounded(count) for tier, count in needs.items()}
    try:
        return sufficient(plan, machine.budget_bytes, rounded, raised=doubled, most=_RAISES) if needs else None
    except BudgetError:
        return None


def _with(machine: Machine, bytes: Bytes) -> Machine:
    """Return ``machine`` with these bytes in its tiers, even beyond its capacity."""
    tiers = tuple(
        replace(tier, capacity_bytes=max(tier.capacity_bytes, bytes.get(tier.name, 0)))
        for tier in machine.hardware.tiers
    )
    hardware = replace(machine.hardware, tiers=tiers)
    return replace(machine, hardware=hardware, budget_bytes={**machine.budget_bytes, **bytes})


def _rounded(count: int) -> int:
    return -(-count // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _more_memory(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> Iterator[Nearest]:
    """Yield the change to ``needs``; where VRAM is short and a card was named, the smallest card with enough."""
    parts = []
    for tier, count in needs.items():
        more = count - machine.budget_bytes.get(tier, 0)
        parts.append(f"{format_bytes(more)} more of {tier.upper()} ({format_bytes(count)} in all)")
    options = {tier: ram_option(machine, count) if tier == RAM else count for tier, count in needs.items()}
    amounts: dict[str, Any] = {tier: exact_bytes(_rounded(count)) for tier, count in options.items()}
    capacity = machine.hardware.tier(machine.hardware.compute).capacity_bytes
    if request.gpu is None or needs.get(VRAM, 0) <= capacity:
        changed = replace(request, **amounts)
        try:
            there = machine_of(changed)
        except UsageError:  # no card, or not this machine, has as much
            return
        # Other amounts may change an assumed machine. This one was proved already.
        if not machine.assumed or prover.fits(changed, there):
            yield Nearest(change=" and ".join(parts), command=changed.command())
        return
    amounts.pop(VRAM)
    for card in cards_with(needs[VRAM], catalog.gpu(request.gpu).vendor):
        changed = replace(request, gpu=card.name, vram=None, **amounts)
        if prover.fits(changed, machine_of(changed)):
            name = f"{card.name} ({format_bytes(card.capacity_bytes)})"
            yield Nearest(change=f"{' and '.join(parts)}, as {name} has", command=changed.command())
            return


def cards_with(vram_bytes: int, vendor: str) -> Sequence[Gpu]:
    """Return the vendor's two smallest cards with ``vram_bytes`` beside their context and a known link."""
    cards = [
        card for card in map(catalog.gpu, catalog.gpu_names()) if card.vendor == vendor and card.pcie_bytes_per_s
    ]
    large = [card for card in cards if card.capacity_bytes - card.context().bytes >= vram_bytes]
    return sorted(large, key=lambda card: (card.capacity_bytes, card.name))[:2]


def _other_ways(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> Iterator[Nearest]:
    """Yield another optimizer, adapters, or fewer bits: changes to the result, not to the amount of work."""
    if request.task == "train" and request.method == "full":
        yield from _first(
            prover, machine, [replace(request, method="lora")], lambda candidate: "LoRA in place of full training"
        )
        next_index = _OPTIMIZERS.index(request.optimizer) + 1 if request.optimizer in _OPTIMIZERS else 0
        smaller = [replace(request, optimizer=name) for name in _OPTIMIZERS[next_index:]]
        smaller = [candidate for candidate in smaller if states_of(candidate) <= sum(machine.budget_bytes.values())]
        yield from _first(prover, machine, smaller, lambda candidate: f"the optimizer {candidate.optimizer}")
    if not request.lossless:
        lower = [replace(request, precision=name) for name in _lower(request)]
        yield from _first(prover, machine, lower, lambda candidate: f"the precision {candidate.precision}")


def _lower(request: Request) -> Sequence[str]:
    """Return smaller precisions, the best first."""
    if request.task == "train":
        return () if (request.precision or "").startswith("bf16-") or request.precision == "bf16" else ("bf16",)
    if request.precision in LOSSY:
        return ("int4",) if request.precision != "int4" else ()
    return ("bf16", "int8", "int4") if request.precision == "fp32" else ("int8", "int4")


def _first(
    prover: _Prover, machine: Machine, requests: Sequence[Request], describe: Callable[[Request], str]
) -> Iterator[Nearest]:
    for candidate in requests:
        if prover.fits(candidate, machine):
            yield Nearest(change=describe(candidate), command=candidate.command())
            return


def _shorter(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> Iterator[Nearest]:
    length = largest(request.seq, _SHORTEST, lambda count: prover.fits(replace(request, seq=count), machine))
    if length is not None:
        changed = replace(request, seq=length)
        yield Nearest(change=f"sequences of {length:,} tokens", command=changed.command())


def _fewer(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> Iterator[Nearest]:
    count = largest(request.batch, _FEWEST, lambda count: prover.fits(replace(request, batch=count), machine))
    if count is not None:
        changed = replace(request, batch=count)
        yield Nearest(change=f"a batch of {count:,}", command=changed.command())


def largest(above: int, least: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ``least``, 2 ``least``, ... below ``above`` that fits, by bisection, or None."""
    sizes = [least]
    while sizes[-1] * 2 < above:
        sizes.append(sizes[-1] * 2)
    if least >= above or not fits(least):
        return None
    return sizes[bisect_left(sizes, True, lo=1, key=lambda size: not fits(size)) - 1]


def _smaller_models(prover: _Prover, request: Request, machine: Machine, needs: dict[str, int]) -> Iterator[Nearest]:
    """Yield the largest model of the family that fits; the search begins where the parameters' share suggests."""
    if is_factory(request.model):
        return  # other sizes of a function's model are unknown
    count, family = parameter_count(request.model), _family(request.model)
    have = machine.budget_bytes
    share = min((have.get(tier, 0) / bytes for tier, bytes in needs.items() if bytes), default=1.0)
    sizes = {name: catalog.model(name).parameters or 0 for name in catalog.model_names() if _family(name) == family}
    smaller = sorted((name for name in sizes if 0 < sizes[name] < count), key=lambda name: -sizes[name])
    likely = [name for name in smaller if sizes[name] <= share * count] or smaller[-1:]
    candidates = [replace(request, model=name) for name in likely[:_MODELS]]
    yield from _first(
        prover, machine, candidates, lambda new: f"{new.model} ({sizes[str(new.model)] / 1e9:.2g} B parameters)"
    )


def _family(model: str | Path) -> tuple[str, str]:
    """Return the class and the letters at the name's begin (``qwen3-8b`` -> qwen), "" for a folder."""
    source = described_source(model)
    begins = re.match("[a-z]*", source.name.lower())
    named = not Path(model).exists()
    return source.architecture, begins[0] if begins and named else ""


def in_the_least(machine: Machine, attempt: Callable[[Machine], _T]) -> _T | None:
    """Return the result of ``attempt`` in the smallest budget of the compute tier under which it succeeds.

    ``attempt`` plans for a machine and raises BudgetError with the smallest bytes where nothing fits; the budget
    grows to these until a plan is proved. None: the refusals name no smaller budget than the machine's.
    """
    compute = machine.hardware.compute

    def plan(budget: Bytes) -> _T:
        return attempt(replace(machine, budget_bytes=dict(budget)))

    def raised(needs: Bytes, refused: BudgetError) -> Bytes | None:
        least = refused.smallest_bytes.get(compute, 0)
        return {compute: least} if needs[compute] < least < machine.budget_bytes[compute] else None

    try:
        return sufficient(plan, machine.budget_bytes, {compute: _LEAST_BYTES}, raised=raised, most=_RAISES)
    except BudgetError:
        return None
