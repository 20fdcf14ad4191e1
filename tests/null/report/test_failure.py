"""Who asked for the memory that was not there, in which phase, and what helps against it."""

from __future__ import annotations

import pytest

from brim.core import Category, EventKind, Timeline
from brim.report.failure import Failure, advice_for, failure
from brim.report.phase import Phase
from brim.units import MIB

FORWARD = "forward at model.py:3\n_call_impl at /x/torch/nn/modules/module.py:1750\n<module> at train.py:9"
LOSS = "cross_entropy at /x/torch/nn/functional.py:3500\n<module> at train.py:10"
OWN_LINE = "<module> at train.py:10"
LISTS = (
    "_multi_tensor_adam at /x/torch/optim/adam.py:790\nstep at /x/torch/optim/adam.py:248\n<module> at train.py:12"
)
NO_PYTHON = ""


def timeline(*rows: tuple[str, int, str], asked: str, mib: int = 10) -> Timeline:
    """Blocks by their stack, size in MiB and category, all held when a request fails."""
    made = Timeline("run", measured=True)
    for number, (stack, size, category) in enumerate(rows):
        made.add(EventKind.ALLOC, "vram", size * MIB, storage=number, stack=stack, category=category)
    made.add(EventKind.OOM, "vram", mib * MIB, stack=asked)
    return made


def failed(*rows: tuple[str, int, str], asked: str, mib: int = 10) -> Failure:
    found = failure(timeline(*rows, asked=asked, mib=mib))
    assert found is not None
    return found


def test_a_run_that_did_not_fail_has_none() -> None:
    assert failure(Timeline("run", measured=True)) is None


@pytest.mark.parametrize(
    ("asked", "mib", "phase"),
    [
        (FORWARD, 10, Phase.FORWARD),
        (LOSS, 10, Phase.LOSS),
        (OWN_LINE, 10, Phase.LOSS),  # the program's own line, behind the model and before its backward pass
        (NO_PYTHON, 10, Phase.BACKWARD),  # autograd's own thread
        (NO_PYTHON, 40, Phase.LOSS),  # the gradient of the logits, as large as they are
        (LISTS, 10, Phase.OPTIMIZER),
    ],
)
def test_the_phase_is_that_of_the_stack_or_of_what_came_before(asked: str, mib: int, phase: Phase) -> None:
    held = (FORWARD, 30, Category.ACTIVATION), (LOSS, 40, Category.ACTIVATION)
    found = failed(*held, asked=asked, mib=mib)
    assert (found.phase, found.loss_bytes) == (phase, 40 * MIB)
    assert found.held_bytes == {Category.ACTIVATION: 70 * MIB}


def test_a_request_before_the_first_forward_pass_is_of_no_phase() -> None:
    assert failed(("<module> at train.py:2", 5, ""), asked=OWN_LINE).phase is None


def changes(found: Failure) -> list[str]:
    return [one.change for one in advice_for(found) if one.helps]


def test_the_optimizers_temporaries_get_its_settings_and_no_smaller_batch() -> None:
    rows = (FORWARD, 100, Category.PARAMETER), (LISTS, 90, Category.OPTIMIZER_TEMPORARY)
    found = failed(*rows, asked=LISTS)
    assert changes(found)[:3] == ["fused optimizer", "foreach=False", "states in 8 bits"]
    assert "half the batch" not in changes(found) and "checkpointing" not in changes(found)
    assert advice_for(found)[0].text.endswith("That is 100 MiB here.")


def test_a_loss_gets_its_logits_first_unless_the_layers_hold_most() -> None:
    logits = (FORWARD, 10, Category.ACTIVATION), (LOSS, 40, Category.ACTIVATION)
    assert changes(failed(*logits, asked=LOSS))[0] == "loss in chunks"
    layers = (FORWARD, 400, Category.ACTIVATION), (LOSS, 40, Category.ACTIVATION)
    assert changes(failed(*layers, asked=LOSS))[:2] == ["half the batch", "checkpointing"]


def test_where_states_hold_most_a_smaller_step_is_not_the_first_advice() -> None:
    rows = (FORWARD, 100, Category.PARAMETER), (LISTS, 200, Category.OPTIMIZER_STATE)
    assert changes(failed(*rows, asked=FORWARD))[0] == "states in 8 bits"


def test_an_evaluation_that_keeps_activations_is_told_to_keep_none() -> None:
    evaluated = f"{FORWARD}\nevaluate at train.py:30"
    rows = ((evaluated, 300, Category.ACTIVATION),)
    assert changes(failed(*rows, asked=evaluated))[0] == "no gradients in evaluation"
    assert changes(failed(asked=evaluated))[0] == "half the batch"
