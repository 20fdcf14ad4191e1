"""Layers dealt out to stages: as brute force deals them, and the same for a rank that runs as for one predicted."""

import itertools
import random
from types import SimpleNamespace

import pytest

from brim.errors import UsageError
from brim.estimation.ranks.balance import balanced, stages_of
from brim.estimation.ranks.split import Sizes, Split, check_sizes, in_flight, stage_layers


def splits(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        bounds = [0, *cuts, layers]
        yield tuple(end - start for start, end in itertools.pairwise(bounds))


def worst(cost, counts):
    return max(cost(stage, count) for stage, count in enumerate(counts))


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_and_then_the_fullest_are_those_of_brute_force(seed):
    chance = random.Random(seed)
    stages = chance.randint(1, 5)
    layers = chance.randint(stages, 11)
    beside = [chance.choice([0, 0, 1.5, 4]) for _ in range(stages)]
    bytes_of = [chance.choice([1, 2, 5]) for _ in range(stages)]
    room = chance.choice([float("inf"), 6, 12, 20])

    def seconds(stage, count):
        return count + beside[stage]

    def held(stage, count):
        return count * bytes_of[stage] + 1

    fitting = [counts for counts in splits(layers, stages) if worst(held, counts) <= room]
    found = balanced(layers, stages, seconds, held, room)
    if not fitting:
        assert found is None
        return
    best = min((worst(seconds, counts), worst(held, counts)) for counts in fitting)
    assert found in fitting
    assert (worst(seconds, found), worst(held, found)) == best


def config(layers, vocabulary, **others):
    shape = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 4096, "model_type": "llama"}
    return SimpleNamespace(num_hidden_layers=layers, vocab_size=vocabulary, **shape, **others)


def test_a_large_output_layer_takes_layers_from_the_last_stage():
    split = Split(gpus=4, gpus_per_node=4, pp=4)
    found = stages_of(split, config(32, 131072), sequence=2048)
    assert sum(found) == 32
    assert found[-1] < min(found[:-1])
    assert stages_of(split, config(32, 16), sequence=2048) == (8, 8, 8, 8)


def test_recomputation_makes_the_output_layer_count_for_less():
    split = Split(gpus=4, gpus_per_node=4, pp=4)
    whole = stages_of(split, config(32, 131072), sequence=2048, checkpointing="full")
    assert whole[-1] > stages_of(split, config(32, 131072), sequence=2048)[-1]


def test_what_a_split_says_goes_before_and_interleaved_stages_are_even():
    given = Split(gpus=2, gpus_per_node=2, pp=2, stage_layers=(5, 3))
    assert stages_of(given, config(8, 131072), sequence=64) == (5, 3)
    inter = Split(gpus=2, gpus_per_node=2, pp=2, interleave=2)
    assert stages_of(inter, config(8, 131072), sequence=64) == (2, 2, 2, 2)


def test_of_equally_fast_ways_the_one_that_holds_least_is_taken():
    """The first stages of 1F1B hold the most micro-batches: what is left over goes to the last."""
    split = Split(gpus=4, gpus_per_node=4, pp=4, global_batch=8)
    found = balanced(9, 4, lambda stage, count: count, lambda stage, count: in_flight(split, stage) * count)
    assert found == (1, 2, 3, 3)
    assert max(stage_layers(9, 4)) == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"stage_layers": (4, 4, 4)}, "one for each stage"), ({"stage_layers": (8, 0)}, "each at least 1"),
     ({"stage_layers": (2, 2), "interleave": 2}, "4 numbers")],
)  # fmt: skip
def test_layers_that_are_no_stages_are_refused(settings, told):
    with pytest.raises(UsageError, match=told):
        Split(gpus=2, gpus_per_node=2, pp=2, **settings)


def test_layers_that_are_not_the_models_are_refused():
    sizes = Sizes(layers=8, heads=8, kv_heads=8, hidden=64, ffn=64, sequence=64)
    with pytest.raises(UsageError, match="These are 7 layers, and the model has 8"):
        check_sizes(Split(gpus=2, gpus_per_node=2, pp=2, stage_layers=(4, 3)), sizes)
