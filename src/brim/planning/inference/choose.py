"""The one place where it is chosen how to generate: how many sequences at once, how much of a prompt, where the KV
cache rests, and where each block of weights is.

``brim generate``, ``brim.load`` and ``brim plan`` all ask ``search_generation``. They differ in what their
``GenerationCase`` says: which passes were watched, by which seconds blocks are judged, what else the program takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from brim.allocator.config import SMALL_SEGMENT_BYTES
from brim.core import Decision, Hardware, Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.step_memory import Observation
from brim.memory.pool import round_up
from brim.planning.inference.choosing import Cut, Need, best_plan, cuts, found_with_more, job_of
from brim.planning.inference.memory import Sizes
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.inference.proof import check_promise, proved, taken, told
from brim.planning.solver import Job
from brim.techniques.blocks import Partition
from brim.techniques.experts.router_statistics import RouterStatistics
from brim.techniques.experts.technique import EXPERT_SLOTS
from brim.techniques.experts.technique import NAME as EXPERTS
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import RING_SLOTS, Weights
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.planning.inference.device_memory import DeviceMemory

# A plan's settings, beside those of weight streaming.
BATCH, PROMPT_TOKENS, TOTAL_TOKENS, CHUNK_TOKENS = "batch", "prompt_tokens", "total_tokens", "prefill_chunk"
_CHUNK_STEPS = 16  # the largest chunk that fits is found to a sixteenth of the prompt
_WORTH_TOKENS = 256  # prompts are not cut into less than this for the sake of a larger batch: each chunk is a pass
_PROOFS = 8  # plans that are tried, each in less than the one before
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be generated at most. ``batch`` and ``chunk`` None: as many sequences, as much at once, as fit.

    ``lengths``: tokens of each prompt. ``drawn``: tokens are drawn. ``continued``: turns of one conversation, each of
    which has a mask over those before it. ``host_compute``: the processor beside a GPU may compute blocks.
    """

    lengths: tuple[int, ...]
    new_tokens: int
    batch: int | None = 1
    chunk: int | None = None
    drawn: bool = False
    continued: bool = False
    host_compute: bool = True

    def padded(self, batch: int) -> bool:
        """Whether prompts of several lengths meet in a batch."""
        groups = [self.lengths[first : first + batch] for first in range(0, len(self.lengths), batch)]
        return self.continued or any(len(set(group)) > 1 for group in groups)


class KnownCuts:
    """The ways to cut a model, coarse ones first: each is looked for when somebody asks, and once."""

    def __init__(self, found: Iterator[Cut]) -> None:
        self._rest, self._known = found, list[Cut]()

    def __iter__(self) -> Iterator[Cut]:
        index = 0
        while True:
            if index == len(self._known):
                found = next(self._rest, None)
                if found is None:
                    return
                self._known.append(found)
            yield self._known[index]
            index += 1


@dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """What is to be generated, where, and what is known of it.

    ``shape`` None: the model keeps its own cache. ``watch`` makes the passes of some sizes on fake tensors.
    ``spent_bytes``: what the program takes per tier beside tensors, asked once a pass was watched, as that leaves
    something behind. ``routers``: what those of a mixture of experts were seen to do. ``called``: a program calls
    the model, not ``generate``.
    """

    name: str
    module: nn.Module
    weights: Weights
    hardware: Hardware
    budget_bytes: Mapping[str, int]
    wanted: Wanted
    shape: kv_cache.CacheShape | None
    watch: Callable[[Sizes], Observation]
    spent_bytes: Callable[[], Mapping[str, int]]
    seconds: PassSeconds
    routers: Mapping[str, RouterStatistics] = field(default_factory=dict)
    called: bool = False

    @cached_property
    def device_memory(self) -> DeviceMemory | None:
        """What foresees what PyTorch's allocator will reserve; None where the GPU is not the one that is here."""
        # For a GPU of the catalog the sum of pools and activations has to do: a table of many proposals would need a
        # trace of each.
        if self.hardware.compute != VRAM or not self.seconds.is_here:
            return None
        from brim.planning.inference.device_memory import DeviceMemory  # traces and simulates: elsewhere not needed

        return DeviceMemory(self.module, self.hardware, self.weights)

    @cached_property
    def prompt(self) -> int:
        return max(self.wanted.lengths)

    @cached_property
    def stay(self) -> frozenset[str]:
        """Of a model in files, what transformers computes: it has no file to be streamed from."""
        names = (name for name, _ in self.module.named_parameters())
        return frozenset(name for name in names if self.weights.sources and name not in self.weights.sources)

    def sizes(self, batch: int, chunk: int) -> Sizes:
        wanted = self.wanted
        total, padded = self.prompt + wanted.new_tokens, wanted.padded(batch)
        return Sizes(batch=batch, prompt=self.prompt, total=total, chunk=chunk, padded=padded, drawn=wanted.drawn)

    def placement(self, sizes: Sizes, resting: int) -> kv_cache.Placement | None:
        return None if self.shape is None else sizes.placement(self.shape, resting)

    def job(self, cut: Cut, need: Need) -> Job:
        return job_of(self.module, cut, self.hardware, need, self.weights, "generate")


