"""``brim.load`` and generation: a model on disk, inside a budget that also holds while it is being loaded."""

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

# What kernels' packing buffers, thread stacks and the heap's slack take beside what is measured and predicted.
SLACK_BYTES = {RAM: 24 << 20, VRAM: 64 << 20}
_WARM_SIZE, _WARM_ROWS = 2048, 512  # larger products are cut into such pieces by the libraries themselves
_PIECE_BYTES = 4 << 20  # that come back from a device to be verified
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
            "They give the size of a step: brim.run.fit.step_memory.Inputs(batch=..., prompt=..., total=...).",
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


def by_parameter(opened: OpenedModel) -> dict[str, TensorSource]:
    """Sources by the name that ``named_parameters`` gives a tensor, which is its first one."""
    sources = {}
    for name, _ in opened.module.named_parameters():
        source = opened.sources.get(name) or opened.sources.get(opened.tied.get(name, ""))
        if source is not None:
            sources[name] = replace(source, name=name)
    return sources


def verifier(opened: OpenedModel) -> Callable[[str, torch.Tensor], None] | None:
    """Compares what is read with the checksums that were written with it."""
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
    """Of a tensor's bytes, wherever they are; from a device they come in pieces, as RAM may have no room for all."""
    data, made = value.reshape(-1).view(torch.uint8), Checksum()
    for piece in data.split(data.numel() if value.device.type == "cpu" else _PIECE_BYTES):
        made.update(piece.cpu())
    return made.value()


def materialize(module: nn.Module, opened: OpenedModel) -> None:
    """Parameters on meta become parameters on the CPU that hold nothing yet; buffers are read."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                # PyTorch chooses CPU kernels by this flag even under no_grad: another value gives other bits.
                made[id(parameter)] = nn.Parameter(_hollow(parameter), requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]
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
    """Touch the libraries' code and buffers, so that what they take is measured and not guessed.

    Matrix libraries keep scratch memory by the size of the product, so the model's own shapes are multiplied.
    ``precision``: that of a training, which on the CPU goes backward too, and may multiply in another type.
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
        accelerator.empty_cache()  # but for the libraries' workspaces


def _warm_step(shapes: Iterable[tuple[int, ...]], rows: int, dtype: torch.dtype) -> None:
    """What of a decoder's step in that type brings code of its own: products, attention, and both backward."""
    with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        for out_features, in_features in shapes:
            weight = torch.zeros(out_features, in_features, requires_grad=True)
            states = torch.zeros(1, min(rows, _WARM_ROWS), in_features, requires_grad=True)
            nn.functional.silu(nn.functional.linear(states, weight)).float().softmax(-1).sum().backward()
        heads = torch.zeros(1, 4, 8, 64, dtype=dtype, requires_grad=True)
        nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).float().sum().backward()


def _load_kernels(states: torch.Tensor) -> None:
    """What decoders do between products: CUDA loads a kernel's code, to both memories, when it is first launched.

    ``states``: of heads (1, heads, tokens, width).
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
        turned = heads.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection makes them
        half = turned.shape[-1] // 2
        turned = turned * cos + torch.cat((-turned[..., half:], turned[..., :half]), dim=-1) * sin
        torch.cat((turned, turned), dim=-2)
        wide[:, -1].argmax(-1)


def spent(start_bytes: int) -> dict[str, int]:
    """What the program has grown by until now, and the slack, per tier."""
    heap.collect_and_trim()
    grown = max(0, resident_bytes() - start_bytes)
    return {RAM: grown + SLACK_BYTES[RAM], VRAM: SLACK_BYTES[VRAM]}
