"""Ways to generate with a model whose values are in it, chosen as brim chooses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM
from brim.estimation.step_memory import Inputs, watch_inference
from brim.planning.inference.choose import GenerationCase, GenerationRequest, GenerationStrategy, search_generation
from brim.planning.inference.pass_seconds import PassSeconds
from brim.techniques.streaming.weight_streaming import Weights


def strategy_of(
    model: nn.Module, hardware: Hardware, budget: Mapping[str, int], *, batch: int = 1, prompt: int = 6, new: int = 3
) -> GenerationStrategy:
    """The model keeps its own cache, and the program takes nothing beside tensors. Bytes of activations are added to
    ``budget``, which so is for weights."""
    inputs = Inputs(batch=batch, prompt=prompt, total=prompt + new)
    seen = watch_inference(model, inputs)
    case = GenerationCase(
        name=type(model).__name__,
        module=model,
        weights=Weights(),
        hardware=hardware,
        budget_bytes={**budget, hardware.compute: budget[hardware.compute] + seen.step_bytes},
        request=GenerationRequest(lengths=(prompt,) * batch, new_tokens=new, batch=batch),
        shape=None,
        watch=lambda sizes: seen,
        spent_bytes=lambda: {RAM: 0},
        seconds=PassSeconds(module=model, hardware=hardware),
    )
    return search_generation(case)
