"""Training of CNNs and small transformers on GeForce cards, as the xMem paper's runs were built (arXiv 2510.21048).

Measured is the growth of the device's used memory after the context was made; predicted is the reserved peak. What
libraries load while a step runs is in the measurement only: transformers show no more than two MiB of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, optimization

import brim
from brim.catalog.gpus import gpu as find_gpu
from brim.catalog.presets import model as preset
from brim.core import Trace
from brim.estimation.bounds import margins
from brim.estimation.simulation import place_of
from support.accuracy import ground_truth
from support.accuracy.early_2025 import from_config, transformers_4_51
from support.accuracy.table import Row
from support.zoo import MODELS

STEPS = 4
_TOKENS = 128
# Batches of fewer than ten lines are often shorter than the 128 tokens that a line is cut at, and differ from one
# another. How long they were was not recorded: predicted is a run of full ones, which is also the middle one of runs
# of five lines drawn with the lengths that WikiText-2's lines have. The bound is also for lengths that
# rise and for short batches between full ones, where what is cached does not serve the next batch.
_FULL_FROM = 10
_FULL = (_TOKENS,) * STEPS
_VARIED = ((32, 64, 96, 128), (64, 128, 96, 128))
_CNNS = {
    "vgg16": "vgg16", "vgg19": "vgg19", "resnet101": "resnet101", "resnet152": "resnet152",
    "mobilenetv2": "mobilenet_v2", "mobilenetv3small": "mobilenet_v3_small", "mobilenetv3large": "mobilenet_v3_large",
    "mnasnet": "mnasnet1_0", "regnetx400mf": "regnet_x_400mf", "regnety400mf": "regnet_y_400mf",
    "convnexttiny": "convnext_tiny", "convnextbase": "convnext_base",
}  # fmt: skip
_TEN_CLASSES = ("mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0")


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "Adafactor":
        adafactor: torch.optim.Optimizer = optimization.Adafactor(parameters, lr=0.001, relative_step=False)
        return adafactor
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.001)
    return made


def cnn(name: str, optimizer: str, batch: int) -> Callable[[], Callable[[], None]]:
    """The step of one CNN run; the loop's variables stay alive from iteration to iteration, as in a script."""
    known = _CNNS[name.lower().replace("_", "")]
    classes = 10 if known in _TEN_CLASSES else 1000

    def loop() -> Iterator[None]:
        model = MODELS[known](classes=classes).to("cuda")
        criterion = nn.CrossEntropyLoss()
        steps = _optimizer(optimizer, model.parameters())
        yield
        while True:
            inputs, labels = torch.empty(batch, 3, 86, 86), torch.zeros(batch, dtype=torch.int64)
            steps.zero_grad()
            inputs, labels = inputs.to("cuda"), labels.to("cuda")
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            steps.step()
            _best, _classes = torch.max(outputs.data, 1)
            yield

    return _stepped(loop)


def language_model(
    name: str, optimizer: str, batch: int, lengths: tuple[int, ...] = _FULL
) -> Callable[[], Callable[[], None]]:
    """The step of one transformer run on batches of these lengths."""
    entry = preset(name if "/" in name else name.lower())

    def loop() -> Iterator[None]:
        config = dict(entry.config)
        made: Any = AutoConfig.for_model(config.pop("model_type"), **config)
        family = AutoModelForSeq2SeqLM if made.is_encoder_decoder else AutoModelForCausalLM
        model = from_config(family, made)
        model.train()
        steps = _optimizer(optimizer, model.parameters())
        model.to("cuda")
        yield
        for tokens in lengths:
            inputs = torch.ones(batch, tokens, dtype=torch.int64).to("cuda")
            mask = torch.ones(batch, tokens, dtype=torch.int64).to("cuda")
            labels = inputs.clone()
            steps.zero_grad()
            outputs = model(input_ids=inputs, attention_mask=mask, labels=labels)
            loss = outputs.loss
            loss.backward()
            steps.step()
            yield

    return _stepped(loop)


def _stepped(loop: Callable[[], Iterator[None]]) -> Callable[[], Callable[[], None]]:
    def build() -> Callable[[], None]:
        running = loop()
        next(running)

        def step() -> None:
            next(running)

        return step

    return build


def _traced(row: dict[str, str], lengths: tuple[int, ...]) -> Trace:
    model, optimizer, batch = row["model"], row["optimizer"], int(row["batch_size"])
    if row["family"] == "CNN":
        build = cnn(model, optimizer, batch)
    else:
        build = language_model(model, optimizer, batch, lengths)
    major, minor = (find_gpu(row["gpu"]).compute_capability or "8.6").split(".")
    with transformers_4_51():
        return brim.trace(build, steps=STEPS, target="cuda", capability=(int(major), int(minor)))


def _bound_bytes(made: Trace, gpu: str) -> int:
    """The upper bound without the context, which the measurement leaves out."""
    timeline = brim.simulate(made, gpu=gpu)
    return timeline.peak_bytes.reserved + sum(m.bytes for m in margins(made, timeline, place_of(gpu), ""))


def predict(row: dict[str, str]) -> Row:
    started = time.perf_counter()
    card = find_gpu(row["gpu"])
    made = _traced(row, _FULL)
    timeline = brim.simulate(made, gpu=card.name)
    reserved = timeline.peak_bytes.reserved
    bound = _bound_bytes(made, card.name)
    if row["family"] != "CNN" and int(row["batch_size"]) < _FULL_FROM:
        bound = max(bound, *(_bound_bytes(_traced(row, lengths), card.name) for lengths in _VARIED))
    measured = float(row["ground_bytes"])
    rivals = {name: row[f"{name}_rel_err"] for name in ("xMem", "DNNmem", "SchedTune", "LLmem")}
    return Row(
        name=f"{row['model'].rpartition('/')[2]} {row['optimizer']} {row['batch_size']} {row['gpu'].split()[-1]}",
        predicted_bytes=reserved,
        measured_bytes=measured,
        seconds=time.perf_counter() - started,
        rivals={name: float(error) for name, error in rivals.items() if error},
        notes={
            "allocated": timeline.peak_bytes.allocated / (1 << 20),
            "gap": (measured - reserved) / (1 << 20),
            "upper bound": bound / (1 << 20),
            "bound over": (bound - measured) / (1 << 20),
        },
    )


def rows(only: str = "") -> list[Row]:
    """Every run that did not run out of memory; ``only`` keeps those whose model has it in its name."""
    wanted = [row for row in ground_truth.rows("xmem.csv") if row["real_oom"] == "0" and only in row["model"].lower()]
    return [predict(row) for row in wanted]
