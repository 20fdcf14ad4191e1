"""Load a model inside a budget that also holds while it loads: ``brim.load``, and for generation, with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from brim.accelerator import CUDA
from brim.core import Hardware, Plan
from brim.errors import UsageError
from brim.estimation.step_memory import Inputs, Observation, watch_inference
from brim.measure.probe import known
from brim.memory import heap
from brim.memory.checkpoint_files import read_checkpoint
from brim.models.architecture import model_class
from brim.models.opening import OpenedModel, described_by, open_model, prepare
from brim.models.quantized import open_quantized
from brim.models.weights import by_parameter, materialize, open_mapped, verifier
from brim.planning.inference.ample import AmpleStrategy, Bound
from brim.planning.inference.choose import (
    GenerationCase,
    GenerationRequest,
    GenerationStrategy,
    follow,
    search_generation,
)
from brim.planning.inference.machine import Device, budgets, computing, machine, on, put_in_force
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.inference.warm_up import spent, warm_up
from brim.planning.proof import search
from brim.planning.seconds.drives import reading_from
from brim.techniques import decoding_graphs
from brim.techniques.kv_offload import cache as kv_cache
from brim.techniques.streaming.placement import FROM_DISK
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming

Amount = str | int | None  # of memory
OnLoaded = Callable[[int, int], None]
_TOTALS = (1024, 512, 256, 128, 64)  # tokens to reserve memory for, tried in this order, when ``inputs`` is None


def load(
    model: str | Path,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    device: Device | str = "auto",
    inputs: Inputs | None = None,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    host_compute: bool = True,
    cuda_graphs: bool = True,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model for inference within a memory budget. The budget also holds during loading.

    The module behaves as if all its weights were in memory; weights that do not fit are streamed from RAM or from the
    checkpoint on disk. Results are equal, bit for bit, to those of a model that is entirely in memory, if the
    same device computes them (see ``host_compute`` and ``cuda_graphs``). Call it under ``torch.no_grad()``. The KV
    cache is transformers' own. The budget includes it up to the tokens of ``inputs``, but it may grow further. Layers
    that the CPU computes have their part of the cache in RAM.

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
        quantization: ``"int8"`` or ``"int4"``: linear layers in fewer bits, by bitsandbytes (LLM.int8, or NF4 with
            a scale per 64 weights), which take less memory and time to move, but change results. The quantized model
            is stored in the user's cache folder. None: as in the checkpoint.
        host_compute: True lets the CPU compute blocks that are in RAM, if that is faster than moving them to the GPU.
            Its kernels round differently; with False results are equal to the GPU's bit for bit.
        cuda_graphs: True lets ``generate`` launch a token's pass, or each streamed block, as one CUDA graph, if the
            budget has room. Attention then reads a cache of fixed size, which may round differently.
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
    heap.return_freed_memory()  # what a pass frees is counted as long as the heap keeps it
    # Tensors created in inference mode could never be changed outside of it.
    with on(device) as kind, torch.inference_mode(False):
        start_bytes, folder = heap.used_resident_bytes(), prepare(model, trust_remote_code=trust_remote_code)
        choices = [inputs] if inputs else [Inputs(prompt=total // 2, total=total) for total in _TOTALS]
        plain = quantization is None and not trust_remote_code
        if plain and (ample := ample_model(folder, choices[0], vram, ram, kind, dtype)):
            return place_ample(ample, ample.open(), start_bytes, graphs=cuda_graphs).module
        start_bytes -= heap.used_resident_bytes()  # what measuring leaves is not part of a later run
        hardware = reading_from(machine(kind), folder)
        start_bytes += heap.used_resident_bytes()
        budget = budgets(hardware, vram, ram, kind)
        if quantization is None:
            opened = open_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            opened = open_quantized(model, quantization, dtype=dtype, trust_remote_code=trust_remote_code)

        def attempt(size: Inputs) -> GenerationStrategy:
            request = GenerationRequest.of(size, host_compute=host_compute, graphs=cuda_graphs)
            return choose_generation(opened, hardware, budget, request, start_bytes, kind, called=True)

        (strategy,) = search(choices, attempt, most=1)
        return load_for_generation(opened, hardware, strategy, kind).module


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded model and its strategy."""

    module: nn.Module
    handle: WeightStreaming
    strategy: GenerationStrategy | AmpleStrategy

    def cache(self, batch: int, prompt: int, new_tokens: int) -> kv_cache.PlannedCache | None:
        """An empty cache for a batch; None where the model makes its own."""
        planned = self.strategy.placement
        if planned is None:
            return None
        sizes = Sizes(batch=batch, prompt=prompt, total=prompt + new_tokens, chunk=prompt)
        placement = sizes.placement(planned.shape, planned.resting)
        return kv_cache.apply(self.module, placement, self.handle.memory)


