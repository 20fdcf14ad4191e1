"""The order of examples, and what of it is remembered."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from brim.errors import UsageError
from brim.run.data.dataset import IGNORED, Batches, Example, shuffled

KNOWN_ORDER = [4, 7, 5, 0, 2, 9, 8, 1, 3, 6]


class Numbers:
    """A data set whose examples are their own number, of different lengths."""

    def __init__(self, count: int, identity: str = "numbers") -> None:
        self.count, self.identity, self.truncated = count, identity, 0

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> Example:
        ids = [index] * (index % 3 + 2)
        return Example(input_ids=ids, labels=[IGNORED, *ids[1:]])


def test_a_batch_is_padded_on_the_right_and_padding_is_not_learnt() -> None:
    batch = next(Batches(Numbers(3), 3))
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert [ids for ids, _ in rows] == [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 2, 2]]
    assert [labels for _, labels in rows] == [[-100, 0, -100, -100], [-100, 1, 1, -100], [-100, 2, 2, 2]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert next(Batches(Numbers(3), 2, pad_to=7))["labels"].shape == (2, 7)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_example_is_given_once_per_epoch(count: int, batch: int) -> None:
    batches = Batches(Numbers(count), batch, seed=5)
    epochs = 3
    seen = [int(row[0]) for _ in range(batches.steps(epochs)) for row in next(batches)["input_ids"]]
    assert len(seen) == math.ceil(epochs * count / batch) * batch
    orders = [tuple(seen[e * count : (e + 1) * count]) for e in range(epochs)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count >= 7:
        assert len(set(orders)) == epochs


def test_the_order_is_the_seeds_and_looks_random() -> None:
    def first(seed: int) -> list[int]:
        return [shuffled(i, 1000, f"{seed} 0") for i in range(1000)]

    assert first(1) == first(1) != first(2)
    assert sorted(first(1)) == list(range(1000))
    kept = sum(i == x for i, x in enumerate(first(1)))
    neighbours = sum(abs(a - b) == 1 for a, b in zip(first(1), first(1)[1:], strict=False))
    assert kept < 10 and neighbours < 12  # 1 and 2 expected
    places = Counter(shuffled(0, 8, f"{seed} 0") for seed in range(4000))
    assert all(400 < places[place] < 600 for place in range(8))
    # Resuming rests on this order: it must be the same with every version of every library.
    assert [shuffled(i, 10, "0 0") for i in range(10)] == KNOWN_ORDER


@pytest.mark.parametrize("at", [0, 1, 5, 11])
def test_going_on_after_a_restart_gives_the_same_batches(at: int) -> None:
    whole = Batches(Numbers(20), 4, seed=3)
    for _ in range(at):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    again = Batches(Numbers(20), 4, seed=99)
    again.load_state_dict(state)
    for _ in range(8):
        ours, theirs = next(again), next(whole)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="at least"):
        Batches(Numbers(3), 0)
