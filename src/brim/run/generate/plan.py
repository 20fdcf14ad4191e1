"""How a generation fits its budget: how many sequences at once, how much of a prompt, and where the KV cache is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import nn

from brim.core import Decision, Hardware, Plan
from brim.core.hardware import RAM
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.run.fit.machine import Device, put_in_force
from brim.run.fit.step_memory import Observation
from brim.run.generate.load import (
    by_parameter,
    materialize,
    spent,
    verifier,
    warm_up,
)
from brim.run.generate.memory import Sizes
from brim.run.generate.remembered_passes import RememberedPasses
from brim.run.model.opening import OpenedModel
from brim.run.plan.choosing import Need, cuts, make_plan
from brim.techniques.blocks import Partition
from brim.techniques.experts.technique import NAME as EXPERTS
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_DISK
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import RING_SLOTS, Weights, WeightStreaming
from brim.units import format_bytes

# A plan's settings, beside those of weight streaming.
BATCH, PROMPT_TOKENS, TOTAL_TOKENS, CHUNK_TOKENS = "batch", "prompt_tokens", "total_tokens", "prefill_chunk"
_CHUNK_STEPS = 16  # the largest chunk that fits is found to a sixteenth of the prompt
_WORTH_TOKENS = 256  # prompts are not cut into less than this for the sake of a larger batch: each chunk is a pass
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be generated at most. ``batch`` and ``chunk`` None: as many sequences, as much at once, as fit.

    ``lengths``: tokens of each prompt. ``drawn``: tokens are drawn. ``continued``: turns of one conversation, each of
    which has a mask over those before it.
    """

    lengths: tuple[int, ...]
    new_tokens: int
    batch: int | None = 1
    chunk: int | None = None
    drawn: bool = False
    continued: bool = False

    def padded(self, batch: int) -> bool:
        """Whether prompts of several lengths meet in a batch."""
        groups = [self.lengths[first : first + batch] for first in range(0, len(self.lengths), batch)]
        return self.continued or any(len(set(group)) > 1 for group in groups)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to generate that fits. ``shape`` None: the model keeps its own cache."""

    sizes: Sizes
    resting: int
    shape: kv_cache.CacheShape | None
    partition: Partition
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in force, and the choice by which it is."""

    module: nn.Module
    handle: WeightStreaming
    choice: Choice

    def cache(self, batch: int, prompt: int, new_tokens: int) -> kv_cache.PlannedCache | None:
        """An empty cache for a batch; None where the model makes its own.

        It does where some layers are computed in RAM: their keys and values have to be there too.
        """
        by_processor = COMPUTE_RAM in self.handle.plan.choices(STREAMING).values()
        if self.choice.shape is None or by_processor:
            return None
        tokens = max(prompt, prompt + new_tokens - 1)
        placement = kv_cache.Placement(
            shape=self.choice.shape, batch=batch, tokens=tokens, resting=min(self.choice.resting, tokens)
        )
        return kv_cache.apply(self.module, placement, self.handle.memory)