def ample_model(
    folder: Path, inputs: Inputs, vram: Amount, ram: Amount, device: Device, dtype: torch.dtype | None = None
) -> Bound | None:
    """Return the model in ``folder`` if it certainly fits where it computes; else None."""
    on = computing(device)
    if device == "emulated" or (on is not None and (on.type != CUDA or on.shares_ram())):
        return None
    sizes = Sizes(batch=inputs.batch, prompt=inputs.prompt, total=inputs.total, chunk=inputs.prompt)
    hardware = known(device)
    directory, name, config = described_by(folder, trust_remote_code=False, quantized=True)
    stored, kind = read_checkpoint(directory), model_class(directory, config, False)
    budget = budgets(hardware, vram, ram, device)

    def opener() -> OpenedModel:
        if on is None:
            return open_mapped(directory, name, config, stored, dtype)
        opened = open_model(directory, dtype=dtype)
        materialize(opened.module, opened)
        return opened

    bound = Bound(config=config, stored=stored, sizes=sizes, hardware=hardware, budget=budget, open=opener)
    return bound if bound.fits(kind, dtype) else None


def place_ample(
    ample: Bound,
    opened: OpenedModel,
    start_bytes: int,
    plans_cache: bool = False,
    on_loaded: OnLoaded = lambda done, total: None,
    *,
    graphs: bool,
) -> Loaded:
    """Load the weights of a model that fits. ``plans_cache``: the KV cache has room for all tokens at once.

    ``graphs``: a GPU may decode by CUDA graphs.
    """
    shape = cache_shape(opened.module) if plans_cache else None
    strategy = ample.strategy(opened, shape, start_bytes, graphs=graphs)
    loaded = load_for_generation(opened, ample.hardware, strategy, on_loaded=on_loaded)
    on_loaded(strategy.partition.bytes, strategy.partition.bytes)
    return loaded


def choose_generation(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    request: GenerationRequest,
    start_bytes: int,
    device: Device = "auto",
    *,
    fixed: Plan | None = None,
    called: bool = False,
) -> GenerationStrategy:
    """Choose how the generation of ``request`` fits beside the weights of an opened model.

    ``start_bytes`` is the resident set from which the budget counts. ``fixed``: exactly this plan. ``called``: a
    program calls the model, with its own cache. Raises BudgetError with the smallest budget when nothing fits.
    """
    module = opened.module
    materialize(module, opened)
    warm_up(module, hardware, max(request.lengths) * (request.batch or 1), device)
    case = generation_case(opened, hardware, budget, request, lambda: spent(start_bytes), called=called)
    return search_generation(case) if fixed is None else follow(case, fixed)


def generation_case(
    opened: OpenedModel,
    hardware: Hardware,
    budget: Mapping[str, int],
    request: GenerationRequest,
    spent_bytes: Callable[[], Mapping[str, int]],
    *,
    called: bool = False,
) -> GenerationCase:
    """Return the planning case of an opened model, which is materialized; nothing is measured."""
    module = opened.module
    shape = None if called else cache_shape(module)

    def watch(sizes: Sizes) -> Observation:
        if called:
            return watch_inference(module, Inputs(batch=sizes.batch, prompt=sizes.prompt, total=sizes.total))
        return watch_generation(module, sizes, shape)

    return GenerationCase(
        name=opened.name,
        module=module,
        weights=Weights(sources=by_parameter(opened), verify=verifier(opened)),
        hardware=hardware,
        budget_bytes=budget,
        request=request,
        shape=shape,
        watch=watch,
        spent_bytes=spent_bytes,
        seconds=PassSeconds(module=module, hardware=hardware, host_compute=request.host_compute),
        called=called,
    )


def load_for_generation(
    opened: OpenedModel,
    hardware: Hardware,
    strategy: GenerationStrategy | AmpleStrategy,
    device: Device = "auto",
    on_loaded: OnLoaded = lambda done, total: None,
) -> Loaded:
    """Load the weights of an opened model by the strategy. ``on_loaded`` gets the loaded and the total bytes."""
    weights = Weights(sources=by_parameter(opened), verify=verifier(opened), loaded=_Progress(strategy, on_loaded))
    handle = put_in_force(opened.module, strategy.partition, strategy.plan, hardware, weights, device)
    decoding_graphs.apply(handle)
    return Loaded(module=opened.module, handle=handle, strategy=strategy)


class _Progress:
    """Adds up the loaded bytes of the total; blocks that stream from disk do not count."""

    def __init__(self, strategy: GenerationStrategy | AmpleStrategy, on_loaded: OnLoaded) -> None:
        choices, blocks = strategy.plan.choices(STREAMING), strategy.partition.blocks
        stays = [block.bytes for block in blocks if choices.get(block.name) != FROM_DISK]
        self._total, self._done, self._on_loaded = sum(stays), 0, on_loaded

    def __call__(self, bytes: int) -> None:
        self._done = min(self._done + bytes, self._total)  # tensors outside of blocks are not in the total
        self._on_loaded(self._done, self._total)
