"""What a few layers say of a generation's passes is what all of them say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.planning.inference.depth import Shallow
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.planning.opening import open_subject
from brim.planning.request import Request, machine_of
from brim.planning.subject import Subject

DEEP: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512, "head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mixture": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
SIZES = [Sizes(prompt=48, total=64, chunk=48), Sizes(batch=3, prompt=48, total=64, chunk=16)]


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "mixture"))],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps({**DEEP, **FAMILIES[request.param]}))
    asked = Request(model=path, gpu="RTX 3060", ram="8GiB", seq=48, new_tokens=16)
    return open_subject(asked, machine_of(asked))


@pytest.fixture
def shallow(subject: Subject) -> Shallow:
    assert subject.shallow is not None, "its layers are alike"
    return subject.shallow


@pytest.mark.thorough
def test_the_cache_the_activations_and_the_work(subject: Subject, shallow: Shallow) -> None:
    shape = cache_shape(subject.module)
    assert shallow.shape() == shape
    for sizes in SIZES:
        assert shallow.watch(sizes, shape) == watch_generation(subject.module, sizes, shape)


def test_layers_that_differ_are_all_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(18)]
    path.write_text(
        json.dumps(
            {
                **DEEP,
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "layer_types": kinds,
                "query_pre_attn_scalar": 16,
            }
        )
    )
    asked = Request(model=path, gpu="RTX 3060", ram="8GiB", seq=48, new_tokens=16)
    assert open_subject(asked, machine_of(asked)).shallow is None
