"""Fine-tuning Llama-3.2-3B with every adapter of peft's method comparison (MetaMathQA), reserved memory.

A run's batches differ in length; its peak is set by the longest. The tokenizer cuts at 768 tokens, and that is the
length predicted for: the data themselves are not needed. Batches are sorted from long to short in groups of twenty
and the cache is emptied every ten steps, so the longest follows upon an empty cache.

Adapters are peft's own classes, as they were then (``mid_2026.py``). FRoD cannot be built: it sums up the positions
of a random sparse matrix, and a trace has no values.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import brim
from brim.catalog.gpus import gpu as find_gpu
from brim.catalog.presets import model as preset
from brim.core import Trace
from brim.errors import BrimError
from brim.estimation.extrapolation import extend_depth
from support.accuracy import ground_truth
from support.accuracy.mid_2026 import peft_0_19
from support.accuracy.table import Row

STEPS = 2
LONGEST = 768
_LAYERS = 28
_FEW = (2, 3, 4)
_SHORT = 256  # of the batch that creates the optimizer's state
# What the table's copy of a configuration leaves out: experiments/osf/llama-3.2-3B-rank128/adapter_config.json there.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "osf/llama-3.2-3B-rank128": {
        "rank_pattern": dict.fromkeys(("q_proj", "o_proj", "gate_proj", "down_proj", "up_proj"), 2944)
        | dict.fromkeys(("k_proj", "v_proj"), 896)
    }
}


def _model(row: dict[str, str], layers: int) -> Any:
    settings = dict(preset(row["model"]).config) | {"num_hidden_layers": layers}
    config: Any = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, row["dtype"])).to("cuda")
    if row["peft_type"] == "FULL":
        return model
    given = json.loads(row["peft_config"]) | _LEFT_OUT.get(row["experiment"], {})
    if given.get("adapter_layers") == _LAYERS:
        given["adapter_layers"] = layers
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(given.pop("peft_type"))]
    fields = {field.name for field in dataclasses.fields(kind)}
    chosen = kind(**{name: value for name, value in given.items() if name in fields})
    made = peft.get_peft_model(model, chosen, autocast_adapter_dtype=row["autocast_adapter_dtype"] == "True")
    for name, parameter in made.named_parameters():
        if ".ranknum." in name:  # AdaLoRA's counters are not among the measured runs' trained parameters
            parameter.requires_grad_(False)
    return made


def _optimizer(row: dict[str, str], model: Any) -> torch.optim.Optimizer:
    options = json.loads(row["optimizer_kwargs"])
    if row["optimizer"] == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer  # asks for more of peft than the others

        return create_lorafa_optimizer(model, **options)  # type: ignore[no-any-return]
    return getattr(torch.optim, row["optimizer"])(model.parameters(), **options)  # type: ignore[no-any-return]


def _check_trained(row: dict[str, str], model: Any, layers: int) -> None:
    """The adapter is the measured one if as many parameters are trained."""
    if layers < _LAYERS:
        return
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    measured = int(row["num_trainable_params"])
    if trained != measured:
        print(f"{row['experiment']}: {trained:,} parameters trained here, {measured:,} there", file=sys.stderr)


def _clip(model: Any) -> None:
    """``clip_grad_norm_`` but for its table of norms, four bytes a parameter: its size differs with the depth."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = torch._foreach_norm(gradients)
    coefficient = 1.0 / (norms[0] + 1e-6)
    torch._foreach_mul_(gradients, torch.clamp(coefficient, max=1.0))


def build(row: dict[str, str], layers: int = _LAYERS) -> Callable[[], Callable[[], None]]:
    """One experiment's training step, with the loop's variables alive from step to step."""

    def loop() -> Iterator[None]:
        model = _model(row, layers)
        optimizer = _optimizer(row, model)
        _check_trained(row, model, layers)
        model.train()
        yield
        for tokens in (_SHORT, LONGEST):
            torch.cuda.empty_cache()
            shape = (int(row["batch_size"]), tokens)
            batch = {
                name: torch.ones(shape, dtype=torch.int64).to("cuda") for name in ("input_ids", "attention_mask")
            }
            batch["labels"] = batch["input_ids"].clone()
            optimizer.zero_grad()
            outputs = model(**batch, num_items_in_batch=shape[0] * shape[1])
            loss = outputs.loss
            loss.backward()
            _clip(model)
            optimizer.step()
            yield

    def make() -> Callable[[], None]:
        running = loop()
        next(running)

        def step() -> None:
            next(running)

        return step

    return make


def _traced(row: dict[str, str]) -> Trace:
    """From three traces of a few layers where all are alike (``extrapolation``), else from one of all."""
    card = find_gpu(row["gpu"])
    major, minor = (card.compute_capability or "8.9").split(".")

    def traced(layers: int) -> Trace:
        with peft_0_19():
            return brim.trace(build(row, layers), steps=STEPS, target="cuda", capability=(int(major), int(minor)))

    few = [begun(traced(layers)) for layers in _FEW]
    found = extend_depth(few, _LAYERS - _FEW[0])
    return begun(traced(_LAYERS)) if found is None else found[0]


def begun(made: Trace) -> Trace:
    """Without what came and went while the model was built: ``empty_cache`` follows, and peft's order is its own."""
    start = made.step_starts[0]
    kept = (storage for storage in made.storages if storage.died is None or storage.died >= start)
    return replace(
        made,
        ops=tuple(op for op in made.ops if op.at >= start),
        storages=tuple(replace(storage, id=index) for index, storage in enumerate(kept)),
    )


def predict(row: dict[str, str]) -> Row:
    started = time.perf_counter()
    timeline = brim.simulate(_traced(row), gpu=find_gpu(row["gpu"]).name)
    return Row(
        name=row["experiment"].replace("/llama-3.2-3B", ""),
        predicted_bytes=timeline.peak_bytes.reserved,
        measured_bytes=float(row["mem_max_bytes"]),
        seconds=time.perf_counter() - started,
        notes={"allocated": timeline.peak_bytes.allocated / (1 << 20)},
    )


def rows(only: str = "") -> list[Row]:
    """Every Llama-3.2-3B experiment that can be built; what cannot is named on standard error."""
    found = []
    for row in ground_truth.rows("peft_method_comparison.csv"):
        if row["task"] != "MetaMathQA" or "Llama-3.2-3B" not in row["model"] or only not in row["experiment"]:
            continue
        try:
            found.append(predict(row))
        except (BrimError, RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            print(f"{row['experiment']}: not built: {str(error)[:300]}", file=sys.stderr)
    return found
