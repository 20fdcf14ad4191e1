"""Chunks of a rank that are traced one by one and put together are what all of them traced at once are."""

import json
from unittest import mock

import pytest

from brim.estimation.ranks import torch_engine as ranks_torch
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.split import Split

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
SPLITS = [
    {"gpus": 4, "pp": 2, "interleave": 4, "zero": 3, "global_batch": 16},
    {"gpus": 2, "pp": 2, "interleave": 2, "zero": 1, "global_batch": 8},
    {"gpus": 4, "pp": 2, "interleave": 2, "tp": 2, "sequence_parallel": True, "zero": 1, "global_batch": 4},
    {"gpus": 4, "pp": 2, "interleave": 4, "zero": 3, "offload_shards": True, "global_batch": 8},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def estimated(model, split, **settings):
    return estimate_ranks(model, Split(**split), seq=64, gpu="A100 80GB", precision="bf16-mixed", **settings)


@pytest.mark.thorough
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: " ".join(f"{k} {v}" for k, v in split.items()))
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_each_kind_of_chunk_is_traced_once_and_tells_the_same(model, split, checkpointing):
    whole_rank, counted = ranks_torch._run, []

    def run(job, chunks, order):
        counted.append(len(chunks))
        return whole_rank(job, chunks, order)

    with mock.patch.object(ranks_torch, "_run", run):
        found = estimated(model, split, checkpointing=checkpointing)
        assert max(counted) == 1
        with mock.patch.object(ranks_torch, "of_chunks", lambda *_: None):
            expected = estimated(model, split, checkpointing=checkpointing)
        assert max(counted) == split["interleave"]
    for rank, other in zip(found.ranks, expected.ranks, strict=True):
        assert rank.peak_bytes == other.peak_bytes
        assert rank.breakdown == other.breakdown
        assert rank.ram == other.ram
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-7)  # scalars are counted once for each chunk
    assert found.flops == expected.flops
