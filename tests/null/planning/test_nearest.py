"""What would make a request fit: changes that the planner was asked for, each the largest that it accepts."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from brim import catalog
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UnsupportedError
from brim.planning.nearest import nearest
from brim.planning.request import Machine, Proposal, Request, machine_of
from brim.units import GIB, MIB

pytestmark = pytest.mark.slow  # every plan is a search and several traces

REQUEST = Request(model="llama-2-7b", task="train", gpu="RTX 3090", ram=64 * GIB, disk=0, batch=8, seq=4096)


def vram_bytes(request: Request) -> int:
    """Weights, gradients and states in VRAM, and a megabyte for every token: enough to plan by."""
    parameters = catalog.model(str(request.model)).parameters or 0
    kept = {"adamw": 16, "lion": 12, "sgd": 8}[request.optimizer] if request.method == "full" else 2
    return kept * parameters + request.batch * request.seq * MIB


def plan(request: Request, machine: Machine) -> list[Proposal]:
    """A planner that needs VRAM and nothing else."""
    if request.optimizer == "adamw8bit":
        raise UnsupportedError("8 bits were asked for.", "A library is missing.")
    if vram_bytes(request) > machine.budget_bytes[VRAM]:
        raise BudgetError("It was to fit.", "It does not.", smallest_bytes={VRAM: vram_bytes(request)})
    return []


def found(request: Request) -> tuple[dict[str, int], dict[str, str]]:
    machine = machine_of(request)
    with pytest.raises(BudgetError) as refused:
        plan(request, machine)
    needs, changes = nearest(request, machine, refused.value, plan)
    return needs, {change.change: change.command for change in changes}


def test_the_bytes_are_those_that_were_proved_and_no_more() -> None:
    needs, _ = found(REQUEST)
    assert vram_bytes(REQUEST) <= needs[VRAM] < vram_bytes(REQUEST) + MIB


def test_a_card_is_named_that_has_them() -> None:
    request = replace(REQUEST, method="lora", seq=6144)
    _, changes = found(request)
    (text,) = (text for text in changes if "more of VRAM" in text)
    card = catalog.gpu(shlex.split(changes[text])[shlex.split(changes[text]).index("--gpu") + 1])
    assert card.vendor == "nvidia" and card.capacity_bytes > vram_bytes(request)
    assert f"as {card.name} (" in text and "--vram" not in changes[text]


def test_the_longest_sequence_and_the_largest_batch_that_fit_are_named() -> None:
    _, changes = found(replace(REQUEST, method="lora"))
    assert "sequences of 2,048 tokens" not in changes and "sequences of 1,024 tokens" in changes
    assert "a batch of 2" in changes
    assert "--seq 1024" not in changes["a batch of 2"]  # one change at a time


def test_another_method_is_named_and_what_is_missing_is_passed_over() -> None:
    _, changes = found(replace(REQUEST, seq=64, batch=1))
    assert "LoRA in place of full training" in changes
    assert not any("adamw8bit" in text for text in changes)


def test_the_largest_smaller_model_of_the_family_is_named() -> None:
    _, changes = found(replace(REQUEST, seq=64, batch=1))
    (text,) = (text for text in changes if "B parameters" in text)
    assert text.startswith("llama-3.2-1b")
    assert "brim plan llama-3.2-1b" in changes[text]


def test_no_more_plans_are_made_than_may_be() -> None:
    calls: list[Request] = []

    def never(request: Request, machine: Machine) -> list[Proposal]:
        calls.append(request)
        raise BudgetError("It was to fit.", smallest_bytes={VRAM: 2 * machine.budget_bytes[VRAM]})

    error = BudgetError("It was to fit.", smallest_bytes={VRAM: vram_bytes(REQUEST)})
    needs, changes = nearest(REQUEST, machine_of(REQUEST), error, never)
    assert len(calls) <= 4 + 8
    assert needs == {VRAM: vram_bytes(REQUEST)} and not changes


def test_more_of_every_tier_that_is_short_is_asked_for_together() -> None:
    def both(request: Request, machine: Machine) -> list[Proposal]:
        least = {VRAM: 30 * GIB, RAM: 100 * GIB, DISK: 0}
        short = {tier: count for tier, count in least.items() if machine.budget_bytes[tier] < count}
        if short:
            # As a planner may: only of the tier that it looked at first.
            raise BudgetError("It was to fit.", smallest_bytes=dict([next(iter(short.items()))]))
        return []

    error = BudgetError("It was to fit.", smallest_bytes={VRAM: 30 * GIB})
    needs, changes = nearest(REQUEST, machine_of(REQUEST), error, both)
    assert needs == {VRAM: 30 * GIB, RAM: 100 * GIB}
    assert any("VRAM" in change.change and "RAM" in change.change for change in changes)
