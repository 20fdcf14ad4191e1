"""Choose a generation strategy: batch size, prompt chunk, the KV cache's tiers and each block's placement.

``brim generate``, ``brim.load`` and ``brim plan`` all call ``search_generation``. Their ``GenerationCase`` differs in
the observed passes, the seconds of blocks and the program's own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from brim.core import Decision, Hardware, Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.step_memory import TOKEN, Inputs, Observation
from brim.planning.inference.choosing import Cut, InferenceCase, KnownCuts, Need, Placed, within_reserved
from brim.planning.inference.machine import has_cuda
from brim.planning.inference.memory import Sizes
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.proof import check_promise, largest_fitting, raise_promise, search
from brim.planning.solver import Job
from brim.planning.solver.passes import pass_s
from brim.techniques.decoding_graphs import GRAPH_BYTES, graph_bytes
from brim.techniques.experts.technique import EXPERT_SLOTS
from brim.techniques.experts.technique import NAME as EXPERTS
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import RING_SLOTS
from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.planning.inference.device_memory import DeviceMemory

# A plan's settings, beside those of weight streaming.
BATCH, PROMPT_TOKENS, TOTAL_TOKENS, CHUNK_TOKENS = "batch", "prompt_tokens", "total_tokens", "prefill_chunk"
_PLAIN_TOKENS = 5  # of each generation, by passes of kernels: graphs are captured and compared meanwhile
_GRAPHS_SHARE = 10  # graphs may keep a tenth of VRAM from weights, which are then moved for each token
_CHUNK_STEPS = 16  # the largest chunk that fits is searched to a sixteenth of the prompt
_WORTH_TOKENS = 256  # the least tokens of a chunk for a larger batch, as each chunk costs a pass


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The largest generation to plan for. ``batch`` and ``chunk`` None: as many sequences and tokens at once as fit.

    ``lengths``: tokens of each prompt. ``drawn``: tokens are sampled. ``continued``: turns of a conversation, each
    with a mask over those before it. ``host_compute``: the processor beside a GPU may compute blocks. ``graphs``: a
    GPU may decode by CUDA graphs.
    """

    lengths: tuple[int, ...]
    new_tokens: int
    batch: int | None = 1
    chunk: int | None = None
    drawn: bool = False
    continued: bool = False
    host_compute: bool = True
    graphs: bool = True

    @classmethod
    def of(cls, inputs: Inputs, *, host_compute: bool = True, graphs: bool = True) -> GenerationRequest:
        """Return the request of a step's largest inputs."""
        lengths, new_tokens = (inputs.prompt,) * inputs.batch, inputs.total - inputs.prompt
        return cls(
            lengths=lengths, new_tokens=new_tokens, batch=inputs.batch, host_compute=host_compute, graphs=graphs
        )

    def padded(self, batch: int) -> bool:
        """Return True where a batch has prompts of several lengths."""
        groups = [self.lengths[first : first + batch] for first in range(0, len(self.lengths), batch)]
        return self.continued or any(len(set(group)) > 1 for group in groups)


@dataclass(frozen=True, kw_only=True)
class GenerationCase(InferenceCase):
    """A generation to plan.

    ``shape`` None: the model keeps its own cache. ``watch`` runs the passes of some sizes on fake tensors.
    ``spent_bytes`` returns the program's bytes per tier beside tensors; it is called after a pass was observed, as
    that leaves memory behind. ``called``: a program calls the model itself, not ``generate``. Cuts of the kinds in
    ``without`` are not used.
    """

    task: ClassVar[str] = "generate"
    request: GenerationRequest
    shape: kv_cache.CacheShape | None
    watch: Callable[[Sizes], Observation]
    spent_bytes: Callable[[], Mapping[str, int]]
    seconds: PassSeconds
    called: bool = False
    without: frozenset[tuple[int, bool]] = frozenset()

    def cuts(self, need: Need) -> KnownCuts:
        return KnownCuts(cut for cut in super().cuts(need) if cut.kind not in self.without)

    @cached_property
    def device_memory(self) -> DeviceMemory | None:
        """The predictor of the bytes that PyTorch's allocator reserves; None where the GPU is not this machine's."""
        # For a GPU of the catalog the sum of pools and activations must do: a table of many proposals would need a
        # trace of each.
        if self.hardware.compute != VRAM or not self.seconds.is_here:
            return None
        from brim.planning.inference.device_memory import DeviceMemory  # traces and simulates: elsewhere not needed

        return DeviceMemory(self.module, self.hardware, self.weights)

    @cached_property
    def prompt(self) -> int:
        return max(self.request.lengths)

    @cached_property
    def stay(self) -> frozenset[str]:
        """Parameters of a model in files that transformers computes: they cannot be streamed from a file."""
        names = (name for name, _ in self.module.named_parameters())
        return frozenset(name for name in names if self.weights.sources and name not in self.weights.sources)

    def sizes(self, batch: int, chunk: int) -> Sizes:
        request = self.request
        total, padded = self.prompt + request.new_tokens, request.padded(batch)
        return Sizes(batch=batch, prompt=self.prompt, total=total, chunk=chunk, padded=padded, drawn=request.drawn)

    def placement(self, sizes: Sizes, resting: int) -> kv_cache.Placement | None:
        return None if self.shape is None else sizes.placement(self.shape, resting)


