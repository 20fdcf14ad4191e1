"""Stages of models whose layers are of several kinds: each has its own, and deep ones are made from shallow ones."""

import json

import pytest

from brim import catalog
from brim.errors import UsageError
from brim.estimation.models import find_model
from brim.estimation.ranks import torch_engine as ranks_torch
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.job import ParallelJob
from brim.estimation.ranks.layers import Layers, layer_kinds, layers_of, usual_layers
from brim.estimation.ranks.split import Split
from brim.estimation.workload import Workload
from brim.planning.meshes.torch_engine import traced_layers
from brim.techniques.parallel.pipeline import Part

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 512}
LLAMA = {"model_type": "llama", **_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 17}
GEMMA = {
    "model_type": "gemma2", **_SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 14,
    "sliding_window": 32,
}  # fmt: skip
DENSE_FIRST = {
    "model_type": "deepseek_v3", **_SIZES, "num_hidden_layers": 20, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def saved(config, **settings):
        folder = tmp_path / config["model_type"]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return saved


def job_of(folder, **split):
    workload = Workload(task="train", batch=1, seq=64, precision="bf16")
    return ParallelJob(
        source=find_model(folder), workload=workload, split=Split(**split), sequence=64, capability=(9, 0)
    )  # fmt: skip


def test_layers_are_of_one_kind_where_only_their_numbers_differ(model):
    assert layer_kinds(find_model(model(LLAMA))) == (0,) * 17
    assert layer_kinds(find_model(model(GEMMA))) == (0, 1) * 7
    assert layer_kinds(find_model(model(DENSE_FIRST))) == (0, *(1,) * 19)
    assert usual_layers(find_model(model(DENSE_FIRST)), 2) == (18, 19)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "split"),
    [
        (LLAMA, {"gpus": 2, "zero": 3}), (DENSE_FIRST, {"gpus": 2, "zero": 3}),
        pytest.param(GEMMA, {"gpus": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param(
            {**GEMMA, "num_hidden_layers": 36}, {"gpus": 4, "pp": 2, "zero": 1, "global_batch": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alike", "first is dense", "in turn", "in turn, two stages"],
)  # fmt: skip
def test_a_deep_stage_is_two_layers_repeated(config, split, model, monkeypatch):
    job = job_of(model(config), **split)
    traced = []
    run = ranks_torch._run
    monkeypatch.setattr(
        ranks_torch, "_run", lambda job, chunks, order: traced.append(chunks) or run(job, chunks, order)
    )
    found, _ = ranks_torch.stages(job)
    assert max(len(stage.own) for (stage,) in traced) < config["num_hidden_layers"] // job.split.pp
    monkeypatch.setattr(Layers, "shallower", lambda stage: None)
    whole, _ = ranks_torch.stages(job)
    for one, other in zip(found, whole, strict=True):
        assert _held_at(one.trace) == _held_at(other.trace)
        assert one.sent == other.sent
        assert sum(op.flops for op in one.ops) == sum(op.flops for op in other.ops)


def _held_at(trace):
    """Each operation of the steps, and bytes that are held when it runs."""
    events = [(storage.born, storage.bytes) for storage in trace.storages]
    events += [(storage.died, -storage.bytes) for storage in trace.storages if storage.died is not None]
    events = sorted(events, reverse=True)
    held, found = 0, []
    for op in sorted(trace.ops, key=lambda op: op.at):
        while events and events[-1][0] < op.at:
            held += events.pop()[1]
        if op.at >= trace.step_starts[0]:
            found.append((op.name, held))
    return found


@pytest.mark.thorough
def test_a_later_stage_has_the_layers_that_it_has(model):
    """Experts, where the first layer is dense: the last stage's weights are those of its own layers."""
    folder = model(DENSE_FIRST, num_hidden_layers=4)
    split = {"gpus": 2, "pp": 2, "stage_layers": (2, 2), "global_batch": 2}
    found = estimate_ranks(folder, Split(**split), engine="torch", seq=64, precision="fp32")
    experts = 8 * 3 * 64 * 96 * 4
    first, last = (rank.breakdown["parameters"] for rank in found.ranks)
    dense = 3 * 64 * 96 * 4
    shared = 3 * 64 * 96 * 4  # one expert for all, and the router
    assert last - first == pytest.approx(experts + shared - dense, rel=0.01)


def test_a_stage_of_several_kinds_is_cut_out_of_the_whole_model(model):
    job = job_of(model(GEMMA), gpus=2, pp=2, global_batch=2)
    stage = layers_of(job, Part(first=7, layers=7, of=14))
    assert stage.kinds == (1, 0, 1, 0, 1, 0, 1)
    assert stage.part == Part(first=7, layers=7, of=14)
    assert stage.shallower() is None  # three shallower ones are no less work


@pytest.mark.thorough
def test_pieces_are_of_the_usual_kind(model):
    """A search weighs ways by its layers: experts of a mixture, though its first layer is dense."""
    settings = {"sequence": 64, "recompute": "none", "gpu": catalog.gpu("H100")}
    one, two = (traced_layers(find_model(model(DENSE_FIRST)), Split(gpus=2, zero=3), n, **settings) for n in (1, 2))
    names = [{op.name for op in found.ops} for found in (one, two)]
    assert any("grouped_mm" in name or "topk" in name for name in names[0])
    assert names[0] == names[1]


@pytest.mark.thorough
def test_a_layer_costs_something_where_a_model_has_no_second_one(model):
    settings = {"sequence": 64, "recompute": "none", "gpu": catalog.gpu("H100")}
    source = find_model(model(LLAMA, num_hidden_layers=1))
    one, two = (traced_layers(source, Split(gpus=2, zero=3), count, **settings) for count in (1, 2))
    assert len(two.ops) > len(one.ops) and two.kept_bytes > one.kept_bytes


def test_layers_that_a_model_does_not_have_are_an_error(model):
    job = job_of(model(LLAMA), gpus=2, pp=2, global_batch=2)
    with pytest.raises(UsageError, match="It has 17"):
        layers_of(job, Part(first=9, layers=9, of=18))
