"""Load a model for generation: its weights placed by the plan, with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from brim.core import Hardware, Plan
from brim.estimation.step_memory import Inputs, Observation, watch_inference
from brim.models.opening import OpenedModel
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choose import (
    GenerationCase,
    GenerationRequest,
    GenerationStrategy,
    follow,
    search_generation,
)
from brim.planning.inference.machine import Device, put_in_force
from brim.planning.inference.memory import Sizes
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.inference.remembered_passes import RememberedPasses
from brim.planning.inference.warm_up import spent, warm_up
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import FROM_DISK
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded model and its strategy."""

    module: nn.Module
    handle: WeightStreaming
    strategy: GenerationStrategy

    def cache(self, batch: int, prompt: int, new_tokens: int) -> kv_cache.PlannedCache | None:
        """An empty cache for a batch; None where the model makes its own."""
        planned = self.strategy.placement
        if planned is None:
            return None
        sizes = Sizes(batch=batch, prompt=prompt, total=prompt + new_tokens, chunk=prompt)
        placement = sizes.placement(planned.shape, planned.resting)
        return kv_cache.apply(self.module, placement, self.handle.memory)


def choose_generation(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    request: GenerationRequest,
    start_bytes: int,
    device: Device = "auto",
    *,
    fixed: Plan | None = None,
) -> GenerationStrategy:
    """Choose how the generation of ``request`` fits beside the weights of an opened model, which is materialized.

    ``start_bytes`` is the resident set from which the budget counts. ``fixed``: exactly this plan. Raises BudgetError
    with the smallest budget that fits when nothing does.
    """
    module = opened.module
    materialize(module, opened)
    warm_up(module, hardware, max(request.lengths) * (request.batch or 1), device)
    case = generation_case(opened, hardware, budget, request, lambda: spent(start_bytes))
    return search_generation(case) if fixed is None else follow(case, fixed)


def load_for_generation(
    opened: OpenedModel,
    hardware: Hardware,
    strategy: GenerationStrategy,
    device: Device = "auto",
    *,
    on_loaded: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """Load the weights of an opened model by the strategy. ``on_loaded`` gets the loaded and the total bytes."""
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened), loaded=_Progress(strategy, on_loaded))
    handle = put_in_force(opened.module, strategy.partition, strategy.plan, hardware, weights, device)
    return Loaded(module=opened.module, handle=handle, strategy=strategy)


def generation_case(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    request: GenerationRequest,
    spent_bytes: Callable[[], Mapping[str, int]],
    *,
    called: bool = False,
) -> GenerationCase:
    """The planning case of ``brim generate`` for an opened model, which is materialized; of ``brim.load`` if
    ``called``: the caller passes the cache.

    Passes of ``brim generate`` are observed once and remembered, and nothing is measured.
    """
    passes = RememberedPasses(opened.module)

    def watch_called(sizes: Sizes) -> Observation:
        return watch_inference(opened.module, Inputs(batch=sizes.batch, prompt=sizes.prompt, total=sizes.total))

    return GenerationCase(
        name=opened.name,
        module=opened.module,
        weights=Weights(sources=by_parameter(opened), verify=verifier(opened)),
        hardware=hardware,
        budget_bytes=budget,
        request=request,
        shape=None if called else passes.shape(),
        watch=watch_called if called else passes.watch,
        spent_bytes=spent_bytes,
        seconds=PassSeconds(module=opened.module, hardware=hardware, host_compute=request.host_compute),
        called=called,
    )


class _Progress:
    """Adds up the loaded bytes of the total; blocks that stream from disk do not count."""

    def __init__(self, strategy: GenerationStrategy, on_loaded: Callable[[int, int], None]) -> None:
        choices, blocks = strategy.plan.choices(STREAMING), strategy.partition.blocks
        stays = [block.bytes for block in blocks if choices.get(block.name) != FROM_DISK]
        self._total, self._done, self._on_loaded = sum(stays), 0, on_loaded

    def __call__(self, bytes: int) -> None:
        self._done = min(self._done + bytes, self._total)  # tensors outside of blocks are not in the total
        self._on_loaded(self._done, self._total)