@dataclass(frozen=True, kw_only=True)
class GenerationStrategy:
    """A way to generate that fits, proved, and all that its promise was made from.

    ``shape`` None: the model keeps its own cache. ``need`` and ``job`` are of a token's pass, ``prompt_job`` is of
    one that takes the prompt, or a chunk of it.
    """

    sizes: Sizes
    resting: int
    shape: kv_cache.CacheShape | None
    cut: Cut
    plan: Plan
    hardware: Hardware
    need: Need
    job: Job
    prompt_job: Job
    cuts: KnownCuts  # all that were chosen from

    @property
    def partition(self) -> Partition:
        return self.cut.partition

    @property
    def placement(self) -> kv_cache.Placement | None:
        """Of the KV cache, where that is planned."""
        return None if kept_by_model(self.plan) else self._cache_placement

    @property
    def cache_bytes(self) -> Mapping[str, int]:
        """What the KV cache takes in each tier, whoever keeps it; nothing where it counts as activations.

        All of it counts in the compute tier where the processor computes blocks, though their part is in RAM.
        """
        return {} if self._cache_placement is None else self._cache_placement.held_bytes(self.hardware.compute)

    @property
    def _cache_placement(self) -> kv_cache.Placement | None:
        return None if self.shape is None else self.sizes.placement(self.shape, self.resting)


def search_generation(case: GenerationCase) -> GenerationStrategy:
    """The largest batch, with it the largest part of a prompt, and of those the fastest placement, proved to fit.

    Raises BudgetError, with the smallest budget, when nothing fits.
    """
    return GenerationSearch(case).run()


def follow(case: GenerationCase, fixed: Plan) -> GenerationStrategy:
    """Exactly ``fixed``, made for this model. Raises UsageError where it has no room for the prompts."""
    return GenerationSearch(case).follow(fixed)


