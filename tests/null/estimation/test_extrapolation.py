"""A trace extended from a few layers, or a few tokens, equals the trace of all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from brim.errors import UsageError
from brim.estimation import estimate, extrapolation
from brim.estimation.extrapolation import TRACED_TOKENS, extend_tokens, find_depth
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


@pytest.fixture
def few_are_deep(monkeypatch):
    """Nine layers are enough to see the rule and quick to trace whole."""
    monkeypatch.setattr(extrapolation, "_FEWEST_LAYERS", LAYERS)


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
@pytest.mark.usefixtures("few_are_deep")
def test_repeated_layers_are_those_of_a_whole_trace(folder, name, field, settings):
    changes = {key: value for key, value in settings.items() if key in DEEPSEEK}
    source = find_model(folder(name, **{field: LAYERS, **changes}))
    workload = Workload(**{key: value for key, value in settings.items() if key not in DEEPSEEK})
    job = Job(source, workload)
    found = estimate._traced(job, (8, 0))
    whole = Job(source, workload)
    assert job.template is not None
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
@pytest.mark.usefixtures("few_are_deep")
def test_a_model_whose_layers_differ_is_traced_whole(folder, name, changes):
    assert find_depth(find_model(folder(name, **changes))) is None


@pytest.mark.usefixtures("few_are_deep")
def test_layers_that_come_first_and_differ_are_traced(folder):
    found = find_depth(find_model(folder("llama", **DEEPSEEK)))
    assert (found.layers, found.special) == (15, 2)


def whole_and_repeated(path, **settings):
    source, workload = find_model(path), Workload(task="generate", new_tokens=12, **settings)
    whole = estimate._traced(Job(source, workload), (8, 0))
    return whole, estimate.traced(Job(source, workload), (8, 0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_repeated_tokens_are_those_of_a_whole_trace(folder, name):
    whole, repeated = whole_and_repeated(folder(name), batch=2, seq=20)
    assert repeated.storages == whole.storages
    assert [op.fill for op in repeated.ops] == pytest.approx([op.fill for op in whole.ops], rel=1e-9)
    assert [replace(op, fill=1.0) for op in repeated.ops] == [replace(op, fill=1.0) for op in whole.ops]


@pytest.mark.parametrize(("name", "wanted"), [
    ("qwen2.5-7b", False), ("qwen3-30b-a3b", False), ("mistral-7b", True), ("gpt-oss-20b", True),
    ("llama-4-scout", True),
])  # fmt: skip
def test_a_window_that_is_not_used_is_none(name, wanted):
    assert Job(find_model(name), Workload(task="generate")).has_windows is wanted


@pytest.mark.thorough
def test_an_encoder_decoder_is_repeated_within_its_positions(folder):
    """The prompt stays as long as it is: what is checked further on is further on in the decoder."""
    path = folder("bart")
    whole, repeated = whole_and_repeated(path, seq=64)
    assert repeated.storages == whole.storages
    assert repeated.ops == whole.ops
    with pytest.raises(UsageError, match="decoder"):
        estimate.traced(Job(find_model(path), Workload(task="generate", seq=64, new_tokens=65)), (8, 0))


@pytest.mark.thorough
def test_what_does_not_repeat_is_traced(folder):
    """T5's bias is padded to 16 elements, so its size grows in jumps; a window fills up on the way."""
    for path in (folder("t5"), folder("llama", sliding_window=24, model_type="mistral",
                                      architectures=["MistralForCausalLM"])):  # fmt: skip
        whole, repeated = whole_and_repeated(path, seq=20)
        assert repeated.storages == whole.storages


def test_a_few_tokens_are_not_extend_tokens(folder):
    workload = Workload(task="generate", seq=20, new_tokens=TRACED_TOKENS)
    few = estimate.traced(Job(find_model(folder("llama")), workload), (8, 0))
    assert extend_tokens(few, TRACED_TOKENS) is None
    assert extend_tokens(few, TRACED_TOKENS + 1) is not None
