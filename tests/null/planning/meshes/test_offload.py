"""Meshes with shards in RAM: the fastest first, bounds that never leave out what fits, and few proofs."""

from dataclasses import replace

import pytest

from brim import catalog
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.estimation.models import find_model
from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.sizes import shape_of
from brim.planning.meshes.offload import Proof, best, offloaded

RTX = catalog.gpu("RTX 3090")
RAM = 256 << 30


@pytest.fixture(scope="module")
def llama():
    return shape_of(find_model("llama-3-8b"))


def found(shape, **given):
    asked = {"gpus": 2, "gpus_per_node": 8, "gpu": RTX, "sequence": 1024, "global_batch": 16, "ram_bytes": RAM}
    return offloaded(shape, **(asked | given))


def test_all_keep_shards_in_ram_and_the_fastest_comes_first(llama):
    meshes = found(llama)
    assert all(mesh.split.offload_shards and mesh.split.zero == 3 for mesh in meshes)
    assert [mesh.step_s for mesh in meshes] == sorted(mesh.step_s for mesh in meshes)
    assert {mesh.split.tp for mesh in meshes} == {1, 2}


def test_fused_products_are_not_split_in_ram_either():
    assert {mesh.split.tp for mesh in found(shape_of(find_model("phi-3-mini")))} == {1}


def test_more_rows_at_once_bring_the_weights_more_seldom(llama):
    seconds = {
        mesh.split.micro_batch: mesh.step_s
        for mesh in found(llama) if mesh.split.tp == 1 and mesh.checkpointing == "full"
    }  # fmt: skip
    assert seconds[1] > seconds[2] > seconds[4]


@pytest.mark.slow
def test_closed_forms_agree_with_the_proof(llama):
    mesh = next(mesh for mesh in found(llama) if mesh.split.micro_batch == 4 and mesh.checkpointing == "full")
    told = estimate_ranks(
        "llama-3-8b", mesh.split, seq=1024, gpu="RTX 3090", precision="bf16-mixed", checkpointing="full"
    )
    assert told.step_s == pytest.approx(mesh.step_s, rel=0.2)
    assert told.worst.peak_bytes.allocated == pytest.approx(mesh.peak_bytes, rel=0.3)


def test_ram_that_does_not_hold_the_states_is_named(llama):
    with pytest.raises(BudgetError, match="Give a larger --ram") as caught:
        found(llama, ram_bytes=64 << 30)
    assert caught.value.smallest_bytes["ram"] > 16 * 8e9


def test_a_batch_that_does_not_divide_is_an_error(llama):
    with pytest.raises(UsageError, match="--global-batch 40"):
        found(llama, gpus=5, gpus_per_node=5, global_batch=7)


def proved(bytes, asked):
    """A proof that takes these bytes of a mesh, on 24 GB, and twice the seconds that were estimated."""

    def proof(mesh):
        asked.append(mesh)
        return Proof(bytes=bytes(mesh), step_s=2 * mesh.step_s, fits=bytes(mesh) <= 24e9)

    return proof


def test_proofs_correct_the_estimates_and_few_are_needed(llama):
    """Here all takes 6 GB more than was estimated."""
    meshes, asked = found(llama), []
    (chosen,) = best(meshes, proved(lambda mesh: mesh.peak_bytes + int(6e9), asked), 1, int(24e9))
    fitting = [mesh for mesh in meshes if mesh.peak_bytes + 6e9 <= 24e9]
    assert chosen == fitting[0]
    assert len(asked) <= 6


def test_tensors_that_prove_slow_give_way(llama):
    """Of the two ways to share a layer the one that was thought the slower is the faster."""
    meshes, asked = found(llama), []
    first = meshes[0].split.tp

    def proof(mesh):
        asked.append(mesh)
        return Proof(bytes=10, step_s=mesh.step_s * (100 if mesh.split.tp == first else 1), fits=True)

    (chosen,) = best(meshes, proof, 1, int(24e9))
    assert chosen.split.tp != first
    assert len(asked) <= 3


def test_what_does_not_fit_rules_out_what_takes_more(llama):
    asked = []
    assert best(found(llama), proved(lambda mesh: int(25e9), asked), 1, int(24e9)) == []
    for early, late in ((one, other) for at, one in enumerate(asked) for other in asked[at + 1 :]):
        more = early.split.micro_batch <= late.split.micro_batch and early.checkpointing == late.checkpointing
        assert not (more and early.split.tp == late.split.tp)


def test_each_split_is_offered_once(llama):
    def proof(mesh):
        return Proof(bytes=mesh.peak_bytes, step_s=mesh.step_s, fits=mesh.checkpointing == "full")

    chosen = best(found(llama), proof, 3, int(24e9))
    assert len({mesh.split for mesh in chosen}) == 3
    assert [mesh.step_s for mesh in chosen] == sorted(mesh.step_s for mesh in chosen)


def test_once_something_fits_few_further_proofs_are_made(llama):
    asked = []

    def proof(mesh):
        asked.append(mesh)
        return Proof(bytes=mesh.peak_bytes, step_s=2 * mesh.step_s / len(asked), fits=len(asked) > 1)

    chosen = best(found(llama), proof, 9, int(80e9))
    assert set(chosen) == set(asked[1:]) and len(asked) == 1 + 1 + 4


def test_what_raises_is_no_proof_and_rules_out_what_splits_as_much(llama):
    asked = []

    def proof(mesh):
        asked.append(mesh)
        if mesh.split.tp > 1:
            raise UnsupportedError("Cannot split tensors.")
        return Proof(bytes=mesh.peak_bytes, step_s=1000 * mesh.step_s, fits=True)

    meshes = sorted(found(llama), key=lambda mesh: -mesh.split.tp)
    chosen = best([replace(mesh, time=meshes[0].time) for mesh in meshes], proof, 1, int(80e9))
    assert chosen and chosen[0].split.tp == 1
    assert sum(mesh.split.tp > 1 for mesh in asked) <= 3  # one of each kind of recomputation


def test_where_all_raise_the_first_error_is_told(llama):
    asked = []

    def proof(mesh):
        asked.append(mesh)
        raise UnsupportedError(f"Cannot split number {len(asked)}.")

    with pytest.raises(UnsupportedError, match="number 1"):
        best(found(llama), proof, 1, int(80e9))
    assert len(asked) < 8
