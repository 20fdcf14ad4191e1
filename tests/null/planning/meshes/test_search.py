"""The search over meshes: closed forms that agree with the proof, the fastest that fit, and no wait."""

import time
from dataclasses import replace

import pytest

from brim import catalog
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import estimate_ranks, stage_fits
from brim.estimation.ranks.sizes import shape_of
from brim.planning.meshes.search import RECOMPUTE, Pieces, best, meshes, nccl_bytes
from brim.planning.meshes.splits import splits

A100, H100 = catalog.gpu("A100 80GB"), catalog.gpu("H100")


@pytest.fixture(scope="module")
def llama():
    return shape_of(find_model("llama-3-70b"))


def proof(mesh, gpu, model="llama-3-70b", seq=4096):
    return estimate_ranks(model, mesh.split, engine="megatron", gpu=gpu, seq=seq, checkpointing=mesh.checkpointing)


@pytest.fixture(scope="module")
def found(llama):
    return meshes(llama, gpus=64, gpus_per_node=8, gpu=A100, sequence=4096)


def test_meshes_come_fastest_first_and_fit_by_closed_forms(found):
    assert [mesh.step_s for mesh in found] == sorted(mesh.step_s for mesh in found)
    assert all(mesh.peak_bytes < A100.capacity_bytes for mesh in found)
    assert all(mesh.split.tp <= 8 for mesh in found)


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 3, -1])
def test_closed_forms_agree_with_the_proof(found, index):
    mesh = found[index]
    told = proof(mesh, "A100 80GB")
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.005)
    assert told.worst.coordinates["pp"] == mesh.fullest
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.01)


def test_the_best_are_those_that_are_proved(found):
    asked = []

    def proves(mesh):
        asked.append(mesh)
        return len(asked) % 2 == 0

    chosen = best(found, proves, 3)
    assert chosen == [mesh for index, mesh in enumerate(asked) if index % 2]
    assert len({mesh.split for mesh in chosen}) == 3


@pytest.mark.thorough
def test_thousands_of_gpus_are_searched_in_seconds(llama):
    """By CPU time, as the machine may be busy."""
    started = time.process_time()
    assert meshes(llama, gpus=4096, gpus_per_node=8, gpu=H100, sequence=4096)
    assert time.process_time() - started < 20


@pytest.mark.thorough
def test_recomputation_is_taken_where_nothing_else_fits(llama):
    long = meshes(llama, gpus=32, gpus_per_node=8, gpu=H100, sequence=32768, global_batch=64)
    assert {mesh.checkpointing for mesh in long} == {"full"}


def test_too_few_gpus_name_how_many_hold_the_states(llama):
    with pytest.raises(BudgetError, match="About 15 GPUs are enough for its states"):
        meshes(llama, gpus=8, gpus_per_node=8, gpu=H100, sequence=4096)


def test_a_batch_that_no_mesh_divides_is_an_error(llama):
    with pytest.raises(UsageError, match="--global-batch"):
        meshes(llama, gpus=101, gpus_per_node=101, gpu=H100, sequence=4096, global_batch=5)


@pytest.mark.thorough
def test_stages_that_do_not_divide_are_balanced_and_their_proof_agrees(llama):
    found = meshes(llama, gpus=24, gpus_per_node=8, gpu=H100, sequence=4096, global_batch=96)
    uneven = [mesh for mesh in found if mesh.split.stage_layers]
    assert {sum(mesh.split.stage_layers) for mesh in uneven} == {80}
    mesh = next(mesh for mesh in uneven if mesh.split.pp == 3)
    told = proof(mesh, "H100")
    assert told.fits
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.02)
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.02)


@pytest.mark.thorough
def test_a_large_head_takes_layers_from_its_stage_where_that_is_faster():
    small = shape_of(find_model("llama-3-8b"))
    found = meshes(small, gpus=4, gpus_per_node=4, gpu=H100, sequence=4096, global_batch=32)
    deep = next(mesh for mesh in found if mesh.split.pp == 4 and mesh.split.interleave == 1)
    assert deep.split.stage_layers[-1] < max(deep.split.stage_layers)
    even = proof(replace(deep, split=replace(deep.split, stage_layers=())), "H100", "llama-3-8b")
    assert proof(deep, "H100", "llama-3-8b").step_s < even.step_s


@pytest.mark.thorough
def test_short_sequences_of_interleaved_stages_are_told_as_well(llama):
    """Of one layer less is kept than the gradient of the embedding takes; of many micro-batches in flight more."""
    found = meshes(llama, gpus=64, gpus_per_node=8, gpu=A100, sequence=1024)
    mesh = next(mesh for mesh in found if mesh.split.interleave == 5)
    told = proof(mesh, "A100 80GB", seq=1024)
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.005)
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.01)