@dataclass(frozen=True, kw_only=True)
class GenerationStrategy(Placed):
    """A proved generation strategy, and the inputs of its promise.

    ``shape`` None: the model keeps its own cache. ``need`` and ``job`` are a token pass's, ``prompt_job`` that of a
    pass over the prompt, or a chunk of it.
    """

    sizes: Sizes
    resting: int
    shape: kv_cache.CacheShape | None
    hardware: Hardware
    need: Need
    job: Job
    prompt_job: Job
    cuts: KnownCuts  # all candidates

    @property
    def placement(self) -> kv_cache.Placement | None:
        """The KV cache's placement; None where the model keeps its own."""
        return None if kept_by_model(self.plan) else self._cache_placement

    @property
    def cache_bytes(self) -> Mapping[str, int]:
        """Bytes of the planned or the model's own KV cache per tier; empty where it counts as activations.

        Where the processor computes blocks, their part is in RAM but counts in the compute tier.
        """
        return {} if self._cache_placement is None else self._cache_placement.held_bytes(self.hardware.compute)

    @property
    def _cache_placement(self) -> kv_cache.Placement | None:
        return None if self.shape is None else self.sizes.placement(self.shape, self.resting)


def search_generation(case: GenerationCase) -> GenerationStrategy:
    """Find the largest batch, then the fewest resting tokens, the largest prompt chunk and the fastest placement.

    Raises BudgetError, with the smallest budget, when nothing fits.
    """
    return GenerationSearch(case).run()


def follow(case: GenerationCase, fixed: Plan) -> GenerationStrategy:
    """Return the strategy of the given plan. Raises UsageError where it has no room for the prompts."""
    return GenerationSearch(case).follow(fixed)


def with_graphs(plan: Plan, graphs_bytes: int, promised_bytes: int = 0) -> Plan:
    """Decode by CUDA graphs where the budget has room for their bytes, of which some may be promised already."""
    settings = {name: count for name, count in plan.settings.items() if name != GRAPH_BYTES}  # of a given plan
    promised = plan.promise.peak_bytes.get(VRAM, 0) + graphs_bytes - promised_bytes
    if graphs_bytes and promised <= plan.budget_bytes[VRAM]:
        settings[GRAPH_BYTES] = graphs_bytes
        plan = raise_promise(plan, {VRAM: promised}, plan.budget_bytes)
    return replace(plan, settings=settings)


