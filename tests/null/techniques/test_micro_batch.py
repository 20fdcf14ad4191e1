"""Gradients of pieces add up to those of the whole batch; the largest piece is found in few predictions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import trained
from brim.errors import BudgetError, UsageError
from brim.techniques import micro_batch


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_gradients_of_the_pieces_are_those_of_the_whole(family: str, size: int) -> None:
    model = trained.make(family).double().eval()
    batch = trained.batch(family, 0, rows=7)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    if batch["labels"].dim() > 1:
        batch["labels"][0, :9] = -100  # rows differ in what counts
        batch["labels"][5] = -100
        batch["attention_mask"] = torch.ones_like(batch["labels"])
    whole = model(**batch).loss
    whole.backward()
    wanted, total = gradients(model), 0.0
    pieces = micro_batch.split(batch, size)
    for piece in pieces:
        loss = model(**piece.inputs).loss * piece.weight
        loss.backward()
        total += loss.item()
    assert sum(piece.weight for piece in pieces) == pytest.approx(1)
    assert total == pytest.approx(whole.item(), rel=1e-6)
    for one, other in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_tuple_of_inputs_and_classes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    x, y = torch.randn(11, 5).double(), torch.randint(0, 4, (11,)).index_fill(0, torch.tensor([0, 3, 4]), -100)
    nn.functional.cross_entropy(model(x), y).backward()
    wanted = gradients(model)
    for piece in micro_batch.split((x, y), 4):
        some, their = piece.inputs
        (nn.functional.cross_entropy(model(some), their) * piece.weight).backward()
    for one, other in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def rows_of(pieces: list[Any]) -> list[int]:
    return [piece.inputs["labels"].shape[0] for piece in pieces]


def test_the_last_piece_has_what_is_left_and_empty_ones_are_left_out() -> None:
    labels = torch.ones(7, 4, dtype=torch.long)
    assert rows_of(micro_batch.split({"labels": labels}, 3)) == [3, 3, 1]
    labels[3:6] = -100
    assert [piece.weight for piece in micro_batch.split({"labels": labels}, 3)] == [0.75, 0.25]
    nothing = micro_batch.split({"labels": torch.full((4, 3), -100)}, 2)
    assert [piece.weight for piece in nothing] == [0.5, 0.5]  # so that the loss is NaN, as that of the whole is


def test_what_counts_can_be_said() -> None:
    labels = torch.tensor([[5, -100, -100], [-100, 5, 5]])
    assert [p.weight for p in micro_batch.split({"labels": labels}, 1)] == [1.0]
    assert [p.weight for p in micro_batch.split({"labels": labels}, 1, causal=False)] == [1 / 3, 2 / 3]
    assert [p.weight for p in micro_batch.split((labels, labels), 1)] == [1 / 3, 2 / 3]
    of_start = micro_batch.split({"start": labels, "labels": torch.zeros(2)}, 1, labels="start", causal=True)
    assert [p.weight for p in of_start] == [1.0]
    regression = micro_batch.split({"labels": torch.randn(4, 2)}, 3)
    assert [p.weight for p in regression] == [0.75, 0.25]


def test_structure_is_kept() -> None:
    batch = {
        "ids": torch.arange(6).view(3, 2), "mask": torch.ones(1, 1, 2, 2), "positions": torch.arange(2),
        "names": ["a", "b", "c"], "nested": {"pair": (torch.arange(3), None)}, "scale": torch.tensor(2.0),
        "flag": True,
    }  # fmt: skip
    last = micro_batch.split(batch, 2)[1].inputs
    assert list(last) == list(batch)
    assert last["ids"].tolist() == [[4, 5]]
    assert last["mask"] is batch["mask"]
    assert last["positions"] is batch["positions"]
    assert (last["names"], last["flag"], last["scale"]) == (["c"], True, batch["scale"])
    assert last["nested"]["pair"][0].tolist() == [2]
    assert last["nested"]["pair"][1] is None
    assert micro_batch.split(torch.arange(5), 5)[0].inputs.tolist() == [0, 1, 2, 3, 4]


def test_fake_batches_are_split_by_rows() -> None:
    with FakeTensorMode():
        pieces = micro_batch.split({"labels": torch.ones(5, 3, dtype=torch.long)}, 2)
    assert [piece.weight for piece in pieces] == [0.4, 0.4, 0.2]


def test_misuse() -> None:
    for wrong in (0, -2, 1.0, True):
        with pytest.raises(UsageError, match="micro-batches"):
            micro_batch.split(torch.ones(3), wrong)
    with pytest.raises(UsageError, match="no tensor"):
        micro_batch.split({"text": "words"}, 1)
    with pytest.raises(UsageError, match=r"\(3, 8, 4\)"):
        micro_batch.split({"labels": torch.ones(8, 4, dtype=torch.long), "positions": torch.ones(3, 8, 4)}, 2)
    with pytest.raises(UsageError, match="answers"):
        micro_batch.split({"labels": torch.ones(3)}, 1, labels="answers")


@given(st.integers(1, 4096), st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 4000))
def test_the_largest_that_fits_of_any_rising_prediction(upper: int, steps: list[int], budget: int) -> None:
    def predict(size: int) -> int:
        return 10 + sum(steps[i % len(steps)] for i in range(size)) // 3

    asked: list[int] = []

    def counted(size: int) -> int:
        assert 1 <= size <= upper
        asked.append(size)
        return predict(size)

    if predict(1) > budget:
        with pytest.raises(BudgetError) as caught:
            micro_batch.largest(counted, budget, upper)
        assert caught.value.smallest_bytes == {"": predict(1)}
        return
    found = micro_batch.largest(counted, budget, upper)
    assert predict(found) <= budget
    assert found == upper or predict(found + 1) > budget
    assert len(asked) == len(set(asked)) <= 4 + 2 * upper.bit_length()


def test_a_line_is_solved_in_four_calls() -> None:
    for each in (1, 7, 1 << 20):
        for budget_rows in (1, 2, 17, 100, 511):
            asked: list[int] = []

            def predict(size: int, each: int = each, asked: list[int] = asked) -> int:
                asked.append(size)
                return 1000 + each * size

            assert micro_batch.largest(predict, 1000 + each * budget_rows, 512) == budget_rows
            assert len(asked) <= 4


def test_the_batch_is_not_changed() -> None:
    batch = trained.batch("llama", 0)
    before = copy.deepcopy(batch)
    for piece in micro_batch.split(batch, 1):
        assert piece.inputs["input_ids"].data_ptr() >= batch["input_ids"].data_ptr()
    assert all(torch.equal(batch[name], before[name]) for name in before)
