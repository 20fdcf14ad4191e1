"""``brim.load`` and generation: a model on disk, inside a budget that also holds while it is being loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from brim.core import Hardware
from brim.errors import BudgetError, UsageError
from brim.estimation.step_memory import Inputs, watch_inference
from brim.measure.capacity import resident_bytes
from brim.models.opening import OpenedModel, open_model
from brim.models.quantized import open_quantized
from brim.models.weights import by_parameter, materialize, verifier
from brim.planning.inference.choose import GenerationCase, Wanted, search_generation
from brim.planning.inference.machine import Device, budgets, machine, on, put_in_force
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.inference.warm_up import spent, warm_up
from brim.planning.seconds.drives import reading_from
from brim.techniques.quantization.technique import Quantization
from brim.techniques.streaming.weight_streaming import Weights

_TOTALS = (1024, 512, 256, 128, 64)  # tokens to make room for when nobody says how many


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
    """Load a model for inference, in a memory budget that also holds while it is loaded.

    The module behaves as if all its weights were in memory; those that do not fit are streamed from RAM or from the
    checkpoint on disk. What it computes is equal, bit for bit, to a model that is all in memory, as far as the same
    device computes it: see ``host_compute``. Call it under ``torch.no_grad()``. The KV cache is transformers' own: it
    counts as activations, up to the tokens of ``inputs``, and nothing keeps it from growing further. Layers that the
    processor computes keep their part of it in RAM.

    Args:
        model: A Hugging Face folder (safetensors), a ``.gguf`` file, or a hub id.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"90%"`` of all that it has. None: what is free less a tenth.
        ram: Budget of host memory, written alike: for the growth of the process from this call on, whatever it is
            for.
        device: ``"auto"`` (CUDA, else the CPU), ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cuda:1"`` (one of several),
            ``"cpu"``, or ``"emulated"``: a part of RAM plays VRAM.
        inputs: The largest step to make room for. None: one sequence of 1,024 tokens, or fewer where the budget is
            small.
        dtype: Of the weights. None: as the configuration says.
        quantization: ``"int8"``, ``"int4"``, ``"fp8"`` or a ``Quantization``: linear layers in fewer bits, which
            takes less to hold and to move, and gives other results. The first time, they are quantized into the
            user's cache folder. None: as stored.
        host_compute: Whether the processor may compute the blocks that it has in RAM, where that is faster than
            bringing them to the GPU. Its kernels round otherwise than the GPU's; False keeps every bit.
        trust_remote_code: Whether Python code in the model's folder may run.

    Returns:
        The module. ``module.brim`` is its handle: ``plan``, ``timeline()``, ``remove()``.

    Raises:
        ModelError: Files are missing or damaged.
        BudgetError: Nothing fits; ``smallest_bytes`` says what would.
        UsageError: A value that is not allowed.
        UnsupportedError: The device, or the model, is one that brim cannot run.
    """
    if inputs is not None and not isinstance(inputs, Inputs):
        raise UsageError(
            f"brim.load cannot use inputs of type {type(inputs).__name__}.",
            "They give the size of a step: brim.estimation.step_memory.Inputs(batch=..., prompt=..., total=...).",
        )
    # What is made in inference mode could never be changed outside of it.
    with on(device) as kind, torch.inference_mode(False):
        hardware = reading_from(machine(kind), Path(model))  # a first measurement takes RAM of its own for a moment
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
    """The weights of an opened model, placed; ``start_bytes`` is the resident set that the budget counts from."""
    module = opened.module
    materialize(module, opened)
    sizes = [inputs] if inputs else [Inputs(prompt=total // 2, total=total) for total in _TOTALS]
    warm_up(module, hardware, max(size.prompt for size in sizes), device)
    watch_inference(module, Inputs(prompt=1, total=1))  # what that itself leaves behind is measured too
    spent_bytes = spent(start_bytes)
    for size in sizes:
        try:
            case = loading_case(opened, hardware, budget, size, spent_bytes, host_compute=host_compute)
            strategy = search_generation(case)
            break
        except BudgetError:
            if size is sizes[-1]:
                raise
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened))
    put_in_force(module, strategy.partition, strategy.plan, hardware, weights, device)
    return module


def loading_case(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    inputs: Inputs,
    spent_bytes: Mapping[str, int],
    *,
    host_compute: bool = True,
) -> GenerationCase:
    """What ``brim.load`` asks: as ``brim generate``, of a model that whoever calls it gives a cache of its own."""
    return GenerationCase(
        name=opened.name,
        module=opened.module,
        weights=Weights(sources=by_parameter(opened), verify=verifier(opened)),
        hardware=hardware,
        budget_bytes=budget,
        wanted=Wanted(
            lengths=(inputs.prompt,) * inputs.batch,
            new_tokens=inputs.total - inputs.prompt,
            batch=inputs.batch,
            host_compute=host_compute,
        ),
        shape=None,
        watch=lambda sizes: watch_inference(opened.module, inputs),
        spent_bytes=lambda: spent_bytes,
        seconds=PassSeconds(module=opened.module, hardware=hardware, host_compute=host_compute),
        called=True,
    )
