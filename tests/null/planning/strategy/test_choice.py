"""A choice keeps all of its fields on its way to the solver's form and back, to a plan and back, and from orders."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from brim.core import Promise
from brim.core.hardware import RAM, VRAM
from brim.errors import FormatError
from brim.planning.solver.step_profile import Frame, Limits
from brim.planning.strategy.choice import SHARED, TOKENS_AT_ONCE, UNSOLVED, Choice, as_assignment, as_choice
from brim.planning.strategy.choose import within
from brim.planning.strategy.ladder import Orders
from brim.techniques.streaming.placement import STAGING_SLOTS
from brim.techniques.streaming.weight_streaming import RING_SLOTS

BLOCKS = ["a", "b", "c"]
CHOICE = Choice(
    micro_batch=2,
    block_rows=1,
    chunk_tokens=TOKENS_AT_ONCE,
    checkpointing={"a": "full"},
    activations=("a", "b"),
    in_backward=True,
    states="ram",
    gradients="disk",
    gpu_sixteenths=3,
    streaming={"a": "stream:ram", "b": "resident", "c": "resident"},
    streaming_settings={RING_SLOTS: 3, STAGING_SLOTS: 2},
)


def test_every_field_has_its_place() -> None:
    of_choice = {"chunk_tokens", "checkpointing", "activations", "streaming", "streaming_settings"}
    assert {field.name for field in fields(Choice)} == {*SHARED, *UNSOLVED, *of_choice}
    assert {field.name for field in fields(Frame)} == {*SHARED, "chunked", "slots"}


def test_a_choice_comes_back_from_the_solvers_form_and_from_a_plan() -> None:
    assignment = as_assignment(CHOICE, BLOCKS)
    assert assignment is not None and as_choice(assignment, CHOICE.precision, VRAM) == CHOICE
    unsolved = replace(CHOICE, in_place=True, brief_buffer=True, precision="bf16")
    assert as_assignment(unsolved, BLOCKS) == assignment
    plan = unsolved.plan(model="m", hardware="h", budget_bytes={RAM: 1}, promise=Promise(peak_bytes={}))
    assert Choice.of(plan) == unsolved


def test_what_the_solver_cannot_say_is_no_assignment() -> None:
    assert as_assignment(replace(CHOICE, chunk_tokens=TOKENS_AT_ONCE // 2), BLOCKS) is None
    assert as_assignment(CHOICE, ["b", "c"]) is None


def test_settings_that_no_training_has_are_refused() -> None:
    plan = CHOICE.plan(model="m", hardware="h", budget_bytes={}, promise=Promise(peak_bytes={}))
    with pytest.raises(FormatError, match="Unknown settings: batch, slots"):
        Choice.of(replace(plan, settings={**plan.settings, "slots": 2, "batch": 1}))


def test_every_order_narrows_the_limits_or_is_refused() -> None:
    limits = Limits(budget_bytes={})
    orders = {
        "micro_batch": 2,
        "checkpointing": "full",
        "offload_activations": 0,
        "offload_optimizer": "ram",
        "stream_weights": False,
    }
    for name, order in orders.items():
        assert within(Orders(**{name: order}), limits) != limits, name  # type: ignore[arg-type]
    # The precision is the case's; a number of blocks to offload goes to the fallback levels.
    assert {field.name for field in fields(Orders)} == {*orders, "precision"}
    assert within(Orders(precision="fp32", offload_activations=3), limits) == limits

    with pytest.raises(NotImplementedError, match="new_order"):
        order = Orders()
        vars(order)["new_order"] = 1
        within(order, limits)