class GenerationSearch:
    """Tries sizes, largest first, until one fits."""

    def __init__(self, case: GenerationCase) -> None:
        self.case = case
        self._seen: dict[Sizes, Observation] = {}
        self._tried: dict[tuple[Sizes, int], GenerationStrategy] = {}  # batches and chunks are searched in turn
        self._cuts: KnownCuts | None = None

    def run(self) -> GenerationStrategy:
        """Where the GPU is here, what its allocator will reserve stays within the budget as well."""
        case, memory = self.case, self.case.device_memory
        if memory is None:
            return self._run()
        budget = case.budget_bytes
        try:
            return self._within(budget, memory)
        except BudgetError as error:
            strategy = found_with_more(lambda more: self._within(more, memory), budget, error)
            peaks = strategy.plan.promise.peak_bytes
            smallest = {tier: count for tier, count in peaks.items() if count > budget.get(tier, count)}
            if not smallest:
                return _promising(strategy, peaks[VRAM], budget)
            raise BudgetError(
                f"Cannot run {case.name} in {told(budget)}.",
                f"The smallest plan takes {told(smallest)}, including what PyTorch and cuBLAS hold.",
                f"Give {told(smallest)} or more, or a shorter input.",
                smallest_bytes=smallest,
            ) from error

    def _within(self, budget: Mapping[str, int], memory: DeviceMemory) -> GenerationStrategy:
        """As long as its allocator would reserve more of the GPU than there is, the next plan has less."""
        spare = 0
        for _ in range(_PROOFS):
            search = self._with_budget({**budget, VRAM: max(0, budget[VRAM] - spare)})
            try:
                strategy = search._run()
            except BudgetError as error:
                if spare and VRAM in error.smallest_bytes:
                    error.smallest_bytes[VRAM] += spare
                raise
            reserved = search._reserved_bytes(memory, strategy, budget[VRAM])
            if reserved <= budget[VRAM]:
                return _promising(strategy, reserved, budget)
            spare += round_up(reserved - budget[VRAM], SMALL_SEGMENT_BYTES)
        raise BudgetError(
            f"Cannot run {self.case.name} in {told(budget)}.",
            f"{_PROOFS} plans were tried; of the last one PyTorch would reserve {format_bytes(reserved)}.",
            f"Give {format_bytes(reserved)} of VRAM or more.",
            smallest_bytes={VRAM: reserved},
        )

    def _reserved_bytes(self, memory: DeviceMemory, strategy: GenerationStrategy, vram_bytes: int) -> int:
        from brim.planning.inference.device_memory import Passes

        called = self.case.called
        passes = Passes(sizes=strategy.sizes, placement=strategy.placement, called=called)
        # A run has the process to itself and is held to its budget; a program that calls the model is not.
        limit_bytes = None if called else vram_bytes
        return memory.reserved_bytes(strategy.partition, strategy.plan, passes, limit_bytes)

    def _with_budget(self, budget: Mapping[str, int]) -> GenerationSearch:
        """The same search in another budget."""
        if budget == self.case.budget_bytes:
            return self
        case = replace(self.case, budget_bytes=budget, spent_bytes=lambda: self._spent_bytes)
        other = GenerationSearch(case)
        other._seen, other._cuts = self._seen, self._cuts
        return other

    def _run(self) -> GenerationStrategy:
        wanted = self.case.wanted
        batch = wanted.batch or _largest(len(wanted.lengths), 1, self._with_short_chunks).sizes.batch
        return self._with_batch(min(batch, len(wanted.lengths)), self._with_chunks)

    # -- sizes

    def _with_short_chunks(self, batch: int) -> GenerationStrategy:
        case = self.case
        least = min(case.prompt, max(_WORTH_TOKENS, case.prompt // _CHUNK_STEPS))
        if batch == 1 or case.wanted.chunk is not None or not self._divisible:
            return self._with_batch(batch, self._with_chunks)
        return self._with_batch(batch, lambda _, resting: self._placed(case.sizes(batch, least), resting))

    @property
    def _divisible(self) -> bool:
        return self.case.shape is not None and self.case.shape.only_attention

    def _with_batch(self, batch: int, attempt: Callable[[int, int], GenerationStrategy]) -> GenerationStrategy:
        """All of the cache in the compute tier, if ``attempt`` lets it; else, beside a GPU, as little as needed in
        RAM. The first that fits is taken: a token in RAM comes over the link in every pass, as a weight does."""
        case, resting_token_choices = self.case, [0]
        if case.hardware.compute != RAM and case.shape is not None:
            resting_token_choices += kv_cache.resting_token_choices(case.shape, case.sizes(batch, case.prompt).cached)
        refusals = []
        for resting in resting_token_choices:
            try:
                return attempt(batch, resting)
            except BudgetError as error:
                refusals.append(error)
        raise min(refusals, key=lambda error: sum(error.smallest_bytes.values()))

    def _with_chunks(self, batch: int, resting: int) -> GenerationStrategy:
        """As much of a prompt at once as was asked for, or as fits."""
        case, prompt, asked = self.case, self.case.prompt, self.case.wanted.chunk
        if asked is not None and asked < prompt and not self._divisible:
            raise UnsupportedError(
                f"Cannot process the prompt with {case.name} in chunks of {asked} tokens.",
                "Its cache holds more than attention, and cannot be continued in the middle of a prompt.",
                "Leave out --prefill-chunk.",
            )
        if asked is not None or not self._divisible:
            return self._placed(case.sizes(batch, min(asked or prompt, prompt)), resting)
        step = max(1, prompt // _CHUNK_STEPS)
        return _largest(prompt, step, lambda chunk: self._placed(case.sizes(batch, chunk), resting))

    # -- what passes of some sizes need

    def need(self, sizes: Sizes, resting: int, *, prompt: bool = False) -> Need:
        """For a token's pass, or for one with the prompt."""
        case, placement = self.case, self.case.placement(sizes, resting)
        held_bytes = placement.held_bytes(case.hardware.compute) if placement else {}
        seen = self.seen(sizes)
        in_ram = held_bytes.get(RAM, 0) if case.hardware.compute != RAM else 0
        plain = Need(
            step_bytes=seen.step_bytes + held_bytes.get(case.hardware.compute, 0),
            observation=seen,
            tokens=sizes.batch,
            stay=case.stay,
            spent_bytes={**self._spent_bytes, RAM: self._spent_bytes[RAM] + in_ram},
            routers=case.routers,
        )
        cache_bytes = joined_bytes = 0
        if case.shape is not None and case.shape.planned:
            tokens = sizes.batch * sizes.total
            cache_bytes = tokens * max(layer.token_bytes for _, layer in case.shape.planned)
            joined_bytes = tokens * max(layer.joined_bytes for _, layer in case.shape.planned)
        paced = case.seconds.paced(
            plain, sizes, self.cuts(plain), cache_bytes=cache_bytes, joined_bytes=joined_bytes, prompt=prompt
        )
        # Tokens rest in RAM by the planned cache, which there is not where the processor computes blocks.
        return replace(paced, cpu_seconds=None) if resting else paced

    def seen(self, sizes: Sizes) -> Observation:
        if sizes not in self._seen:
            self._seen[sizes] = self.case.watch(sizes)
        return self._seen[sizes]

    @cached_property
    def _spent_bytes(self) -> Mapping[str, int]:
        return self.case.spent_bytes()

    def cuts(self, need: Need) -> KnownCuts:
        """Who reads which parameter, which is all of ``need`` that they depend on, is the same for all sizes."""
        if self._cuts is None:
            case = self.case
            self._cuts = KnownCuts(cuts(case.module, case.hardware, need, case.weights, "generate"))
        return self._cuts

    # -- placements

    def _placed(self, sizes: Sizes, resting: int) -> GenerationStrategy:
        if (sizes, resting) not in self._tried:
            self._tried[sizes, resting] = self._proved(sizes, resting)
        return self._tried[sizes, resting]

    def _proved(self, sizes: Sizes, resting: int) -> GenerationStrategy:
        case, need = self.case, self.need(sizes, resting)

        def attempt(budget: Mapping[str, int]) -> tuple[Cut, Plan]:
            jobs = ((cut, case.job(cut, need)) for cut in self.cuts(need))
            return best_plan(jobs, case.hardware, budget, tokens=need.tokens)

        def takes(cut: Cut, plan: Plan) -> Mapping[str, int]:
            return taken(case.module, cut, plan, case.job(cut, need), case.hardware, case.weights)

        cut, plan = proved(case.name, case.budget_bytes, attempt, takes)
        return self._strategy(sizes, resting, cut, self._with_cache(plan, sizes, resting), need)

    def _strategy(self, sizes: Sizes, resting: int, cut: Cut, plan: Plan, need: Need) -> GenerationStrategy:
        prompt_job = self.case.job(cut, self.need(sizes, resting, prompt=True))
        return GenerationStrategy(
            sizes=sizes,
            resting=resting,
            shape=self.case.shape,
            cut=cut,
            plan=plan,
            hardware=self.case.hardware,
            need=need,
            job=self.case.job(cut, need),
            prompt_job=prompt_job,
            cuts=self.cuts(need),
        )

    def _with_cache(self, plan: Plan, sizes: Sizes, resting: int) -> Plan:
        """``plan`` with the sizes and the KV cache in it."""
        settings = {
            **plan.settings,
            BATCH: sizes.batch,
            PROMPT_TOKENS: sizes.prompt,
            TOTAL_TOKENS: sizes.total,
            CHUNK_TOKENS: sizes.chunk,
        }
        plan = replace(plan, model=self.case.name, settings=settings)
        placement = self.case.placement(sizes, resting)
        if placement is None or not placement.shape.planned or kept_by_model(plan):
            return plan
        choice = kv_cache.OLDER_IN_RAM if resting else kv_cache.RESIDENT
        held = placement.shape.token_bytes * placement.batch * placement.tokens
        decision = Decision(technique=kv_cache.NAME, block="", choice=choice, bytes=held)
        promise, compute = plan.promise, self.case.hardware.compute
        if resting:
            took_s = older_tokens_s(placement, self.case.hardware)
            same = promise.limited_by == f"{RAM} -> {compute}"
            promise = replace(
                promise, step_s=promise.step_s + took_s, bound_s=promise.bound_s + (took_s if same else 0.0)
            )
        settings[kv_cache.RESTING_TOKENS] = resting
        return replace(plan, decisions=(*plan.decisions, decision), promise=promise, settings=settings)

    # -- a plan that is given

    def follow(self, fixed: Plan) -> GenerationStrategy:
        """Exactly ``fixed``, made for this model. Raises UsageError where it has no room for the prompts."""
        case, settings, wanted = self.case, fixed.settings, self.case.wanted
        batch, prompt = settings.get(BATCH, 1), settings.get(PROMPT_TOKENS, case.prompt)
        total = settings.get(TOTAL_TOKENS, prompt + wanted.new_tokens)
        if case.prompt > prompt or case.prompt + wanted.new_tokens > total:
            raise UsageError(
                f"Cannot use the plan for {case.prompt} prompt tokens and {wanted.new_tokens} new ones.",
                f"It has room for a prompt of {prompt} tokens, and {total} in all.",
                f"Make a plan for this case: brim plan --seq {case.prompt} --new-tokens {wanted.new_tokens}.",
            )
        chunk, padded = settings.get(CHUNK_TOKENS, prompt), wanted.padded(batch)
        sizes = Sizes(batch=batch, prompt=prompt, total=total, chunk=chunk, padded=padded, drawn=wanted.drawn)
        resting = settings.get(kv_cache.RESTING_TOKENS, 0)
        need = self.need(sizes, resting)
        cut = cut_of(fixed, self.cuts(need))
        if cut is None:
            count = len(fixed.choices(STREAMING)) + len(fixed.choices(EXPERTS))
            raise UsageError(
                f"Cannot use the plan for {fixed.model}.",
                f"It has {count} blocks, and this model cannot be cut into those.",
                "Make a new one: brim plan MODEL ... --output FILE.",
            )
        known = {RING_SLOTS: 0, BATCH: batch, PROMPT_TOKENS: prompt, TOTAL_TOKENS: total, **settings}
        fixed = self._with_more(replace(fixed, settings=known), sizes, need.step_bytes)
        strategy = self._strategy(sizes, resting, cut, fixed, need)
        choices = fixed.choices(STREAMING)
        passing = [b.name for b in strategy.job.blocks if b.uses and choices.get(b.name) in (FROM_RAM, FROM_DISK)]
        if passing and not known[RING_SLOTS]:
            raise UsageError(
                f"Cannot use the plan for {fixed.model}.",
                f"It streams {len(passing)} blocks and has no slots to stream them through.",
                "Make a new one: brim plan MODEL ... --output FILE.",
            )
        if not fixed.choices(EXPERTS):
            takes = taken(case.module, cut, fixed, strategy.job, case.hardware, case.weights)
            check_promise(fixed, takes, strategy.job.spent_bytes)
        return self._held(strategy)

    def _held(self, strategy: GenerationStrategy) -> GenerationStrategy:
        """A plan that was made elsewhere, or by another PyTorch, promises what the allocator here will reserve."""
        memory, plan = self.case.device_memory, strategy.plan
        if memory is None:
            return strategy
        budget_bytes = plan.budget_bytes[VRAM]
        reserved = self._reserved_bytes(memory, strategy, budget_bytes)
        if reserved > budget_bytes:
            raise BudgetError(
                f"Cannot use the plan for {plan.model} on this GPU.",
                f"PyTorch would reserve {format_bytes(reserved)} of VRAM, of {format_bytes(budget_bytes)}.",
                "Make a new one on this machine: brim plan MODEL ... --output FILE.",
                smallest_bytes={VRAM: reserved},
            )
        return _promising(strategy, reserved, plan.budget_bytes)

    def _with_more(self, fixed: Plan, sizes: Sizes, step_bytes: int) -> Plan:
        """``fixed`` with what drawing and prompts of several lengths take more: it was made without them."""
        if not sizes.padded and not sizes.drawn:
            return fixed
        plain = self.case.watch(replace(sizes, padded=False, drawn=False))
        tier, peak = self.case.hardware.compute, dict(fixed.promise.peak_bytes)
        placement = self.case.placement(sizes, fixed.settings.get(kv_cache.RESTING_TOKENS, 0))
        held = placement.held_bytes(tier).get(tier, 0) if placement else 0
        peak[tier] += max(0, step_bytes - held - plain.step_bytes)
        if peak[tier] > fixed.budget_bytes[tier]:
            raise BudgetError(
                f"Cannot use the plan for {fixed.model} for prompts of several lengths, or to sample tokens.",
                f"That takes {format_bytes(peak[tier] - fixed.budget_bytes[tier])} more than its budget.",
                "Give prompts of one length at a time, generate greedily, or make a plan with a smaller --batch.",
                smallest_bytes={tier: peak[tier]},
            )
        return replace(fixed, promise=replace(fixed.promise, peak_bytes=peak))


def _promising(strategy: GenerationStrategy, vram_bytes: int, budget_bytes: Mapping[str, int]) -> GenerationStrategy:
    """``strategy``, in that budget, with a promise of no less than ``vram_bytes`` of VRAM."""
    peak = dict(strategy.plan.promise.peak_bytes)
    peak[VRAM] = max(vram_bytes, peak.get(VRAM, 0))
    promise = replace(strategy.plan.promise, peak_bytes=peak)
    return replace(strategy, plan=replace(strategy.plan, promise=promise, budget_bytes=dict(budget_bytes)))


def kept_by_model(plan: Plan) -> bool:
    """Whether the model keeps its own KV cache: that of blocks which the processor computes has to be in RAM."""
    return COMPUTE_RAM in plan.choices(STREAMING).values()


def older_tokens_s(placement: kv_cache.Placement, hardware: Hardware) -> float:
    """Seconds in which the part of the KV cache that rests in RAM comes over the link, in each pass.

    They are counted as if nothing hid them: streamed blocks come over the same link.
    """
    return placement.moved_bytes / hardware.link(RAM, hardware.compute).bytes_per_s


def cut_of(plan: Plan, cuts: Iterable[Cut]) -> Cut | None:
    """The one that ``plan`` speaks of: its blocks, with as many slots for the same experts."""
    blocks, experts = list(plan.choices(STREAMING)), plan.choices(EXPERTS)
    for cut in cuts:
        cached = set() if cut.way is None else {each.layer.path for each in cut.way.layers}
        if cached == set(experts) and [block.name for block in cut.partition.blocks] == blocks:
            if cut.way is None:
                return cut
            choice, slots = next(iter(experts.values())), plan.settings[EXPERT_SLOTS]
            return replace(cut, way=replace(cut.way, choice=choice, slots=slots))
    return None


def _largest(most: int, step: int, attempt: Callable[[int], T]) -> T:
    """What ``attempt`` gives for the largest number up to ``most`` that it does not refuse, to within ``step``.

    What fits a number fits every smaller one. Raises the BudgetError of the smallest where none fits.
    """
    try:
        return attempt(most)
    except BudgetError:
        if most == 1:
            raise
    least = min(step, most - 1)
    fits, best = least, attempt(least)
    refused = most
    while refused - fits > step:
        middle = (fits + refused) // 2
        try:
            fits, best = middle, attempt(middle)
        except BudgetError:
            refused = middle
    return best


__all__ = ["GenerationCase", "GenerationStrategy", "Wanted", "follow", "search_generation"]
