"""torchtune's technique ladder: Llama 3.2 3B on one A100, batch 2, 4,096 tokens, bf16, peak active memory.

The ladder is cumulative. From its third rung on everything is compiled, and brim does not model a compiler. Under
activation checkpointing a compiled layer still keeps its input only, so what differs is the loss. ``CompiledLoss``
says by hand what the compiler makes of it, from sources and not from the measured peaks: torchtune compiles
``compute_cross_entropy``, as "the CE and upcasting have to be compiled together" (torchtune/modules/loss/
ce_chunked_output_loss.py); AOTAutograd's partitioner keeps the narrowest tensors from forward to backward and
computes pointwise operations again (torch/_functorch/partitioners.py), so here bf16 logits and numbers per row; and
Inductor fuses the rest into one loop that writes the gradient. The note ``eager GiB`` is the rung predicted with the
loss as it is written, uncompiled.

QLoRA is predicted with the layers of 4 bits that ``brim estimate`` has: bitsandbytes', whose scales take 4 bytes per
64 weights where torchtune's (torchao's NF4) take a little over one. Left out are the baseline (its batches' lengths
were not published), the rungs between packing and checkpointing (what a compiler makes of whole layers) and 8-bit
AdamW: it is torchao's, a compiled step over each parameter in float32, and which of its intermediate results lie in
memory is Inductor's choice, which changed since: with what Inductor of torch 2.13 keeps
(``brim.estimation.optimizers``), the rung is 9 % under the published 17.6 GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import brim
from brim.catalog.presets import model as preset
from brim.core import Trace
from brim.estimation.extrapolation import extend_depth
from brim.estimation.quantization import lora_layers, quantize
from support.accuracy import ground_truth
from support.accuracy.table import Row

_GIB = 1 << 30
_LAYERS = 28
_FEW = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the rung turns on; each holds all that came before, except that LoRA takes a plain optimizer again."""

    tokens: int = 4096
    chunks: int = 1  # more than one: of the compiled loss
    checkpointing: bool = False
    offloading: bool = False
    optimizer_in_backward: bool = False
    lora: bool = False
    four_bits: bool = False  # the weights that LoRA leaves as they are
    compiled: bool = True  # the loss in parts


RUNGS = {
    "+ Packed Dataset": Recipe(),
    "+ Activation Checkpointing": Recipe(chunks=8, checkpointing=True),
    "+ Fuse optimizer step into backward": Recipe(chunks=8, checkpointing=True, optimizer_in_backward=True),
    "+ Activation Offloading": Recipe(chunks=8, checkpointing=True, optimizer_in_backward=True, offloading=True),
    "LoRA": Recipe(chunks=8, checkpointing=True, offloading=True, lora=True),
    "QLoRA": Recipe(chunks=8, checkpointing=True, offloading=True, lora=True, four_bits=True),
}


class CompiledLoss(torch.autograd.Function):
    """Cross entropy of (rows, classes), fused: a number per row is kept, the gradient written at once."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = logits.new_empty(logits.size(0), dtype=torch.float32)
        context.save_for_backward(logits, labels, sums)
        return sums.sum()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _, _ = context.saved_tensors
        return torch.empty_like(logits), None


def _model(rung: Recipe, layers: int) -> Any:
    settings = dict(preset("llama-3.2-3b").config) | {"num_hidden_layers": layers}
    config: Any = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    if rung.four_bits:
        quantize(model, "int4", training=True)
    model.to("cuda")
    if rung.lora:
        linear = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        wanted = LoraConfig(r=64, lora_alpha=128, target_modules=list(linear), base_model_name_or_path="llama")
        wanted._register_custom_module(lora_layers())
        model = get_peft_model(model, wanted, autocast_adapter_dtype=False)
        for parameter in model.parameters():  # over packed weights peft makes float32 ones, torchtune bfloat16
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        model.enable_input_require_grads()
    if rung.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


def _eager_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor, rung: Recipe) -> torch.Tensor:
    """torchtune's losses: logits in float32 as a whole, or in bf16 one part of the tokens after the other."""
    head = model.get_output_embeddings()
    if rung.chunks == 1:
        return functional.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    logits = [head(part) for part in hidden.chunk(rung.chunks, 1)]
    of_part: Callable[..., torch.Tensor] = CompiledLoss.apply if rung.compiled else _eager_loss
    parts = zip(logits, labels.chunk(rung.chunks, 1), strict=True)
    losses = [of_part(x.flatten(0, 1), y.flatten()) for x, y in parts]
    return torch.stack(losses).sum() / labels.numel()


def _kept(offloading: bool) -> AbstractContextManager[None]:
    """Everything that forward saves goes to pinned memory, but for the parameters."""
    if not offloading:
        return nullcontext()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) or tensor.numel() < 1024 else tensor.to("cpu")

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.to("cuda")

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _optimize(parameters: list[nn.Parameter], in_backward: bool) -> Callable[[], None]:
    """Fused AdamW over all parameters, or one per parameter that steps as soon as its gradient is there."""
    if not in_backward:
        whole = torch.optim.AdamW(parameters, lr=2e-5, fused=True)

        def step() -> None:
            whole.step()
            whole.zero_grad()

        return step

    def hook(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def stepped(parameter: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return stepped

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook(torch.optim.AdamW([parameter], lr=2e-5, fused=True)))
    return lambda: None


def build(rung: Recipe, layers: int = _LAYERS) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = _model(rung, layers)
        decoder = model.get_base_model().model if rung.lora else model.model
        optimize = _optimize([p for p in model.parameters() if p.requires_grad], rung.optimizer_in_backward)

        def step() -> None:
            tokens = torch.ones(2, rung.tokens, dtype=torch.int64).to("cuda")
            labels = torch.ones(2, rung.tokens, dtype=torch.int64).to("cuda")
            with _kept(rung.offloading):
                hidden = decoder(input_ids=tokens).last_hidden_state
                loss = _loss(model, hidden, labels, rung)
            del hidden
            loss.backward()
            optimize()

        return step

    return make


def measured() -> Iterator[tuple[str, float]]:
    """Every rung of the ladder in its order, with the bytes that were published."""
    for row in ground_truth.rows("published_tables.csv"):
        if row["source"] == "torchtune technique ladder":
            yield row["method"], float(row["peak"]) * _GIB


def _traced(rung: Recipe, layers: int) -> Trace:
    return brim.trace(build(rung, layers), steps=2, target="cuda", capability=(8, 0))


def peak_bytes(rung: Recipe) -> int:
    """From three traces of a few layers where all are alike (``extrapolation``), else from one of all."""
    found = extend_depth([_traced(rung, layers) for layers in _FEW], _LAYERS - _FEW[0])
    made = _traced(rung, _LAYERS) if found is None else found[0]
    return brim.simulate(made).peak_bytes.allocated


def rows(only: str = "") -> list[Row]:
    """Every rung that can be built; ``change`` is the predicted change over the measured one, from rung to rung."""
    found: list[Row] = []
    for method, there in measured():
        rung = RUNGS.get(method)
        if rung is None or only not in method:
            continue
        started = time.perf_counter()
        peak = peak_bytes(rung)
        notes = {}
        if rung.chunks > 1:
            notes["eager GiB"] = peak_bytes(replace(rung, compiled=False)) / _GIB
        if found:
            before = found[-1]
            notes["change GiB"] = (peak - before.predicted_bytes) / _GIB
            notes["measured change"] = (there - before.measured_bytes) / _GIB
        seconds = time.perf_counter() - started
        found.append(Row(name=method, predicted_bytes=peak, measured_bytes=there, seconds=seconds, notes=notes))
    return found
