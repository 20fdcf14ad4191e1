"""What came once is expected to come again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.techniques.streaming.order import OrderPredictor


def mistakes(predictor: OrderPredictor, sequence: Sequence[int]) -> int:
    wrong = 0
    for block in sequence:
        wrong += next(predictor.upcoming(1), None) != block
        predictor.observe(block)
    return wrong


def test_before_anything_came_the_definition_is_the_order() -> None:
    predictor = OrderPredictor([2, 5, 7])
    assert list(predictor.upcoming(7)) == [2, 5, 7, 2, 5, 7, 2]
    assert mistakes(predictor, [2, 5, 7, 2, 5, 7]) == 0


def test_nothing_is_expected_of_no_blocks() -> None:
    assert list(OrderPredictor([]).upcoming(3)) == []


@pytest.mark.parametrize(
    "step",
    [
        [3, 1, 0, 2],  # definition order is wrong
        [0, 1, 1, 2, 3],  # called twice in a row
        [0, 1, 2, 1, 3],  # called again later
        [0, 2],  # some never come
        [1],
        [0, 1, 0, 2, 0, 3],  # one between all others
    ],
)
def test_a_step_is_learned_in_one_pass(step: list[int]) -> None:
    predictor = OrderPredictor(range(4))
    mistakes(predictor, step)
    mistakes(predictor, step[:2])  # from the end to the beginning again
    mistakes(predictor, step[2:])
    assert mistakes(predictor, step * 5) == 0


def test_an_encoder_that_runs_once_and_a_decoder_that_loops() -> None:
    predictor = OrderPredictor(range(6))
    run = [0, 1, 2, *[3, 4, 5] * 8]
    mistakes(predictor, run)
    assert mistakes(predictor, run) <= 2  # the turn from the loop to the encoder cannot be foreseen


def test_after_a_change_the_new_order_is_learned() -> None:
    predictor = OrderPredictor(range(5))
    mistakes(predictor, [0, 1, 2, 3, 4] * 3)
    assert mistakes(predictor, [4, 2, 0, 1, 3] * 2) <= 11
    assert mistakes(predictor, [4, 2, 0, 1, 3] * 3) == 0


@given(st.permutations(range(8)), st.integers(1, 20))
def test_any_order_of_all_blocks_is_foreseen_after_one_step(order: list[int], ahead: int) -> None:
    predictor = OrderPredictor(range(8))
    mistakes(predictor, [*order, *order[:2]])
    mistakes(predictor, order[2:])
    assert list(predictor.upcoming(ahead)) == [order[i % 8] for i in range(ahead)]


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 30))
def test_whatever_came_there_are_expectations_of_known_blocks(came: list[int], ahead: int) -> None:
    predictor = OrderPredictor(range(6))
    mistakes(predictor, came)
    expected = list(predictor.upcoming(ahead))
    assert len(expected) == ahead and set(expected) <= set(range(6))
