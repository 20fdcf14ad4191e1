"""The search over meshes: closed forms that agree with the proof, the fastest that fit, and no wait."""

import time
from dataclasses import replace

import pytest

from brim import catalog
from brim.errors import BudgetError, UsageError
from brim.estimation.models import find_model
from brim.estimation.parallel_shape import shape_of
from brim.estimation.ranks import estimate_ranks
from brim.planner.meshes import best, meshes

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


@pytest.mark.parametrize("index", [0, 3, -1])
def test_closed_forms_agree_with_the_proof(found, index):
    mesh = found[index]
    told = proof(mesh, "A100 80GB")
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.02)
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.02)


def test_the_best_are_those_that_are_proved(found):
    asked = []

    def proves(mesh):
        asked.append(mesh)
        return len(asked) % 2 == 0

    chosen = best(found, proves, 3)
    assert chosen == [mesh for index, mesh in enumerate(asked) if index % 2]
    assert len({mesh.split for mesh in chosen}) == 3


def test_thousands_of_gpus_are_searched_in_seconds(llama):
    """By CPU time, as the machine may be busy."""
    started = time.process_time()
    assert meshes(llama, gpus=4096, gpus_per_node=8, gpu=H100, sequence=4096)
    assert time.process_time() - started < 20


def test_recomputation_is_taken_where_nothing_else_fits(llama):
    long = meshes(llama, gpus=32, gpus_per_node=8, gpu=H100, sequence=32768, global_batch=64)
    assert {mesh.checkpointing for mesh in long} == {"full"}


def test_too_few_gpus_name_how_many_hold_the_states(llama):
    with pytest.raises(BudgetError, match="About 15 hold its states"):
        meshes(llama, gpus=8, gpus_per_node=8, gpu=H100, sequence=4096)


def test_a_batch_that_no_mesh_divides_is_an_error(llama):
    with pytest.raises(UsageError, match="--global-batch"):
        meshes(llama, gpus=101, gpus_per_node=101, gpu=H100, sequence=4096, global_batch=5)


def test_stages_that_do_not_divide_are_balanced_and_their_proof_agrees(llama):
    found = meshes(llama, gpus=24, gpus_per_node=8, gpu=H100, sequence=4096, global_batch=96)
    uneven = [mesh for mesh in found if mesh.split.stage_layers]
    assert {sum(mesh.split.stage_layers) for mesh in uneven} == {80}
    mesh = next(mesh for mesh in uneven if mesh.split.pp == 3)
    told = proof(mesh, "H100")
    assert told.fits
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.02)
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.02)


def test_a_large_head_takes_layers_from_its_stage_where_that_is_faster():
    small = shape_of(find_model("llama-3-8b"))
    found = meshes(small, gpus=4, gpus_per_node=4, gpu=H100, sequence=4096, global_batch=32)
    deep = next(mesh for mesh in found if mesh.split.pp == 4 and mesh.split.interleave == 1)
    assert deep.split.stage_layers[-1] < max(deep.split.stage_layers)
    even = proof(replace(deep, split=replace(deep.split, stage_layers=())), "H100", "llama-3-8b")
    assert proof(deep, "H100", "llama-3-8b").step_s < even.step_s
