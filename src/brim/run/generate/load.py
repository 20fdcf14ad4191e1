"""``brim.load``: load a model from disk inside a budget that also holds while it is being loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from brim.core import Hardware
from brim.errors import UsageError
from brim.estimation.step_memory import Inputs, watch_inference
from brim.measure.capacity import resident_bytes
from brim.models.opening import OpenedModel, open_model
from brim.models.quantized import open_quantized
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choose import GenerationRequest, GenerationStrategy, search_generation
from brim.planning.inference.machine import Device, budgets, machine, on, put_in_force
from brim.planning.inference.warm_up import spent, warm_up
from brim.planning.proof import search
from brim.planning.seconds.drives import reading_from
from brim.run.generate.plan import generation_case
from brim.techniques.quantization.technique import Quantization
from brim.techniques.streaming.weight_streaming import Weights

_TOTALS = (1024, 512, 256, 128, 64)  # tokens to reserve memory for, tried in this order, when ``inputs`` is None


def load(
    model: str | Path,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    inputs: Inputs | None = None,
    dtype: torch.dtype | None = None,
    quantization: str | Quantization | None = None,
    host_compute: bool = True,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model for inference within a memory budget. The budget also holds during loading.

    The module behaves as if all its weights were in memory; weights that do not fit are streamed from RAM or from the
    checkpoint on disk. Results are equal, bit for bit, to those of a model that is entirely in memory, if the
    same device computes them (see ``host_compute``). Call it under ``torch.no_grad()``. The KV cache is transformers'
    own. The budget includes it up to the tokens of ``inputs``, but it may grow further. Layers that the CPU computes
    have their part of the cache in RAM.

    Args:
        model: A Hugging Face folder (safetensors), a ``.gguf`` file, or a hub id.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"90%"`` of its capacity. None: nine tenths of the free
            memory.
        ram: Budget of host memory, in the same forms: for all growth of the process after this call.
        device: ``"auto"`` (CUDA, else the CPU), ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cuda:1"`` (a GPU by number),
            ``"cpu"``, or ``"emulated"`` (a part of RAM replaces VRAM).
        inputs: The largest step to reserve memory for. None: one sequence of 1,024 tokens, or fewer if the budget is
            small.
        dtype: Type of the weights. None: as in the configuration.
        quantization: ``"int8"``, ``"int4"``, ``"fp8"`` or a ``Quantization``: linear layers in fewer bits, which
            take less memory and time to move, but change results. The quantized weights are stored in the user's
            cache folder. None: as in the checkpoint.
        host_compute: True lets the CPU compute blocks that are in RAM, if that is faster than moving them to the GPU.
            Its kernels round differently; with False results are equal to the GPU's bit for bit.
        trust_remote_code: True lets Python code in the model's folder run.

    Returns:
        The module. ``module.brim`` is its handle: ``plan``, ``timeline()``, ``remove()``.

    Raises:
        ModelError: Files are missing or damaged.
        BudgetError: Nothing fits; ``smallest_bytes`` is a sufficient budget.
        UsageError: A value that is not allowed.
        UnsupportedError: brim cannot run the model, or cannot use the device.
    """
    if inputs is not None and not isinstance(inputs, Inputs):
        raise UsageError(
            f"brim.load cannot use inputs of type {type(inputs).__name__}.",
            "They must be brim.estimation.step_memory.Inputs(batch=..., prompt=..., total=...), the sizes of a step.",
        )
    # Tensors created in inference mode could never be changed outside of it.
    with on(device) as kind, torch.inference_mode(False):
        hardware = reading_from(machine(kind), Path(model))  # before start_bytes: measuring takes RAM for a moment
        start_bytes = resident_bytes()
        budget = budgets(hardware, vram, ram, kind)
        if quantization is None:
            opened = open_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            opened = open_quantized(model, quantization, dtype=dtype, trust_remote_code=trust_remote_code)
        return load_opened(opened, hardware, budget, inputs, start_bytes, kind, host_compute=host_compute)


def load_opened(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    inputs: Inputs | None,
    start_bytes: int,
    device: Device = "auto",
    *,
    host_compute: bool = True,
) -> nn.Module:
    """Place the weights of an opened model; the budget counts from a resident set of ``start_bytes``."""
    module = opened.module
    materialize(module, opened)
    sizes = [inputs] if inputs else [Inputs(prompt=total // 2, total=total) for total in _TOTALS]
    warm_up(module, hardware, max(size.prompt for size in sizes), device)
    watch_inference(module, Inputs(prompt=1, total=1))  # memory that it leaves behind is measured too
    spent_bytes = spent(start_bytes)

    def attempt(size: Inputs) -> GenerationStrategy:
        request = GenerationRequest.of(size, host_compute=host_compute)
        return search_generation(generation_case(opened, hardware, budget, request, lambda: spent_bytes, called=True))

    (strategy,) = search(sizes, attempt, most=1)
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    put_in_force(module, strategy.partition, strategy.plan, hardware, weights, device)
    return module
