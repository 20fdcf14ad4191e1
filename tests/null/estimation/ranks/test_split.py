"""Splits over several GPUs: who sits where, how much is in flight, and what cannot be split that way."""

import itertools

import pytest

from brim.errors import UsageError
from brim.estimation.ranks.schedule import brief, turns
from brim.estimation.ranks.split import Sizes, Split, check_sizes, in_flight, nearest, stage_layers

LLAMA = {"layers": 80, "heads": 64, "kv_heads": 8, "hidden": 8192, "ffn": 28672, "sequence": 4096}


def test_neighbours_share_tensors_and_pipeline_stages_lie_farthest_apart():
    split = Split(gpus=64, tp=4, pp=2, cp=2)
    assert split.dp == 4
    assert split.coordinates(0) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert split.coordinates(3) == {"pp": 0, "dp": 0, "cp": 0, "tp": 3}
    assert split.coordinates(4) == {"pp": 0, "dp": 0, "cp": 1, "tp": 0}
    assert split.coordinates(8) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert split.coordinates(32) == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert [split.rank(**split.coordinates(rank)) for rank in range(64)] == list(range(64))


def test_members_of_a_group_in_one_node():
    split = Split(gpus=64, tp=4, pp=2, cp=2)
    assert {axis: split.per_node(axis) for axis in ("tp", "cp", "dp", "shard", "pp")} == {
        "tp": 4, "cp": 2, "dp": 1, "shard": 2, "pp": 1,
    }  # fmt: skip


def test_a_mesh_that_is_not_the_number_of_gpus_names_the_nearest():
    with pytest.raises(UsageError, match=r"not a multiple of 48.*\n.*480 or 528.*--tp 2"):
        Split(gpus=512, tp=3, pp=16)
    with pytest.raises(UsageError, match=r"dp 5 = 10 ranks.*\n.*8 GPUs.*\n.*--gpus 10, or --dp 4"):
        Split(gpus=8, tp=2, dp=5)
    with pytest.raises(UsageError, match=r"nodes of 8.*\n.*\n.*--gpus 8 or 16"):
        Split(gpus=12, tp=2)


def test_a_batch_that_does_not_divide_names_the_nearest():
    with pytest.raises(UsageError, match=r"multiples of 8.*\n.*--global-batch 96 or 104"):
        Split(gpus=8, tp=2, micro_batch=2, global_batch=100)
    assert Split(gpus=8, tp=2, micro_batch=2, global_batch=104).micro_batches == 13
    assert Split(gpus=8, tp=2, pp=2, micro_batch=3).global_batch == 3 * 2 * 2


def test_sequence_parallelism_and_interleaving_need_what_they_split():
    with pytest.raises(UsageError, match="--tp 1"):
        Split(gpus=8, sequence_parallel=True)
    with pytest.raises(UsageError, match="--pp 1"):
        Split(gpus=8, interleave=2)
    with pytest.raises(UsageError, match=r"groups of 4 \(--pp\).*\n.*--global-batch 8 or 16"):
        Split(gpus=8, pp=4, interleave=2, global_batch=12)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tp": 16, "gpus": 16}, r"key-value heads \(8\).*\n.*--tp 8"),
        ({"pp": 96, "gpus": 96}, r"80 layers.*\n.*--pp 80"),
        ({"pp": 3, "gpus": 3, "interleave": 2, "gpus_per_node": 3}, r"6 even.*\n.*\n.*--pp 2"),
        ({"gpus": 8, "cp": 8}, None),
    ],
)
def test_models_that_do_not_divide_name_the_nearest(settings, text):
    split = Split(**settings)
    if text is None:
        check_sizes(split, Sizes(**LLAMA))
        return
    with pytest.raises(UsageError, match=text):
        check_sizes(split, Sizes(**LLAMA))


