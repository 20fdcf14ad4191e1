"""Meshes for the engine that ``brim train`` runs: what it refuses is not looked at, what is found is the fastest."""

import pytest
from transformers import LlamaConfig

from brim import catalog
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.sizes import shape_of
from brim.estimation.ranks.split import check_context, check_experts
from brim.planning.meshes.offload import Proof, best
from brim.planning.meshes.splits import run_splits
from brim.planning.meshes.torch_engine import DOUBT, run_meshes
from brim.run.ranks import plan as distributed_plan
from brim.run.ranks.request import SplitRequest
from brim.run.train.request import Request

pytestmark = pytest.mark.thorough

H100 = catalog.gpu("H100")
GPU, SEQUENCE, BATCH = "RTX 3060 12GB", 512, 2


def shape(model):
    return shape_of(find_model(model))


@pytest.fixture(scope="module")
def found():
    return run_meshes(find_model("llama-3-8b"), gpus=8, gpus_per_node=8, gpu=H100, sequence=1024, global_batch=32)


def test_all_stages_of_zero_are_looked_at_and_no_way_comes_twice(found):
    assert {mesh.split.zero for mesh in found} == {1, 2, 3}
    assert all(mesh.split.micro_batches > 1 for mesh in found if mesh.split.zero == 2)
    ways = [(mesh.split, mesh.checkpointing) for mesh in found]
    assert len(set(ways)) == len(ways)


@pytest.mark.parametrize("model", ["gpt2-xl", "phi-3-mini"])
def test_fused_queries_are_not_split_over_ranks(model):
    splits = list(run_splits(shape(model), 8, 8, 1024, 64))
    assert splits and all(split.tp == 1 for split in splits)
    assert any(split.tp > 1 for split in run_splits(shape("llama-3-8b"), 8, 8, 1024, 64))


def test_long_sequences_are_split_beside_tensors_and_stages():
    """Where a rank has enough of each; and not where attention is over a window."""
    of_long = [split for split in run_splits(shape("llama-3-8b"), 8, 8, 8192, 8) if split.cp > 1]
    beside = [split for split in of_long if split.tp * split.pp > 1]
    assert {(split.tp > 1, split.pp > 1) for split in beside} == {(True, False), (False, True), (True, True)}
    assert {split.cp for split in beside} == {2, 4}
    assert {split.zero for split in beside} == {1, 2, 3}
    assert len(set(of_long)) == len(of_long)
    short = run_splits(shape("llama-3-8b"), 8, 8, 2048, 8)
    assert all(split.tp == split.pp == 1 for split in short if split.cp > 1)
    assert all(split.cp == 1 for split in run_splits(shape("mistral-7b"), 8, 8, 8192, 8))


@pytest.mark.parametrize(
    ("model", "gpus", "sequence", "batch"), [("mixtral-8x7b", 16, 1024, 64), ("llama-3-8b", 8, 32768, 2)]
)
def test_each_way_goes_through_a_plans_file_and_the_runs_own_checks(tmp_path, model, gpus, sequence, batch):
    looked_at = set()
    for mesh in run_meshes(
        find_model(model), gpus=gpus, gpus_per_node=8, gpu=H100, sequence=sequence, global_batch=batch
    ):
        split = mesh.split
        looked_at |= {name for name in ("ep", "cp") if getattr(split, name) > 1}
        plan = distributed_plan.SplitPlan(
            brim="0", model=model, gpu="H100", engine="torch", precision="bf16-mixed", sequence=sequence, split=split,
            checkpointing=mesh.checkpointing,
            peak_bytes=mesh.peak_bytes, step_s=mesh.step_s,
        )  # fmt: skip
        distributed_plan.write(tmp_path / "plan.json", plan)
        training = Request(model=model, data="text.txt", output="out", plan=tmp_path / "plan.json")
        followed = distributed_plan.with_plan(SplitRequest(training=training), gpus)
        followed.check()
        assert followed.split(gpus, 8) == split
        check_experts(split)
        check_context(split)
    assert looked_at >= ({"ep"} if model == "mixtral-8x7b" else {"cp"})


@pytest.mark.slow
def test_layers_of_two_kinds_are_cut_into_stages_too():
    found = run_meshes(
        find_model("deepseek-v3"), gpus=256, gpus_per_node=8, gpu=H100, sequence=1024, global_batch=256
    )
    assert {mesh.split.pp for mesh in found} > {1, 4}
    assert any(mesh.split.ep == 256 for mesh in found)
    assert any(mesh.split.ep > 1 and mesh.split.pp > 1 for mesh in found)


@pytest.fixture(scope="module")
def tight():
    """Little room: most ways are a bit too large for it."""
    gpu = catalog.gpu("RTX 4090")
    return run_meshes(find_model("qwen2.5-7b"), gpus=8, gpus_per_node=8, gpu=gpu, sequence=1024), gpu.capacity_bytes


@pytest.mark.parametrize("off", [-4e9, -2e9, 0, 1e9, 2e9, 4e9, 8e9])
def test_what_fits_is_found_however_far_estimates_are_off(tight, off):
    found, room = tight
    asked = []

    def proof(mesh):
        asked.append(mesh)
        return Proof(bytes=int(mesh.peak_bytes + off), step_s=mesh.step_s, fits=mesh.peak_bytes + off <= room)

    chosen = best(found, proof, 5, room, DOUBT)
    fitting = [mesh for mesh in found if mesh.peak_bytes + off <= room]
    assert chosen[:1] == fitting[:1]
    assert len(asked) <= 12
    if not fitting:
        assert min(found, key=lambda mesh: mesh.peak_bytes) in asked


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=4096, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def proof_of(model, mesh, sequence):
    told = estimate_ranks(
        model, mesh.split, seq=sequence, gpu=GPU, precision="bf16-mixed", checkpointing=mesh.checkpointing
    )
    return Proof(bytes=told.worst.peak_bytes.process, step_s=told.step_s, fits=bool(told.fits))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("gpus", "sequence", "batch"), [(2, SEQUENCE, BATCH), (4, 4096, 2)])
def test_the_search_finds_what_tracing_everything_finds(small, gpus, sequence, batch):
    """Also among sequences that are split beside tensors and stages, where they are long and few."""
    gpu, asked = catalog.gpu(GPU), {}
    found = run_meshes(
        find_model(small), gpus=gpus, gpus_per_node=gpus, gpu=gpu, sequence=sequence, global_batch=batch
    )
    beside = {mesh.split.tp * mesh.split.pp > 1 for mesh in found if mesh.split.cp > 1}
    assert (True in beside) == (gpus == 4)

    def proof(mesh):
        asked[mesh] = proof_of(small, mesh, sequence)
        return asked[mesh]

    (chosen,) = best(found, proof, 1, gpu.capacity_bytes, DOUBT)
    few = len(asked)
    everything = [asked[mesh] if mesh in asked else proof(mesh) for mesh in found]
    fastest = min(told.step_s for told in everything if told.fits)
    assert asked[chosen].step_s <= 1.03 * fastest
    assert all(1.05 * told.step_s >= mesh.step_s for mesh, told in asked.items())  # as the search counts on
    assert few <= 8 < len(found)
