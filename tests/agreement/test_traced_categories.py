"""Weights, gradients, optimizer states and caches of traces are those of sums by hand, to the byte."""

import json
import math

import pytest

from brim.core import Category
from brim.estimation.estimate import Study
from brim.estimation.models import find_model
from brim.estimation.simulation import place_of
from brim.estimation.workload import Workload
from brim.predict.optimizer_states import OPTIMIZERS, state_bytes

CONFIGS = {
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
    },
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
             "n_positions": 128, "vocab_size": 500},
    "resnet": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": [1, 1],
               "hidden_sizes": [16, 32], "embedding_size": 16, "layer_type": "basic"},
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    def make(name, **settings):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return Study(find_model(tmp_path), Workload(**settings), place_of(None), None, "")

    return make


def traced_bytes(study, category, *, at_end=True):
    storages = study.trace.storages
    return sum(s.bytes for s in storages if s.category is category and (s.died is None or not at_end))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("precision", "item_bytes"), [("fp32", 4), ("bf16", 2)])
def test_parameters_and_gradients_are_count_times_size(study, name, precision, item_bytes):
    made = study(name, precision=precision, **({} if name == "resnet" else {"seq": 16}))
    told = sum(map(math.prod, made.job.shapes)) * item_bytes
    assert traced_bytes(made, Category.PARAMETER) == told
    assert traced_bytes(made, Category.GRADIENT, at_end=False) == 2 * told  # in each of the two steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_that_of_the_formula(study, optimizer):
    """But for step counters: PyTorch keeps those of AdamW and its like in RAM."""
    made = study("gpt2", seq=16, optimizer=optimizer)
    told = sum(state_bytes(optimizer, shape, item_bytes=4) for shape in made.job.shapes)
    counters = {"adafactor": 4, "lion": 0, "sgd": 0, "sgd-momentum": 0}.get(optimizer, 4)
    assert traced_bytes(made, Category.OPTIMIZER_STATE) == told - counters * len(made.job.shapes)


@pytest.mark.parametrize(("name", "width"), [("llama", 2 * 16), ("gpt2", 4 * 16)])
def test_the_key_value_cache_has_the_prompt_and_the_new_tokens(study, name, width):
    """The cache that the last token leaves behind: the prompt and all new tokens but the last."""
    made = study(name, task="generate", batch=3, seq=20, new_tokens=5, precision="bf16")
    caches = [s for s in made.trace.storages if s.category is Category.KV_CACHE]
    layers = 2 * 2  # keys and values of two layers
    told = layers * 3 * (20 + 5 - 1) * width * 2
    assert sum(s.bytes for s in sorted(caches, key=lambda s: s.born)[-layers:]) == told
