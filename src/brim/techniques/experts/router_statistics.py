"""Statistics of a model's routers from a short run: the experts that a step needs, and how often they repeat."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.techniques.experts.cache import HALF_LIFE_VISITS, Usage
from brim.techniques.experts.calls import shares_of
from brim.techniques.experts.technique import find_experts

Visits = Sequence[Mapping[int, float]]  # for each call of a layer: expert -> share of the tokens that chose it


@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """The calls of one layer of ``count`` experts, in order."""

    count: int
    visits: Visits

    @property
    def distinct(self) -> float:
        """The mean number of different experts in a call."""
        return sum(len(visit) for visit in self.visits) / len(self.visits)

    def hit_rate(self, slots: int, *, half_life: float = HALF_LIFE_VISITS) -> float:
        """The share of needed experts that are in one of ``slots`` slots when a call begins.

        It is taken over the second half of the calls: in the first the slots fill.
        """
        hits, needed = simulate(self.visits, slots, half_life=half_life, skip=len(self.visits) // 2)
        return hits / needed if needed else 1.0

    def loads(self, slots: int) -> float:
        """The mean number of experts that a call waits for."""
        return self.distinct * (1.0 - self.hit_rate(slots))


def simulate(visits: Visits, slots: int, *, half_life: float, skip: int = 0) -> tuple[int, int]:
    """Simulate ``ExpertCache``. Returns the hits and needed experts of all visits but the first ``skip``."""
    usage, cached = Usage(half_life), set[int]()
    hits = needed = 0
    for number, visit in enumerate(visits):
        usage.visit(visit)
        if number >= skip:
            hits, needed = hits + len(cached & visit.keys()), needed + len(visit)
        # After a call its experts are in slots, as far as they fit, and of the others the most used.
        most_used = sorted(visit, key=usage.rank, reverse=True)[:slots]
        others = sorted(cached - visit.keys(), key=usage.rank, reverse=True)
        cached = {*most_used, *others[: slots - len(most_used)]}
    return hits, needed


def router_statistics(
    model: nn.Module, inputs: Mapping[str, Any], *, new_tokens: int = 0
) -> dict[str, RouterStatistics]:
    """The router statistics of each layer with fused experts, by path, on ``inputs``.

    ``new_tokens`` 0: a forward pass on the inputs; else that many tokens are generated from them. The model may be
    fitted. Raises UnsupportedError for a model without such layers.
    """

    def run() -> None:
        with torch.no_grad():
            if new_tokens:
                options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
                model.generate(**inputs, **options)  # type: ignore[operator]  # transformers'
            else:
                model(**inputs)

    return watch_routers(model, run)


def watch_routers(model: nn.Module, run: Callable[[], object]) -> dict[str, RouterStatistics]:
    """The router statistics of the calls in ``run``."""
    layers = [layer for layer in find_experts(model) if not layer.modules]
    if not layers:
        raise UnsupportedError(
            f"Cannot watch the routers of {type(model).__name__}.",
            "It has no layers of fused experts like those of transformers.",
            "Plan it without router statistics.",
        )
    seen: dict[str, list[Mapping[int, float]]] = {layer.path: [] for layer in layers}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_noting(model.get_submodule(layer.path), layer.count, seen[layer.path]))
        run()
    return {
        layer.path: RouterStatistics(count=layer.count, visits=tuple(seen[layer.path]))
        for layer in layers
        if seen[layer.path]
    }


@contextlib.contextmanager
def _noting(module: nn.Module, count: int, into: list[Mapping[int, float]]) -> Iterator[None]:
    signature = inspect.signature(type(module).forward)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = list(signature.bind(module, *args, **kwargs).arguments.values())[2]
        into.append(shares_of(index, count))

    hook = module.register_forward_pre_hook(torch.compiler.disable(note), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
