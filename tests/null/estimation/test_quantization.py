"""Layers of 8 and 4 bits take what their libraries' take, at rest and while they work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brim
from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.estimation.models import find_model
from brim.estimation.quantization import Linear4bit, Linear8bit, quantize
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.predict.tracer import trace

HIDDEN, INNER, KEYS, LAYERS, WORDS = 64, 160, 32, 2, 500
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER)
ROWS = LAYERS * (2 * HIDDEN + 2 * KEYS + 2 * INNER + HIDDEN)  # of all linear weights
OTHERS = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN  # embedding, head and norms
COUNT = 7 * LAYERS  # linear layers
ROTARY = 2 * (HIDDEN // 4 // 2) * 4  # bytes of its two buffers


def weights_bytes(found):
    return found.at_peak_bytes["parameters"]


def test_weights_of_eight_bits_take_a_byte_and_a_scale_per_row(folder):
    found = brim.estimate(folder("llama"), task="generate", seq=16, new_tokens=2, precision="int8")
    assert weights_bytes(found) == LINEAR + 4 * ROWS + 2 * OTHERS + ROTARY
    assert any("LLM.int8" in note and f"{LINEAR:,}" in note for note in found.notes)


def test_weights_of_four_bits_take_half_a_byte_and_a_scale_per_64(folder):
    found = brim.estimate(folder("llama"), task="generate", seq=16, new_tokens=2, precision="int4")
    assert weights_bytes(found) == LINEAR // 2 + 4 * LINEAR // 64 + COUNT * 16 * 4 + 2 * OTHERS + ROTARY


@pytest.mark.thorough
def test_weights_of_float8_take_a_byte_to_generate_and_two_to_train(folder):
    generate = brim.estimate(folder("llama"), task="generate", seq=16, new_tokens=2, precision="fp8")
    assert weights_bytes(generate) == LINEAR + 4 * COUNT + 2 * OTHERS + ROTARY
    train, half = (brim.estimate(folder("llama"), seq=16, precision=precision) for precision in ("fp8", "bf16"))
    assert weights_bytes(train) == weights_bytes(half)
    assert train.at_peak_bytes["optimizer_state"] == half.at_peak_bytes["optimizer_state"]
    assert train.peak_bytes.allocated >= half.peak_bytes.allocated  # the casts are passing, nothing is saved


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_adapters_train_on_frozen_weights_of_few_bits(folder, precision):
    half, few = (
        brim.estimate(folder("llama", hidden_size=512, intermediate_size=1024, head_dim=64), seq=16, method="lora",
                      precision=p) for p in ("bf16", precision)
    )  # fmt: skip
    assert weights_bytes(few) < weights_bytes(half)
    embedding = 2 * 500 * 512  # and the output's, which is not tied
    assert few.per_module["base_model.model.model.embed_tokens"] >= 2 * embedding, "float32, as PEFT prepares them"
    assert any("prepare_model_for_kbit_training" in note for note in few.notes)
    assert few.at_peak_bytes["optimizer_state"] == half.at_peak_bytes["optimizer_state"] > 0


def allocated(layer, rows, *, train):
    """Bytes of what one call allocates, in order, and of what is still held after it."""

    def build():
        made = layer(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)).cuda()
        source = torch.ones(rows, 256, dtype=torch.bfloat16, device="cuda", requires_grad=train)

        def step():
            output = made(source)
            if train:
                output.sum().backward()

        return step

    found = trace(build, steps=1)
    start = found.step_starts[0]
    return [s.bytes for s in found.storages if s.born >= start and s.category is not Category.WORKSPACE]


def changed(precision, training=False):
    def change(layer):
        model = nn.Sequential(layer)
        quantize(model, precision, training=training)
        return model

    return change


def test_four_bits_are_unpacked_once_where_there_are_many_rows():
    unpacked = 256 * 512 * 2
    assert unpacked in allocated(changed("int4"), 32, train=False)
    assert unpacked not in allocated(changed("int4"), 4, train=False)
    assert allocated(changed("int4"), 32, train=True).count(unpacked) == 2  # and again in the backward pass


def test_eight_bits_round_their_input_and_widen_their_product():
    sizes = allocated(changed("int8"), 32, train=False)
    rows, product = 32 * 256, 32 * 512
    assert [size in sizes for size in (2 * rows, rows, 4 * 32, 4 * product, 2 * product)] == [True] * 5


def test_float8_casts_all_three_products_anew():
    sizes = allocated(changed("fp8", True), 32, train=True)
    assert sizes.count(256 * 512) >= 2  # the weight, forward and backward
    assert sizes.count(4 * 256 * 512) >= 4  # by way of float32, scaled and clamped
    with pytest.raises(UsageError, match="multiples of 16"):
        allocated(changed("fp8", True), 24, train=True)


@pytest.mark.parametrize(
    ("name", "settings", "error", "told"),
    [
        ("llama", {"precision": "int4"}, UsageError, "method lora"),
        ("llama", {"precision": "int8", "method": "full"}, UsageError, "method lora"),
        ("llama", {"precision": "fp8", "gpu": "A100 80GB", "seq": 16}, UnsupportedError, "float8 units"),
        ("llama", {"precision": "fp8", "seq": 17}, UsageError, "multiples of 16"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(folder, name, settings, error, told):
    with pytest.raises(error, match=told):
        brim.estimate(folder(name), **settings)


def test_a_model_without_linear_layers_has_nothing_to_round():
    with pytest.raises(UnsupportedError, match="0 linear layers"):
        quantize(nn.Sequential(nn.Conv2d(3, 8, 3)), "int8", training=False)


def test_layers_of_gpt2_are_quantized_too(folder):
    job = Job(find_model(folder("gpt2")), Workload(task="generate", precision="int8", seq=16, new_tokens=4))
    model = job.module()
    quantize(model, "int8", training=False)
    kinds = {type(module) for name, module in model.named_modules() if name.endswith(("c_attn", "c_fc", "c_proj"))}
    assert kinds == {Linear8bit}
    assert not any(isinstance(module, Linear4bit) for module in model.modules())
    assert type(model.lm_head) is nn.Linear


@pytest.mark.thorough
def test_a_note_counts_the_layers_of_the_whole_model(folder):
    """The trace has fewer: the others are copies."""
    found = brim.estimate(folder("llama", num_hidden_layers=12), seq=16, precision="int4", method="lora")
    assert any(f"in {12 * 7} linear layers with {12 * LINEAR // 2:,} of " in note for note in found.notes), (
        found.notes
    )