@pytest.fixture(scope="module")
def mixtral():
    return shape_of(find_model("mixtral-8x7b"))


@pytest.fixture(scope="module")
def routed(mixtral):
    return meshes(mixtral, gpus=64, gpus_per_node=8, gpu=H100, sequence=1024)


def test_experts_over_all_data_parallel_ranks_are_looked_at_where_they_divide(routed):
    assert {mesh.split.ep for mesh in routed} > {1, 8}
    assert all(mesh.split.tp == mesh.split.cp == 1 for mesh in routed)
    assert all(mesh.split.ep in (1, mesh.split.shards) for mesh in routed)
    assert routed[0].split.ep == 8  # each rank's products are of larger matrices


@pytest.mark.thorough
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_closed_forms_of_experts_agree_with_the_proof(routed, ep):
    mesh = next(mesh for mesh in routed if mesh.split.ep == ep)
    told = proof(mesh, "H100", "mixtral-8x7b", 1024)
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.005)
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.02)


def test_layers_of_two_kinds_are_not_searched():
    with pytest.raises(UnsupportedError, match="of two kinds"):
        meshes(shape_of(find_model("deepseek-v3")), gpus=64, gpus_per_node=8, gpu=H100, sequence=1024)


def long(model="llama-3.2-1b", **given):
    asked = {"gpus": 8, "gpus_per_node": 8, "gpu": H100, "sequence": 32768, "global_batch": 2}
    return meshes(shape_of(find_model(model)), **(asked | given))


def test_few_long_sequences_are_split_over_ranks():
    found = long()
    assert found[0].split.cp == 4 and found[0].split.dp == 2
    shared = [mesh for mesh in found if mesh.split.cp > 1]
    assert all(mesh.split.tp == mesh.split.pp == mesh.split.ep == 1 for mesh in shared)
    for mesh in (shared[0], shared[-1]):
        told = proof(mesh, "H100", "llama-3.2-1b", 32768)
        assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.005)
        assert told.step_s == pytest.approx(mesh.step_s, rel=0.01)


def test_sequences_are_not_split_where_they_do_not_divide_or_attention_is_over_a_window():
    assert all(mesh.split.cp == 1 for mesh in long(sequence=32767))
    assert all(mesh.split.cp == 1 for mesh in long("mistral-7b", sequence=8192))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "gpus", "sequence", "batch"),
    [("smollm2-135m", 4, 2048, 8), ("qwen2.5-0.5b", 8, 1024, 4), ("llama-3.2-1b", 2, 8192, 1)],
)
def test_the_search_finds_what_looking_at_everything_finds(model, gpus, sequence, batch):
    """All splits, proved one by one, on a GPU where some fit and some do not."""
    gpu, shape = catalog.gpu("RTX 4090"), shape_of(find_model(model))
    sizes = {"gpus": gpus, "gpus_per_node": 8, "sequence": sequence}
    everything = {}
    for split in splits(shape, batch=batch, **sizes):
        for recompute in RECOMPUTE:
            told = estimate_ranks(
                model, split, engine="megatron", gpu="RTX 4090", seq=sequence, checkpointing=recompute
            ) if split.interleave > 1 or shape.layers % split.pp == 0 else None  # fmt: skip
            if told is not None and told.fits:
                everything[split, recompute] = told.step_s
    found = meshes(shape, gpu=gpu, global_batch=batch, **sizes)
    (mesh,) = best(found, lambda mesh: bool(proof(mesh, "RTX 4090", model, sequence).fits), 1)
    assert proof(mesh, "RTX 4090", model, sequence).step_s <= 1.01 * min(everything.values())


@pytest.mark.thorough
def test_no_mesh_takes_less_than_the_bound_by_which_splits_are_left_out(llama, mixtral):
    for shape in (llama, mixtral):
        pieces = Pieces(shape, H100, 1024)
        for split in splits(shape, 64, 8, 1024, 512):
            least = min(mesh.peak_bytes + nccl_bytes(mesh.split) for mesh in pieces.meshes(split))
            assert pieces.least_bytes(split) <= least


@pytest.mark.thorough
def test_one_stage_tells_early_what_does_not_fit(found):
    mesh = found[0]
    given = {"seq": 4096, "checkpointing": mesh.checkpointing}
    assert stage_fits("llama-3-70b", mesh.split, mesh.fullest, gpu=A100, **given) == proof(mesh, "A100 80GB").fits
    assert not stage_fits("llama-3-70b", mesh.split, mesh.fullest, gpu=catalog.gpu("RTX 3090"), **given)
