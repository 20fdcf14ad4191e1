"""``brim.load``: load a model from disk inside a budget that also holds while it is being loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, ModelError, UsageError
from brim.measure.capacity import resident_bytes
from brim.memory import heap
from brim.memory.checkpoint_files import TensorSource
from brim.memory.checksums import Checksum
from brim.run.fit.machine import Device, budgets, computing, machine, on, put_in_force
from brim.run.fit.step_memory import Inputs, watch_inference
from brim.run.generate.choose import GenerationCase, Wanted, search_generation
from brim.run.generate.pass_seconds import PassSeconds
from brim.run.model.file_tensor import FileTensor
from brim.run.model.opening import OpenedModel, open_model
from brim.run.model.quantized import open_quantized
from brim.run.timing.drives import reading_from
from brim.techniques import precision as precisions
from brim.techniques.quantization.technique import Quantization
from brim.techniques.streaming.weight_streaming import Weights

# Packing buffers of kernels, thread stacks and slack of the heap, beside measured and predicted bytes.
SLACK_BYTES = {RAM: 24 << 20, VRAM: 64 << 20}
_WARM_SIZE, _WARM_ROWS = 2048, 512  # the libraries split larger products into such pieces themselves
_PIECE_BYTES = 4 << 20  # copied from a device at once, to be verified
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
    """Load a model for inference, in a memory budget that also holds while it is loaded.

    The module behaves as if all its weights were in memory; weights that do not fit are streamed from RAM or from the
    checkpoint on disk. Results are equal, bit for bit, to those of a model that is entirely in memory, as far as the
    same device computes them: see ``host_compute``. Call it under ``torch.no_grad()``. The KV cache is transformers'
    own: it counts as activations, up to the tokens of ``inputs``, and may grow further. Layers that the processor
    computes keep their part of the cache in RAM.

    Args:
        model: A Hugging Face folder (safetensors), a ``.gguf`` file, or a hub id.
        vram: Budget of the GPU: ``"8GiB"``, bytes, or ``"90%"`` of its capacity. None: nine tenths of what is free.
        ram: Budget of host memory, written alike: for the growth of the process from this call on, for any
            purpose.
        device: ``"auto"`` (CUDA, else the CPU), ``"cuda"``, ``"xpu"``, ``"npu"``, ``"cuda:1"`` (a GPU by number),
            ``"cpu"``, or ``"emulated"``: a part of RAM plays VRAM.
        inputs: The largest step to reserve memory for. None: one sequence of 1,024 tokens, or fewer if the budget is
            small.
        dtype: Type of the weights. None: as in the configuration.
        quantization: ``"int8"``, ``"int4"``, ``"fp8"`` or a ``Quantization``: linear layers in fewer bits, which
            take less memory and time to move, and give other results. They are quantized once, into the user's cache
            folder. None: as stored.
        host_compute: True lets the processor compute blocks that are in RAM, if that is faster than moving them to
            the GPU. Its kernels round differently; with False results are equal to the GPU's bit for bit.
        trust_remote_code: True lets Python code in the model's folder run.

    Returns:
        The module. ``module.brim`` is its handle: ``plan``, ``timeline()``, ``remove()``.

    Raises:
        ModelError: Files are missing or damaged.
        BudgetError: Nothing fits; ``smallest_bytes`` is a sufficient budget.
        UsageError: A value that is not allowed.
        UnsupportedError: brim cannot run the model, or on the device.
    """
    if inputs is not None and not isinstance(inputs, Inputs):
        raise UsageError(
            f"brim.load cannot use inputs of type {type(inputs).__name__}.",
            "They describe the size of a step: brim.run.fit.step_memory.Inputs(batch=..., prompt=..., total=...).",
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
    """The planner's case for ``brim.load``: as for ``brim generate``, but the caller passes the cache."""
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


def by_parameter(opened: OpenedModel) -> dict[str, TensorSource]:
    """Sources by the name of a tensor in ``named_parameters``, which is its first name."""
    sources = {}
    for name, _ in opened.module.named_parameters():
        source = opened.sources.get(name) or opened.sources.get(opened.tied.get(name, ""))
        if source is not None:
            sources[name] = replace(source, name=name)
    return sources


def verifier(opened: OpenedModel) -> Callable[[str, torch.Tensor], None] | None:
    """A function that compares tensors with the recorded checksums; None without any."""
    known = {name: opened.checksums[opened.tied.get(name, name)] for name in opened.checksums}
    if not known:
        return None

    def verify(name: str, value: torch.Tensor) -> None:
        if name in known and _checksum(value) != known[name]:
            folder = Path(opened.sources[opened.tied.get(name, name)].extents[0].path).parent
            raise ModelError(
                f"Cannot use {name} of {opened.name}.",
                "Its bytes are not those that were written: the checksum differs.",
                f"The files in {folder} are damaged: fetch or convert the model again.",
            )

    return verify