def test_sequences_and_experts_that_do_not_divide_name_the_nearest():
    with pytest.raises(UsageError, match=r"multiples of 16.*\n.*--seq 4096 or 4112"):
        check_sizes(Split(gpus=8, cp=8), Sizes(**LLAMA | {"sequence": 4100}))
    with pytest.raises(UsageError, match="no experts"):
        check_sizes(Split(gpus=8, ep=8), Sizes(**LLAMA))
    with pytest.raises(UsageError, match=r"6 experts.*\n.*--ep 3"):
        check_sizes(Split(gpus=8, ep=4), Sizes(**LLAMA, experts=6))


@pytest.mark.parametrize(("sequence", "nearest"), [(4100, "--seq 4096 or 4112"), (10, "--seq 16")])
def test_chunks_of_ranks_that_share_sequences_and_tensors_divide(sequence, nearest):
    split = Split(gpus=8, cp=4, tp=2, sequence_parallel=True)
    with pytest.raises(UsageError, match=rf"multiples of 16.*\n.*{nearest}"):
        check_sizes(split, Sizes(**LLAMA | {"sequence": sequence}))
    with pytest.raises(UsageError, match=r"into tp 2 x pp 1 x cp 3(.|\n)*or --cp 2"):
        Split(gpus=8, cp=3, tp=2)


@pytest.mark.parametrize(("layers", "stages"), [(80, 16), (126, 16), (7, 3), (5, 5), (10, 4)])
def test_stages_are_even_and_their_ends_the_lightest(layers, stages):
    found = stage_layers(layers, stages)
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert found[0] == min(found)
    assert found[-1] in (min(found), max(found))


def test_nearest_is_the_closest_that_works():
    assert nearest(7, lambda n: n % 4 == 0) == 8
    assert nearest(6, lambda n: n % 4 == 0) == 4
    assert nearest(5, lambda n: False) == 1


# -- schedules -----------------------------------------------------------------------------------------------

SPLITS = [Split(gpus=p, gpus_per_node=p, pp=p, interleave=v, global_batch=m)
          for p, v, m in [(1, 1, 3), (4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 3, 4), (8, 2, 16)]]  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.describe())
def test_every_micro_batch_goes_forward_and_then_back_through_every_chunk_once(split):
    for stage in range(split.pp):
        found = turns(split, stage)
        pairs = set(itertools.product(range(split.micro_batches), range(split.interleave)))
        for forward in (True, False):
            taken = [(turn.micro_batch, turn.chunk) for turn in found if turn.forward == forward]
            assert len(taken) == len(pairs) and set(taken) == pairs
        assert len(found) == len(pairs) * 2
        position = {(turn.micro_batch, turn.chunk, turn.forward): at for at, turn in enumerate(found)}
        assert all(position[m, c, True] < position[m, c, False] for m, c in pairs)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.describe())
def test_what_is_in_flight_is_the_closed_form(split):
    for stage in range(split.pp):
        held = most = 0
        for turn in turns(split, stage):
            held += 1 if turn.forward else -1
            most = max(most, held)
        assert held == 0
        assert most == in_flight(split, stage)


def test_the_first_stage_holds_what_korthikanti_says():
    """arXiv 2205.05198, section 4.2.3: L layers' worth, times 1 + (p - 1) / (p m) with m chunks."""
    split = Split(gpus=8, pp=8, interleave=3, global_batch=64)
    assert in_flight(split, 0) / (8 * 3) == pytest.approx(1 + 7 / (8 * 3))
    plain = Split(gpus=8, pp=8, global_batch=64)
    assert in_flight(plain, 0) == 8


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.describe())
def test_a_brief_step_holds_as_much_as_a_whole_one(split):
    longer = Split(
        gpus=split.pp,
        gpus_per_node=split.pp,
        pp=split.pp,
        interleave=split.interleave,
        global_batch=32 * split.pp,
    )
    for stage in range(split.pp):
        assert in_flight(brief(longer, stage), stage) == in_flight(longer, stage)
        assert brief(longer, stage).micro_batches <= longer.micro_batches
