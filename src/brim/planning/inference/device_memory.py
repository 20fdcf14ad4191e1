"""Predict the bytes that PyTorch's allocator reserves on this machine's GPU for a generation.

The plan is applied to a copy of the model without values, its largest passes are traced, and their allocations are
replayed in the simulated allocator: cuBLAS's workspace and unused parts of segments count too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import VRAM
from brim.estimation.simulation import Place, place_of, simulate
from brim.estimation.step_memory import dummy_inputs, generates
from brim.memory.tiers import fake_memory
from brim.model_cache import cache_argument, cache_input, cache_of, keeps_keys
from brim.planning.inference.machine import capability
from brim.planning.inference.memory import Sizes
from brim.planning.inference.pass_seconds import fingerprint_of
from brim.planning.proof import ENDLESS_BYTES
from brim.planning.seconds.measurement_cache import Remembered
from brim.predict.tracer import trace
from brim.techniques.blocks import Partition
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.meta_copy import meta_copy
from brim.techniques.streaming.weight_streaming import Weights
from brim.techniques.weights import place_weights

_METHOD = 1  # raised when the traced passes or the stored format change
_CUDA = torch.device("cuda")
_GROWN_TENSORS = 4096  # simulated of a growing cache: more would take seconds and need no other segments
# Tensors of ``generate`` between passes (tokens, masks, flags of ended sequences), and a program's own few, share
# segments of 2 MiB with small tensors of a pass, or need one more.
SLACK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A generation's passes. ``placement`` None: the model keeps its own cache. ``called``: a program may also call
    the model repeatedly without ``generate``, and keeps the last output with the logits of all tokens."""

    sizes: Sizes
    placement: kv_cache.Placement | None
    called: bool


class DeviceMemory:
    """Reserved bytes of a model's plans on a GPU, cached for other processes."""

    def __init__(self, module: nn.Module, hardware: Hardware, weights: Weights) -> None:
        self._module, self._hardware, self._weights = module, hardware, Weights(sources=weights.sources)
        facts = (_METHOD, capability(hardware), torch.__version__, fingerprint_of(module), sorted(weights.sources))
        self._memory = Remembered("device-memory", facts)

    def reserved_bytes(self, partition: Partition, plan: Plan, passes: Passes, limit_bytes: int | None = None) -> int:
        """Return the peak of reserved bytes while ``plan`` is in force and the model runs its passes.

        At ``limit_bytes`` the allocator frees unused segments first; a result above it means that this is not enough.
        """
        decided = [(one.technique, one.block, one.choice) for one in plan.decisions]
        resting = 0 if passes.placement is None else passes.placement.resting
        key = (decided, dict(plan.settings), asdict(passes.sizes), passes.placement is None, resting, passes.called)
        name = json.dumps([*key, limit_bytes])
        known = self._memory.get(name, count=1)
        if known is None:
            known = [float(self._simulated(partition, plan, passes, limit_bytes))]
            self._memory.keep({name: known})
        return int(known[0])

    def _simulated(self, partition: Partition, plan: Plan, passes: Passes, limit_bytes: int | None) -> int:
        steps = _Steps(self._module, partition, plan, self._weights, passes)
        made = trace(steps.build, steps=steps.count, capability=capability(self._hardware))
        free = simulate(made)
        reserved = free.peak_bytes.reserved
        if limit_bytes is None or reserved + SLACK_BYTES <= limit_bytes:
            return reserved + SLACK_BYTES
        card = place_of(self._hardware)
        total = limit_bytes - SLACK_BYTES + card.context.bytes
        held = simulate(made, Place(name=card.name, total_bytes=total, context=card.context))
        if held.out_of_memory is None:
            return held.peak_bytes.reserved + SLACK_BYTES
        return max(reserved, limit_bytes) + SLACK_BYTES