def _checksum(value: torch.Tensor) -> int:
    """Checksum of a tensor's bytes. From a device they come in pieces, as RAM may have no room for all of them."""
    data, checksum = value.reshape(-1).view(torch.uint8), Checksum()
    for piece in data.split(data.numel() if value.device.type == "cpu" else _PIECE_BYTES):
        checksum.update(piece.cpu())
    return checksum.value()


def materialize(module: nn.Module, opened: OpenedModel) -> None:
    """Replace meta parameters by CPU parameters without memory; read buffers from the files."""
    parameters: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                # PyTorch chooses CPU kernels by this flag even under no_grad: another value gives other bits.
                parameters[id(parameter)] = nn.Parameter(_hollow(parameter), requires_grad=parameter.requires_grad)
            owner._parameters[name] = parameters[id(parameter)]
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = _read(opened.sources[_path_of(module, owner, name)])


def _hollow(parameter: torch.Tensor) -> torch.Tensor:
    if not parameter.is_meta:
        return parameter.data
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _path_of(module: nn.Module, owner: nn.Module, name: str) -> str:
    prefix = next(path for path, part in module.named_modules() if part is owner)
    return f"{prefix}.{name}" if prefix else name


def _read(source: TensorSource) -> torch.Tensor:
    tensor = FileTensor.open(source).materialize()
    assert type(tensor) is torch.Tensor
    return tensor


def warm_up(
    module: nn.Module, hardware: Hardware, rows: int, device: str = "auto", *, precision: str | None = None
) -> None:
    """Load the libraries' code and buffers into memory, so that their bytes are measured and not guessed.

    Matrix libraries allocate workspaces by the size of the product, so the model's own shapes are multiplied.
    ``precision``: of a training, which on the CPU also runs backward, and may multiply in another type.
    """
    computed = (p.dtype for p in module.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    dtype = next(computed, torch.float32)
    accelerator = computing(device) if hardware.compute == VRAM else None
    where = "cpu" if accelerator is None else accelerator.device
    shapes = {tuple(min(size, _WARM_SIZE) for size in p.shape) for p in module.parameters() if p.dim() == 2}
    if precision is not None and accelerator is None:
        _warm_step(shapes, rows, precisions.autocast_dtype(precision) or dtype)
    with torch.no_grad():
        for out_features, in_features in shapes:
            weight = torch.zeros(out_features, in_features, dtype=dtype, device=where)
            for count in (1, min(rows, _WARM_ROWS)):
                x = nn.functional.linear(torch.zeros(1, count, in_features, dtype=dtype, device=where), weight)
                nn.functional.silu(x).softmax(-1)
        x = torch.zeros(1, 4, min(rows, _WARM_ROWS), 64, dtype=dtype, device=where)
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        if accelerator is not None:
            _load_kernels(x)
    del x
    if accelerator is not None:
        accelerator.empty_cache()  # workspaces of libraries remain


def _warm_step(shapes: Iterable[tuple[int, ...]], rows: int, dtype: torch.dtype) -> None:
    """Run the operations of a decoder's training step that load their own code: products, attention, both
    backward."""
    with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        for out_features, in_features in shapes:
            weight = torch.zeros(out_features, in_features, requires_grad=True)
            states = torch.zeros(1, min(rows, _WARM_ROWS), in_features, requires_grad=True)
            nn.functional.silu(nn.functional.linear(states, weight)).float().softmax(-1).sum().backward()
        heads = torch.zeros(1, 4, 8, 64, dtype=dtype, requires_grad=True)
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().sum().backward()


def _load_kernels(states: torch.Tensor) -> None:
    """Run the decoder operations between products: CUDA loads a kernel's code, to both memories, at its first launch.

    ``states``: attention heads (1, heads, tokens, width).
    """
    table = torch.zeros(8, 256, dtype=states.dtype, device=states.device)
    for heads in (states, states[:, :, -1:]):
        places = torch.arange(heads.shape[2], device=heads.device) * 0 + 1
        hidden = nn.functional.embedding(places[None], table)
        wide = hidden.float()
        normed = table[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)
        nn.functional.layer_norm(hidden, hidden.shape[-1:], table[0], table[0])
        nn.functional.gelu(hidden + normed)
        angles = places[None, :, None].float() @ table[:1, None, :32].float()
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = ((turn * 1.0).to(heads.dtype)[:, None] for turn in (angles.cos(), angles.sin()))
        turned = heads.transpose(1, 2).contiguous().transpose(1, 2)  # in the layout of a projection's result
        half = turned.shape[-1] // 2
        turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), dim=-1) * sin
        torch.cat((turned, turned), dim=-2)
        wide[:, -1].argmax(-1)


def spent(start_bytes: int) -> dict[str, int]:
    """Growth of the program so far plus ``SLACK_BYTES``, per tier."""
    heap.collect_and_trim()
    grown = max(0, resident_bytes() - start_bytes)
    return {RAM: grown + SLACK_BYTES[RAM], VRAM: SLACK_BYTES[VRAM]}
