"""A deep model traced by a few of its layers is, operation by operation, the same as one traced whole."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from brim.estimation import depth, estimate
from brim.estimation.models import find_model
from brim.estimation.steps import Job
from brim.estimation.workload import Workload

LAYERS = 9
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 15, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 500, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip
CASES = [
    ("llama", "num_hidden_layers", {"seq": 32, "batch": 2}),
    ("llama", "num_hidden_layers", {"seq": 32, "precision": "bf16", "optimizer": "sgd", "checkpointing": "full"}),
    ("llama", "num_hidden_layers", {"seq": 32, "precision": "int4", "method": "lora"}),
    ("llama", "num_hidden_layers", {"seq": 32, "task": "generate", "new_tokens": 4}),
    ("gpt2", "n_layer", {"seq": 32, "optimizer": "adafactor"}),
    ("vit", "num_hidden_layers", {"batch": 2, "precision": "fp16-mixed", "optimizer": "adamw8bit"}),
    pytest.param("llama", "num_hidden_layers", DEEPSEEK | {"seq": 32}, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def few_are_deep(monkeypatch):
    """Nine layers are enough to see the rule and quick to trace whole."""
    monkeypatch.setattr(depth, "_FEWEST_LAYERS", LAYERS)


def in_order(trace):
    """Operations and storages' lives in order, without what is built on the host; deaths in a row have no order."""
    events = [(op.at, "op", replace(op, at=0)) for op in trace.ops if op.step >= 0]
    for number, storage in enumerate(sorted(trace.storages, key=lambda storage: storage.born)):
        known = (number, replace(storage, id=0, born=0, died=None))
        events.append((storage.born, "born", known))
        if storage.died is not None:
            events.append((storage.died, "died", known))
    events.sort(key=lambda event: event[0])
    found = []
    for kind, group in itertools.groupby(events, key=lambda event: event[1]):
        rows = [what for _, _, what in group]
        found += [(kind, row) for row in (sorted(rows, key=lambda row: row[0]) if kind == "died" else rows)]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "field", "settings"), CASES)
def test_repeated_layers_are_those_of_a_whole_trace(folder, name, field, settings):
    changes = {key: value for key, value in settings.items() if key in DEEPSEEK}
    source = find_model(folder(name, **{field: LAYERS, **changes}))
    workload = Workload(**{key: value for key, value in settings.items() if key not in DEEPSEEK})
    job = Job(source, workload)
    found, _ = depth.repeated(job, lambda part: estimate._traced_whole(part, (8, 0)))
    whole = Job(source, workload)
    assert found is not None
    expected = estimate._traced_whole(whole, (8, 0))
    assert in_order(found) == in_order(expected)
    assert (found.notes, found.not_modelled) == (expected.notes, expected.not_modelled)
    assert (job.workload, job.ignored, job.notes.keys()) == (whole.workload, whole.ignored, whole.notes.keys())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"num_hidden_layers": 8}),  # too few
        ("t5", {"num_layers": LAYERS, "num_decoder_layers": LAYERS}),  # two stacks
        ("llama", {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": LAYERS,
                   "head_dim": 16}),  # every other layer has a window
        ("llama", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": LAYERS,
                   "use_sliding_window": True, "max_window_layers": 6, "sliding_window": 8}),  # from the seventh on
        ("llama", {"num_hidden_layers": LAYERS, "rescale_every": 6}),  # a setting that may count layers
    ],
)  # fmt: skip
def test_a_model_whose_layers_differ_is_traced_whole(folder, name, changes):
    assert depth.depth_of(find_model(folder(name, **changes))) is None


def test_layers_that_come_first_and_differ_are_traced(folder):
    found = depth.depth_of(find_model(folder("llama", **DEEPSEEK)))
    assert (found.stack.layers, found.stack.special) == (15, 2)