class GenerationSearch:
    """Try sizes, largest first, until one fits. ``graphs``: CUDA graphs generate the tokens."""

    def __init__(self, case: GenerationCase, *, graphs: bool = False) -> None:
        self.case, self._graphs = case, graphs
        self._seen: dict[Sizes, Observation] = {}
        self._tried: dict[tuple[Sizes, int], GenerationStrategy] = {}  # batches and chunks are searched in turn
        self._cuts: KnownCuts | None = None

    def run(self) -> GenerationStrategy:
        """Search without CUDA graphs; then with them, if the first plan's tokens can be generated by them. The second
        plan is returned if it is no slower, and has no smaller batch.
        """
        plain = self._in_budget()
        if not self._graph_bytes(plain):
            return plain
        self._graphs = True
        self._tried.clear()
        with suppress(BudgetError):
            strategy = self._in_budget()
            plain_s = plain.plan.promise.step_s + self.case.seconds.loop_s(plain.sizes)
            no_slower = strategy.plan.promise.step_s <= plain_s
            if GRAPH_BYTES in strategy.plan.settings and no_slower and strategy.sizes.batch >= plain.sizes.batch:
                return strategy
        return plain

    def _in_budget(self) -> GenerationStrategy:
        """Search; on this machine's GPU the budget also covers all bytes that the allocator reserves."""
        memory = self.case.device_memory
        if memory is None and not self._graphs:
            return self._run()
        most_bytes = self.case.budget_bytes[VRAM] // _GRAPHS_SHARE

        def graphs(strategy: GenerationStrategy) -> int:
            takes = self._graph_bytes(strategy) if self._graphs else 0
            return takes if takes <= most_bytes else 0

        def takes(strategy: GenerationStrategy, vram_bytes: int) -> int:
            promised = strategy.plan.promise.peak_bytes[VRAM]
            reserved = self._reserved_bytes(memory, strategy, vram_bytes) if memory else promised
            return reserved + graphs(strategy)

        strategy = within_reserved(self.case, lambda budget: self._with_budget(budget)._run(), takes)
        return self._with_graphs(strategy, graphs(strategy)) if self._graphs else strategy

    def _graph_bytes(self, strategy: GenerationStrategy) -> int:
        """Return what CUDA graphs take; 0 where they are not used, as the CPU computes, or experts are cached."""
        plan, sizes, placement = strategy.plan, strategy.sizes, strategy.placement
        moved = set(plan.choices(STREAMING).values()) <= {RESIDENT, FROM_RAM, FROM_DISK}
        if not (moved and self._has_graphs(sizes)) or strategy.resting or plan.choices(EXPERTS):
            return 0
        planned = placement is not None and bool(placement.shape.planned)
        return graph_bytes(self.case.module, sizes.batch, sizes.cached, planned=planned)

    def _has_graphs(self, sizes: Sizes) -> bool:
        """Return whether graphs can generate tokens, as far as is known before a run."""
        case = self.case
        if not (case.request.graphs and has_cuda(case.hardware)) or sizes.total - sizes.prompt <= _PLAIN_TOKENS:
            return False
        if case.called:  # the run says what it cannot capture
            return True
        # LLM.int8's layers wait for the number of outliers in their inputs.
        rounds_inputs = any(name.endswith(".SCB") for name, _ in case.module.named_parameters())
        waits = rounds_inputs or TOKEN in self.seen(sizes).waits
        return case.shape is not None and case.shape.only_attention and not waits

    def _with_graphs(self, strategy: GenerationStrategy, promised_bytes: int = 0) -> GenerationStrategy:
        """Decode by CUDA graphs where the budget has room for them, too; ``promised_bytes`` of it already."""
        return replace(strategy, plan=with_graphs(strategy.plan, self._graph_bytes(strategy), promised_bytes))

    def _reserved_bytes(self, memory: DeviceMemory, strategy: GenerationStrategy, vram_bytes: int) -> int:
        from brim.planning.inference.device_memory import Passes

        called = self.case.called
        passes = Passes(sizes=strategy.sizes, placement=strategy.placement, called=called)
        # A run of brim limits the allocator to the budget; a program that calls the model does not.
        limit_bytes = None if called else vram_bytes
        return memory.reserved_bytes(strategy.partition, strategy.plan, passes, limit_bytes)

    def _with_budget(self, budget: Mapping[str, int]) -> GenerationSearch:
        """Return this search in another budget."""
        if budget == self.case.budget_bytes:
            return self
        case = replace(self.case, budget_bytes=budget, spent_bytes=lambda: self._spent_bytes)
        other = GenerationSearch(case, graphs=self._graphs)
        other._seen, other._cuts = self._seen, self._cuts
        return other

    def _run(self) -> GenerationStrategy:
        request = self.case.request
        batch = request.batch or largest_fitting(len(request.lengths), 1, self._with_short_chunks).sizes.batch
        return self._with_batch(min(batch, len(request.lengths)), self._with_chunks)

    # -- sizes

    def _with_short_chunks(self, batch: int) -> GenerationStrategy:
        case = self.case
        least = min(case.prompt, max(_WORTH_TOKENS, case.prompt // _CHUNK_STEPS))
        if batch == 1 or case.request.chunk is not None or not self._divisible:
            return self._with_batch(batch, self._with_chunks)
        return self._with_batch(batch, lambda _, resting: self._placed(case.sizes(batch, least), resting))

    @property
    def _divisible(self) -> bool:
        return self.case.shape is not None and self.case.shape.only_attention

    def _with_batch(self, batch: int, attempt: Callable[[int, int], GenerationStrategy]) -> GenerationStrategy:
        """Return the first ``attempt`` that fits, with the fewest KV tokens in RAM: each costs a copy per pass."""
        case, resting_token_choices = self.case, [0]
        if case.hardware.compute != RAM and case.shape is not None:
            resting_token_choices += kv_cache.resting_token_choices(case.shape, case.sizes(batch, case.prompt).cached)
        return search(resting_token_choices, lambda resting: attempt(batch, resting), most=1)[0]

    def _with_chunks(self, batch: int, resting: int) -> GenerationStrategy:
        """Use the given prompt chunk, or the largest that fits."""
        case, prompt, asked = self.case, self.case.prompt, self.case.request.chunk
        if asked is not None and asked < prompt and not self._divisible:
            raise UnsupportedError(
                f"Cannot process the prompt with {case.name} in chunks of {asked} tokens.",
                "Its cache holds more than keys and values, so a prompt cannot be divided.",
                "Leave out --prefill-chunk.",
            )
        if asked is not None or not self._divisible:
            return self._placed(case.sizes(batch, min(asked or prompt, prompt)), resting)
        step = max(1, prompt // _CHUNK_STEPS)
        return largest_fitting(prompt, step, lambda chunk: self._placed(case.sizes(batch, chunk), resting))

    # -- the needs of passes

    def need(self, sizes: Sizes, resting: int, *, prompt: bool = False) -> Need:
        """Return the need of a token's pass, or of the prompt's."""
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
        )
        cache_bytes = joined_bytes = 0
        if case.shape is not None and case.shape.planned:
            tokens = sizes.batch * sizes.total
            cache_bytes = tokens * max(layer.token_bytes for _, layer in case.shape.planned)
            joined_bytes = tokens * max(layer.joined_bytes for _, layer in case.shape.planned)
        paced = case.seconds.paced(
            plain,
            sizes,
            self.cuts(plain),
            cache_bytes=cache_bytes,
            joined_bytes=joined_bytes,
            prompt=prompt,
            graphs=self._graphs,
        )
        # Only the planned cache keeps tokens in RAM, and it is not used where the processor computes blocks.
        return replace(paced, cpu_seconds=None) if resting else paced

    def seen(self, sizes: Sizes) -> Observation:
        if sizes not in self._seen:
            self._seen[sizes] = self.case.watch(sizes)
        return self._seen[sizes]

    @cached_property
    def _spent_bytes(self) -> Mapping[str, int]:
        return self.case.spent_bytes()

    def cuts(self, need: Need) -> KnownCuts:
        """Return the cuts; they depend on the modules that read each parameter, which are equal for all sizes."""
        if self._cuts is None:
            self._cuts = self.case.cuts(need)
        return self._cuts

    # -- placements

    def _placed(self, sizes: Sizes, resting: int) -> GenerationStrategy:
        if (sizes, resting) not in self._tried:
            self._tried[sizes, resting] = self._proved(sizes, resting)
        return self._tried[sizes, resting]

    def _proved(self, sizes: Sizes, resting: int) -> GenerationStrategy:
        need = self.need(sizes, resting)
        placed = self.case.place(need, self.cuts(need))
        return self._strategy(sizes, resting, placed.cut, self._with_cache(placed.plan, sizes, resting), need)

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
        """Add the sizes and the KV cache to ``plan``."""
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

    # -- a given plan

    def follow(self, fixed: Plan) -> GenerationStrategy:
        """Return the strategy of the given plan. Raises UsageError where it has no room for the prompts."""
        case, settings, request = self.case, fixed.settings, self.case.request
        self._graphs = GRAPH_BYTES in settings and request.graphs
        batch, prompt = settings.get(BATCH, 1), settings.get(PROMPT_TOKENS, case.prompt)
        total = settings.get(TOTAL_TOKENS, prompt + request.new_tokens)
        if case.prompt > prompt or case.prompt + request.new_tokens > total:
            raise UsageError(
                f"Cannot use the plan for {case.prompt} prompt tokens and {request.new_tokens} new ones.",
                f"It has room for a prompt of {prompt} tokens, and {total} in all.",
                f"Make a plan for this case: brim plan --seq {case.prompt} --new-tokens {request.new_tokens}.",
            )
        chunk, padded = settings.get(CHUNK_TOKENS, prompt), request.padded(batch)
        sizes = Sizes(batch=batch, prompt=prompt, total=total, chunk=chunk, padded=padded, drawn=request.drawn)
        resting = settings.get(kv_cache.RESTING_TOKENS, 0)
        need = self.need(sizes, resting)
        cut = cut_of(fixed, self.cuts(need))
        if cut is None:
            count = len(fixed.choices(STREAMING)) + len(fixed.choices(EXPERTS))
            raise UsageError(
                f"Cannot use the plan for {fixed.model}.",
                f"This model cannot be divided into the plan's {count} blocks.",
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
                f"It streams {len(passing)} blocks, but has no ring slots for them.",
                "Make a new one: brim plan MODEL ... --output FILE.",
            )
        if not fixed.choices(EXPERTS):
            check_promise(fixed, case.pool_bytes(cut, fixed, strategy.job), strategy.job.spent_bytes)
        strategy = self._with_reserved_bytes(strategy)
        has_graphs = GRAPH_BYTES in strategy.plan.settings
        if has_graphs == (GRAPH_BYTES in settings):
            return strategy
        self._graphs = has_graphs  # the file's seconds are of the other way
        need = self.need(sizes, resting)
        job = case.job(cut, need)
        step_s, _ = pass_s(job, case.hardware, choices, known[RING_SLOTS])
        promise = strategy.plan.promise
        promise = replace(promise, step_s=step_s, bound_s=min(promise.bound_s, step_s))
        return replace(strategy, need=need, job=job, plan=replace(strategy.plan, promise=promise))

    def _with_reserved_bytes(self, strategy: GenerationStrategy) -> GenerationStrategy:
        """Promise the bytes that this allocator reserves: the plan may come from another machine or PyTorch."""
        memory, plan = self.case.device_memory, strategy.plan
        peaks = plan.promise.peak_bytes
        if VRAM not in peaks:
            return strategy
        budget_bytes = plan.budget_bytes[VRAM]
        reserved = self._reserved_bytes(memory, strategy, budget_bytes) if memory else 0
        if reserved > budget_bytes:
            raise BudgetError(
                f"Cannot use the plan for {plan.model} on this GPU.",
                f"PyTorch would reserve {format_bytes(reserved)} of VRAM, of {format_bytes(budget_bytes)}.",
                "Make a new one on this machine: brim plan MODEL ... --output FILE.",
                smallest_bytes={VRAM: reserved},
            )
        own_bytes = peaks[VRAM] - plan.settings.get(GRAPH_BYTES, 0)
        promise = replace(plan.promise, peak_bytes={**peaks, VRAM: max(own_bytes, reserved)})
        return self._with_graphs(replace(strategy, plan=replace(plan, promise=promise)))

    def _with_more(self, fixed: Plan, sizes: Sizes, step_bytes: int) -> Plan:
        """Add the bytes of sampling and of prompts of several lengths to ``fixed``, planned without them."""
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


def kept_by_model(plan: Plan) -> bool:
    """Return True where the model keeps its own KV cache, as that of blocks on the processor must be in RAM."""
    return COMPUTE_RAM in plan.choices(STREAMING).values()


def older_tokens_s(placement: kv_cache.Placement, hardware: Hardware) -> float:
    """Return the seconds of loading the KV cache's resting tokens, in each pass.

    Nothing hides them, as streamed blocks use the same link.
    """
    return placement.moved_bytes / hardware.link(RAM, hardware.compute).bytes_per_s


def cut_of(plan: Plan, cuts: Iterable[Cut]) -> Cut | None:
    """Find the cut of ``plan``, with its blocks and its slots of experts."""
    blocks, experts = list(plan.choices(STREAMING)), plan.choices(EXPERTS)
    for cut in cuts:
        cached = set() if cut.experts is None else {each.layer.path for each in cut.experts.layers}
        if cached == set(experts) and [block.name for block in cut.partition.blocks] == blocks:
            if cut.experts is None:
                return cut
            choice, slots = next(iter(experts.values())), plan.settings[EXPERT_SLOTS]
            return replace(cut, experts=replace(cut.experts, choice=choice, slots=slots))
    return None
