"""QLoRA of Qwen2.5 by bitsandbytes and PEFT on an RTX 4080: allocated and reserved memory.

Ten runs of two or three steps that DaoyuanLi2816/can-i-finetune-this published (commit 053ce9e1, benchmarks/results):
NF4 with double quantization, PEFT's ``prepare_model_for_kbit_training``, adapters of rank 16 in the four products of
attention, no autocast, PyTorch 2.6 on Windows. The optimizer was bitsandbytes' paged 8-bit AdamW, whose states are
in unified memory; SGD stands for it, which has none. The loop keeps a step's outputs until the next one's are there.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

import brim
from brim.estimation.extrapolation import extend_depth
from brim.estimation.models import Source, find_model
from brim.estimation.packed_weights import as_stored
from support.accuracy.peft import begun
from support.accuracy.table import Row

_GIB = 1 << 30
_FEW = (2, 3, 4)  # layers
# Hidden, intermediate, layers, heads, key-value heads, vocabulary and tied embeddings, of the models' config.json.
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18944, 28, 28, 4, 152_064, False),
}
_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_NF4 = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published run; peaks in GiB."""

    size: str
    tokens: int
    batch: int
    checkpointed: bool
    allocated: float
    reserved: float


RUNS = (
    Run("0.5B", 1024, 1, True, 3.1158, 3.3027), Run("0.5B", 2048, 1, True, 5.5220, 6.2812),
    Run("1.5B", 512, 1, True, 2.7943, 2.9062), Run("1.5B", 1024, 1, True, 4.0413, 4.3574),
    Run("1.5B", 1024, 1, False, 9.3413, 9.5527), Run("1.5B", 1024, 2, True, 6.5311, 6.8809),
    Run("1.5B", 2048, 1, True, 6.5324, 7.0977), Run("1.5B", 4096, 1, True, 11.5068, 13.5566),
    Run("3B", 1024, 1, True, 5.1719, 5.5371), Run("7B", 1024, 1, True, 10.0023, 11.2324),
)  # fmt: skip


def _source(run: Run, layers: int) -> Source:
    sizes = dict(zip(_NAMES, _SIZES[run.size], strict=True)) | {"num_hidden_layers": layers}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "quantization_config": _NF4, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        return find_model(file)


def _model(run: Run, layers: int) -> Any:
    source = _source(run, layers)
    config = AutoConfig.for_model(**{k: v for k, v in source.config.items() if k != "quantization_config"})
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    as_stored(model, source, (8, 9))
    model = model.cuda()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    if run.checkpointed:  # not re-entrant by default since transformers 5
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    products = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=products, task_type="CAUSAL_LM"))


def _build(run: Run, layers: int) -> Callable[[], Callable[[], None]]:
    def loop() -> Iterator[None]:
        model = _model(run, layers).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        yield
        while True:
            names = ("input_ids", "attention_mask", "labels")
            batch = {name: torch.ones((run.batch, run.tokens), dtype=torch.int64).to("cuda") for name in names}
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield

    def make() -> Callable[[], None]:
        running = loop()
        next(running)
        return lambda: next(running)

    return make


def predict(run: Run) -> Row:
    started = time.perf_counter()
    few = [begun(brim.trace(_build(run, layers), steps=2, target="cuda", capability=(8, 9))) for layers in _FEW]
    extended = extend_depth(few, _SIZES[run.size][2] - _FEW[0])
    assert extended is not None
    peaks = brim.simulate(extended[0], gpu="RTX 4080").peak_bytes
    return Row(
        name=f"{run.size}, {run.batch} x {run.tokens}{'' if run.checkpointed else ', no checkpointing'}",
        predicted_bytes=peaks.allocated,
        measured_bytes=run.allocated * _GIB,
        seconds=time.perf_counter() - started,
        notes={"reserved, %": 100 * (peaks.reserved / (run.reserved * _GIB) - 1)},
    )


def rows(only: str = "") -> list[Row]:
    return [predict(run) for run in RUNS if only in run.size]