def load_for_generation(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    wanted: Wanted,
    start_bytes: int,
    device: Device = "auto",
    *,
    fixed: Plan | None = None,
    on_loaded: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """The weights of an opened model, placed so that what is ``wanted`` fits beside them.

    ``start_bytes`` is the resident set that the budget counts from. ``fixed``: exactly this plan. ``on_loaded``
    hears how many bytes of weights have been loaded, of how many. Raises BudgetError with the smallest budget that
    does when nothing fits.
    """
    module = opened.module
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    materialize(module, opened)
    warm_up(module, hardware, max(wanted.lengths) * (wanted.batch or 1))
    passes = RememberedPasses(module)
    chooser = _Chooser(
        opened, weights, hardware, budget, wanted, passes.shape(), lambda: spent(start_bytes), passes.watch
    )
    choice = chooser.follow(fixed) if fixed is not None else chooser.choose()
    telling = replace(weights, loaded=_Told(choice, on_loaded))
    handle = put_in_force(module, choice.partition, choice.plan, hardware, telling, device)
    return Loaded(module=module, handle=handle, choice=choice)


class _Told:
    """Adds up what is loaded, of all that will be: what streams from disk is not."""

    def __init__(self, choice: Choice, on_loaded: Callable[[int, int], None]) -> None:
        choices, blocks = choice.plan.choices(STREAMING), choice.partition.blocks
        stays = [block.bytes for block in blocks if choices.get(block.name) != FROM_DISK]
        self._total, self._done, self._on_loaded = sum(stays), 0, on_loaded

    def __call__(self, bytes: int) -> None:
        self._done = min(self._done + bytes, self._total)  # what is in no block is not foreseen
        self._on_loaded(self._done, self._total)


class _Chooser:
    """Tries sizes, largest first, until one fits. ``spent_bytes``: what the program takes per tier beside tensors,
    asked once a pass was watched, as that leaves something behind."""

    def __init__(
        self,
        opened: OpenedModel,
        weights: Weights,
        hardware: Hardware,
        budget: Mapping[str, int],
        wanted: Wanted,
        shape: kv_cache.CacheShape | None,
        spent_bytes: Callable[[], Mapping[str, int]],
        watch: Callable[[Sizes], Observation],
    ) -> None:
        self._opened, self._module, self._weights = opened, opened.module, weights
        self._hardware, self._budget, self._wanted = hardware, budget, wanted
        self._shape, self._ask_spent, self._watch = shape, spent_bytes, watch
        self._seen: dict[Sizes, Observation] = {}
        self._planned: dict[tuple[Sizes, int], Choice] = {}  # batches and chunks are searched one after the other
        # What transformers computes has no file to be streamed from.
        names = (name for name, _ in self._module.named_parameters())
        self._stay = frozenset(name for name in names if name not in weights.sources)
        self._prompt = max(wanted.lengths)

    def choose(self) -> Choice:
        """The largest batch that fits where none was given. Raises BudgetError."""
        wanted = self._wanted
        batch = wanted.batch or _largest(len(wanted.lengths), 1, self._with_short_chunks).sizes.batch
        return self._with_batch(min(batch, len(wanted.lengths)), self._with_chunks)

    def _with_short_chunks(self, batch: int) -> Choice:
        least = min(self._prompt, max(_WORTH_TOKENS, self._prompt // _CHUNK_STEPS))
        if batch == 1 or self._wanted.chunk is not None or not self._divisible:
            return self._with_batch(batch, self._with_chunks)
        return self._with_batch(batch, lambda _, resting: self._plan(self._sizes(batch, least), resting))

    @property
    def _divisible(self) -> bool:
        return self._shape is not None and self._shape.only_attention

    def _with_batch(self, batch: int, attempt: Callable[[int, int], Choice]) -> Choice:
        """All of the cache in the compute tier, if ``attempt`` lets it; else as little as needed in RAM."""
        restings = [0]
        if self._hardware.compute != RAM and self._shape is not None:
            restings += kv_cache.restings(self._shape, self._sizes(batch, self._prompt).cached)
        refusals = []
        for resting in restings:
            try:
                return attempt(batch, resting)
            except BudgetError as error:
                refusals.append(error)
        raise min(refusals, key=lambda error: sum(error.smallest_bytes.values()))

    def _with_chunks(self, batch: int, resting: int) -> Choice:
        """As much of a prompt at once as was asked for, or as fits."""
        prompt, asked = self._prompt, self._wanted.chunk
        if asked is not None and asked < prompt and not self._divisible:
            raise UnsupportedError(
                f"The prompt was to go through {self._opened.name} in chunks of {asked} tokens.",
                "Its cache is not one of attention alone, and cannot be gone on from in the middle of a prompt.",
                "Leave out --prefill-chunk.",
            )
        if asked is not None or not self._divisible:
            return self._plan(self._sizes(batch, min(asked or prompt, prompt)), resting)
        return _largest(prompt, max(1, prompt // _CHUNK_STEPS), lambda n: self._plan(self._sizes(batch, n), resting))

    def _sizes(self, batch: int, chunk: int) -> Sizes:
        total, padded = self._prompt + self._wanted.new_tokens, self._wanted.padded(batch)
        return Sizes(
            batch=batch, prompt=self._prompt, total=total, chunk=chunk, padded=padded, drawn=self._wanted.drawn
        )

    def _placement(self, sizes: Sizes, resting: int) -> kv_cache.Placement | None:
        if self._shape is None:
            return None
        return kv_cache.Placement(shape=self._shape, batch=sizes.batch, tokens=sizes.cached, resting=resting)

    def _need(self, sizes: Sizes, held_bytes: Mapping[str, int]) -> Need:
        compute = self._hardware.compute
        if sizes not in self._seen:
            self._seen[sizes] = self._watch(sizes)
        seen = self._seen[sizes]
        in_ram = held_bytes.get(RAM, 0) if compute != RAM else 0
        return Need(
            step_bytes=seen.step_bytes + held_bytes.get(compute, 0),
            observation=seen,
            tokens=sizes.batch,
            stay=self._stay,
            spent_bytes={**self._spent_bytes, RAM: self._spent_bytes[RAM] + in_ram},
        )

    @cached_property
    def _spent_bytes(self) -> Mapping[str, int]:
        return self._ask_spent()

    def _plan(self, sizes: Sizes, resting: int) -> Choice:
        if (sizes, resting) not in self._planned:
            self._planned[sizes, resting] = self._made(sizes, resting)
        return self._planned[sizes, resting]

    def _made(self, sizes: Sizes, resting: int) -> Choice:
        placement = self._placement(sizes, resting)
        held_bytes = placement.held_bytes(self._hardware.compute) if placement else {}
        need = self._need(sizes, held_bytes)
        partition, plan = make_plan(self._module, self._hardware, self._budget, need, self._weights, task="generate")
        plan = self._with_cache(plan, sizes, placement)
        return Choice(sizes=sizes, resting=resting, shape=self._shape, partition=partition, plan=plan)

    def _with_cache(self, plan: Plan, sizes: Sizes, placement: kv_cache.Placement | None) -> Plan:
        settings = {
            **plan.settings,
            BATCH: sizes.batch,
            PROMPT_TOKENS: sizes.prompt,
            TOTAL_TOKENS: sizes.total,
            CHUNK_TOKENS: sizes.chunk,
        }
        plan = replace(plan, model=self._opened.name, settings=settings)
        if placement is None or not placement.shape.planned:
            return plan
        choice = kv_cache.OLDER_IN_RAM if placement.resting else kv_cache.RESIDENT
        held = placement.shape.token_bytes * placement.batch * placement.tokens
        decision = Decision(technique=kv_cache.NAME, block="", choice=choice, bytes=held)
        promise = plan.promise
        if placement.resting:
            way = RAM, self._hardware.compute
            took_s = placement.moved_bytes / self._hardware.link(*way).bytes_per_s
            same = promise.limited_by == " -> ".join(way)
            promise = replace(
                promise, step_s=promise.step_s + took_s, bound_s=promise.bound_s + (took_s if same else 0.0)
            )
        settings[kv_cache.RESTING_TOKENS] = placement.resting
        return replace(plan, decisions=(*plan.decisions, decision), promise=promise, settings=settings)

    def follow(self, fixed: Plan) -> Choice:
        """Exactly ``fixed``, made for this model. Raises UsageError where it has no room for the prompts."""
        settings, wanted = fixed.settings, self._wanted
        batch, prompt = settings.get(BATCH, 1), settings.get(PROMPT_TOKENS, self._prompt)
        total = settings.get(TOTAL_TOKENS, prompt + wanted.new_tokens)
        if self._prompt > prompt or self._prompt + wanted.new_tokens > total:
            raise UsageError(
                f"{self._prompt} prompt tokens and {wanted.new_tokens} new ones were asked of a plan.",
                f"It has room for a prompt of {prompt} tokens, and {total} in all.",
                f"Make one for this: brim plan --seq {self._prompt} --new-tokens {wanted.new_tokens}.",
            )
        chunk, padded = settings.get(CHUNK_TOKENS, prompt), wanted.padded(batch)
        sizes = Sizes(batch=batch, prompt=prompt, total=total, chunk=chunk, padded=padded, drawn=wanted.drawn)
        resting = settings.get(kv_cache.RESTING_TOKENS, 0)
        placement = self._placement(sizes, resting)
        need = self._need(sizes, placement.held_bytes(self._hardware.compute) if placement else {})
        choices, experts = fixed.choices(STREAMING), fixed.choices(EXPERTS)
        for cut in cuts(self._module, self._hardware, need, self._weights, fixed.task):
            cached = set() if cut.way is None else {each.layer.path for each in cut.way.layers}
            if cached == set(experts) and [b.name for b in cut.partition.blocks] == list(choices):
                known = {RING_SLOTS: 0, BATCH: batch, PROMPT_TOKENS: prompt, TOTAL_TOKENS: total, **settings}
                fixed = self._with_more(replace(fixed, settings=known), sizes, need.step_bytes)
                return Choice(sizes=sizes, resting=resting, shape=self._shape, partition=cut.partition, plan=fixed)
        raise UsageError(
            f"The plan for {fixed.model} was to be used.",
            f"It speaks of {len(choices) + len(experts)} blocks, and this model cannot be cut into those.",
            "Make it again: brim plan MODEL ... --output FILE.",
        )

    def _with_more(self, fixed: Plan, sizes: Sizes, step_bytes: int) -> Plan:
        """``fixed`` with what drawing and prompts of several lengths take more: it was made without them."""
        if not sizes.padded and not sizes.drawn:
            return fixed
        plain = self._watch(replace(sizes, padded=False, drawn=False))
        tier, peak = self._hardware.compute, dict(fixed.promise.peak_bytes)
        placement = self._placement(sizes, fixed.settings.get(kv_cache.RESTING_TOKENS, 0))
        held = placement.held_bytes(tier).get(tier, 0) if placement else 0
        peak[tier] += max(0, step_bytes - held - plain.step_bytes)
        if peak[tier] > fixed.budget_bytes[tier]:
            raise BudgetError(
                f"The plan for {fixed.model} was to be used for prompts of several lengths, or to draw tokens.",
                f"That takes {format_bytes(peak[tier] - fixed.budget_bytes[tier])} more than its budget.",
                "Give prompts of one length at a time, generate greedily, or make a plan with a smaller --batch.",
                smallest_bytes={tier: peak[tier]},
            )
        return replace(fixed, promise=replace(fixed.promise, peak_bytes=peak))


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


__all__ = ["Choice", "Loaded", "Wanted", "load_for_generation"]