class _Steps:
    """A model's passes with ``plan`` in force, each a step of a trace."""

    def __init__(self, module: nn.Module, partition: Partition, plan: Plan, weights: Weights, passes: Passes) -> None:
        self._module, self._partition, self._plan, self._weights = module, partition, plan, weights
        self._passes = passes
        self._takes = set(inspect.signature(module.forward).parameters)
        self._todo = [*self._schedule()]

    @property
    def count(self) -> int:
        return len(self._todo)

    def build(self) -> Callable[[], None]:
        absent = {name for name, parameter in self._module.named_parameters()}
        copy = meta_copy(self._module, absent=absent, device=_CUDA)
        matrix = torch.ones(1, 1, device=_CUDA)
        matrix @ matrix  # cuBLAS allocates its workspace at the first product, before all other tensors
        del matrix
        memory = fake_memory(
            Timeline(self._plan.model, measured=False), compute_tier=VRAM, compute_bytes=ENDLESS_BYTES,
            ram_bytes=ENDLESS_BYTES, device=_CUDA,
        )  # fmt: skip
        handle = place_weights(copy, self._partition, self._plan, memory, self._weights)
        placement = self._passes.placement
        self._cache = None if placement is None else kv_cache.apply(copy, placement, memory)
        self._model: Any = handle.model
        self._encoded: Any = None
        sizes = self._passes.sizes
        inputs = dummy_inputs(self._module, sizes.batch, sizes.prompt)
        self._plain = {name: tensor.to(_CUDA) for name, tensor in inputs.items()} if self._passes.called else {}
        todo = iter(self._todo)

        def step() -> None:
            with torch.no_grad():
                next(todo)()

        return step

    def _schedule(self) -> Iterator[Callable[[], None]]:
        yield from self._generation()
        if self._passes.called:
            yield self._plain_call
            yield self._plain_call

    def _generation(self) -> Iterator[Callable[[], None]]:
        sizes, encodes = self._passes.sizes, bool(getattr(self._module.config, "is_encoder_decoder", False))
        prompt = 1 if encodes else sizes.prompt
        if encodes:
            yield self._encode
        elif not generates(self._module):
            return
        elif cache_argument(self._module) is None:
            yield lambda: self._pass(0, sizes.cached)
            return
        else:
            whole, rest = divmod(sizes.prompt, sizes.chunk)
            yield lambda: self._pass(0, sizes.chunk)
            if whole > 1:
                yield lambda: self._grow(sizes.chunk, (whole - 1) * sizes.chunk)
                yield lambda: self._pass((whole - 1) * sizes.chunk, sizes.chunk)
            if rest:
                yield lambda: self._pass(whole * sizes.chunk, rest)
        last = prompt + sizes.total - sizes.prompt - 1  # without the last new token, which has no pass
        if last > prompt:
            yield lambda: self._pass(prompt, 1)
        if last > prompt + 1:
            yield lambda: self._grow(prompt + 1, last - 1)
            yield lambda: self._pass(last - 1, 1)

    def _encode(self) -> None:
        sizes = self._passes.sizes
        ids = torch.zeros(sizes.batch, sizes.prompt, dtype=torch.long, device=_CUDA)
        mask = {"attention_mask": torch.ones_like(ids)}
        made = self._model(input_ids=ids, **mask, decoder_input_ids=ids[:, :1], use_cache=True)
        self._encoded = {"encoder_outputs": BaseModelOutput(last_hidden_state=made.encoder_last_hidden_state), **mask}
        self._cache = cache_of(made)
        self._choose(made)

    def _pass(self, begin: int, tokens: int) -> None:
        passes = self._passes
        batch = passes.sizes.batch
        ids = torch.zeros(batch, tokens, dtype=torch.long, device=_CUDA)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self._encoded is not None:
            inputs = {"decoder_input_ids": ids, **self._encoded}
        else:
            # A recurrent state includes the padding already: only the prompt has a mask.
            if "attention_mask" in self._takes and (begin == 0 or keeps_keys(self._module, self._cache)):
                inputs["attention_mask"] = torch.ones(batch, begin + tokens, dtype=torch.long, device=_CUDA)
            if "position_ids" in self._takes:
                inputs["position_ids"] = torch.arange(begin, begin + tokens, device=_CUDA).expand(batch, tokens)
            if "logits_to_keep" in self._takes:
                inputs["logits_to_keep"] = 1
        if cache_argument(self._module) is not None:
            inputs["use_cache"] = True
            if self._cache is not None:
                inputs |= cache_input(self._module, self._cache)
        made = self._model(**inputs)
        if self._passes.placement is None:
            self._cache = cache_of(made)
        self._choose(made)

    def _plain_call(self) -> None:
        """Call the model while its previous output exists."""
        self._cache = None
        self._output = self._model(**self._plain)

    def _choose(self, output: Any) -> None:
        """Process the last token's logits as ``generate`` does (GenerationMixin._sample)."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            return
        scores = logits[:, -1].to(copy=True, dtype=torch.float32)
        del output, logits
        processed = scores.clone()
        if not self._passes.sizes.drawn:
            processed.argmax(-1)
            return
        ordered, order = processed.sort(dim=-1, descending=False)
        unlikely = ordered.softmax(dim=-1).cumsum(dim=-1) <= 0.5
        kept = processed.masked_fill(unlikely.scatter(1, order, unlikely), -float("inf"))
        torch.multinomial(kept.softmax(dim=-1), num_samples=1)

    def _grow(self, tokens: int, end: int) -> None:
        """Grow the cache from ``tokens`` to ``end``. The model's own cache copies each tensor for each token."""
        if isinstance(self._cache, kv_cache.PlannedCache):
            self._cache.pretend(end)
        own = [layer for layer in _layers(self._cache) if _grows(layer)]
        if not own:
            return
        step = max(1, (end - tokens) * 2 * len(own) // _GROWN_TENSORS)
        for count in (*range(tokens + step, end, step), end):
            for layer in own:
                most = getattr(layer, "sliding_window", None)
                length = count if most is None else min(count, most - 1)
                for name in ("keys", "values"):
                    before = getattr(layer, name)
                    setattr(layer, name, before.new_empty(*before.shape[:2], length, before.shape[3]))
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = count


def _layers(cache: Any) -> Iterable[Any]:
    """Return the layers of the decoder's self-attention cache."""
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", ())


def _grows(layer: Any) -> bool:
    """Return True for a layer of transformers' own cache with keys and values of every token."""
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    planned = isinstance(layer, kv_cache.PlannedLayer)
    return not planned and all(isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in held)
