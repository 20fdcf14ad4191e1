"""Load libraries' code and buffers before planning, so that their bytes are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from brim.core import Hardware
from brim.core.hardware import RAM, VRAM
from brim.memory import heap
from brim.planning.inference.machine import computing
from brim.planning.seconds.measurement_cache import Remembered
from brim.techniques import precision as precisions

# Packing buffers of kernels, thread stacks and slack of the heap, beside measured and predicted bytes.
SLACK_BYTES = {RAM: 24 << 20, VRAM: 64 << 20}
_WARM_SIZE, _WARM_ROWS = 2048, 512  # the libraries split larger products into such pieces themselves
_METHOD = 2  # raised when the measurement of most_grown changes
_WORTH_BYTES = 1 << 20  # a smaller difference is not written down


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


def spent(start_bytes: int, slack_bytes: Mapping[str, int] = SLACK_BYTES) -> dict[str, int]:
    """Growth of the program so far plus ``slack_bytes``, per tier."""
    return {**slack_bytes, RAM: max(0, heap.used_resident_bytes() - start_bytes) + slack_bytes[RAM]}


def most_grown(task: str, model: torch.nn.Module, tokens: int, grown_bytes: int, left_bytes: int = 0) -> int:
    """Return ``grown_bytes``, or a larger earlier value for the same ``task`` and a ``model`` of the same size.

    A run is a process of its own: it loads libraries' code, the tokenizer, heaps and kernels' buffers anew. A process
    that plans twice sees their size only the first time, so the largest value of a model is kept. Not where measuring
    the machine has just left some (``left_bytes``) that a run does not have.
    """
    if left_bytes:
        return grown_bytes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    memory = Remembered("program-share", (_METHOD, torch.__version__, torch.get_num_threads()))
    name = f"{task} {type(model).__name__} {parameters} {tokens}"
    most_bytes = int((memory.get(name, count=1) or [0.0])[0])
    if grown_bytes > most_bytes + _WORTH_BYTES:
        memory.keep({name: [float(grown_bytes)]})
    return max(most_bytes, grown_bytes)
