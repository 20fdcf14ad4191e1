"""Closed forms against traces of the same models: to the byte, wherever a form claims it."""

import json

import pytest

from brim.core import Category
from brim.estimation.estimate import Study
from brim.estimation.models import find_model
from brim.estimation.simulation import place_of
from brim.estimation.workload import Workload
from brim.predict.formulas import kv_cache_of_config, optimizer_state, weights
from brim.predict.formulas.optimizers import OPTIMIZERS

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
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_parameters_and_gradients_are_count_times_size(study, name, precision, dtype):
    made = study(name, precision=precision, **({} if name == "resnet" else {"seq": 16}))
    count = sum(_elements(shape) for shape in made.job.shapes)
    told = weights(count, dtype).value
    assert traced_bytes(made, Category.PARAMETER) == told
    assert traced_bytes(made, Category.GRADIENT, at_end=False) == 2 * told  # in each of the two steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_that_of_the_closed_form(study, optimizer):
    """But for step counters: PyTorch keeps those of AdamW and its like in RAM."""
    made = study("gpt2", seq=16, optimizer=optimizer)
    told = optimizer_state(optimizer, made.job.shapes).value
    counters = {"adafactor": 4, "lion": 0, "sgd": 0, "sgd-momentum": 0}.get(optimizer, 4)
    assert traced_bytes(made, Category.OPTIMIZER_STATE) == told - counters * len(made.job.shapes)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_key_value_cache_is_that_of_the_closed_form(study, name):
    """The cache that the last token leaves behind: the prompt and all new tokens but the last."""
    made = study(name, task="generate", batch=3, seq=20, new_tokens=5, precision="bf16")
    told = kv_cache_of_config(CONFIGS[name], tokens=20 + 5 - 1, batch=3, dtype="bfloat16").value
    caches = [s for s in made.trace.storages if s.category is Category.KV_CACHE]
    layers = 2 * 2  # keys and values of two layers
    assert sum(s.bytes for s in sorted(caches, key=lambda s: s.born)[-layers:]) == told


def _elements(shape):
    count = 1
    for size in shape:
        count *= size
    return count
