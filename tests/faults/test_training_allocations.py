"""Memory that ends at any moment of a whole training: the right result, or one error; nothing left either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from brim.core.hardware import DISK
from brim.errors import BudgetError
from brim.planning.strategy.step import Fitted
from brim.run.train.loop import Training, train
from brim.techniques.activation_offload.activations import ToDisk, ToRam
from support.failing import Allocations
from support.tiny_model import held
from support.trainings import course, request, same_weights

KIB = 1024
CASES: dict[str, dict[str, Any]] = {
    "states and activations on disk": {"offload_optimizer": "disk", "offload_activations": 2},
    "an adapter": {"method": "lora"},
    "VRAM, states and activations in RAM": {
        "device": "emulated", "vram": "1GiB", "offload_optimizer": "ram", "offload_activations": 2
    },
    "VRAM, states on disk": {"device": "emulated", "vram": "1GiB", "offload_optimizer": "disk"},
}  # fmt: skip


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of a small model are worth moving, and most of them do not stay until they are needed again."""
    for way in (ToDisk, ToRam):
        monkeypatch.setattr(way, "smallest_bytes", 8 * KIB)
        monkeypatch.setattr(way, "window_bytes", 8 * KIB)


def run(model: Path, data: Path, output: Path, options: dict[str, Any], **more: Any) -> Training:
    return train(request(model, data, output, steps=2, micro_batch=2, save_every=1, **options, **more))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "times"), [*((name, 1) for name in CASES), (next(iter(CASES)), 3)])
def test_wherever_memory_ends_a_training_ends_right_or_with_one_error(
    name: str, times: int, tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None,
    small_windows: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    options, allocations = CASES[name], Allocations(monkeypatch)
    whole = run(tiny, text, tmp_path / "whole", options)
    total, tiers = allocations.count, set(allocations.tiers)
    assert total >= 5 and tiers == set(whole.plan.budget_bytes) - {DISK}
    before, repeated, refused = held(scratch), 0, None
    for n in range(1, total + 1):
        output = tmp_path / f"run-{n}"
        allocations.fail(n, times)
        try:
            found = run(tiny, text, output, options)
        except BudgetError as error:  # while the model is opened
            assert "Cannot allocate" in error.request and error.smallest_bytes
            refused = output
            del error
        else:
            # What is brought ahead of its use is brought again when it is used: then there is nothing to tell.
            repeated += len(found.notes)
            assert all("memory ran out" in note and "the same step" in note for note in found.notes)
            assert found.losses == whole.losses
            assert same_weights(output, tmp_path / "whole")
        assert allocations.count >= n
        assert held(scratch) == before
        assert list(output.rglob(".*")) == []
    allocations.fail(0)
    assert refused is not None  # when there is memory again, the same folder will do
    run(tiny, text, refused, options, resume=True)
    assert course(refused) == course(tmp_path / "whole")
    assert same_weights(refused, tmp_path / "whole")
    assert repeated >= 2 or times == 1


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(1, 5))
def test_a_process_that_ends_right_after_a_step_was_given_up_resumes_at_its_beginning(
    at: int, tiny: Path, text: Path, tmp_path: Path, scratch: Path, quick_trainings: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The checkpoint that is written then has the step's data and generators, not what was drawn of them since."""
    whole = train(request(tiny, text, tmp_path / "whole", steps=5))
    step, calls = Fitted.step, 0

    class Killed(BaseException):
        pass

    def failing(self: Fitted, *args: Any, **more: Any) -> torch.Tensor:
        nonlocal calls
        calls += not self.memory.fake
        if calls == at and not self.memory.fake:
            torch.rand(3)
            raise MemoryError
        if calls > at:
            raise Killed
        return step(self, *args, **more)

    monkeypatch.setattr(Fitted, "step", failing)
    with pytest.raises(Killed):
        train(request(tiny, text, tmp_path / "parts", steps=5))
    monkeypatch.setattr(Fitted, "step", step)
    rest = train(request(tiny, text, tmp_path / "parts", steps=5, resume=True))
    assert rest.losses == whole.losses[at - 1 :]
    assert same_weights(tmp_path / "parts", tmp_path / "whole")
