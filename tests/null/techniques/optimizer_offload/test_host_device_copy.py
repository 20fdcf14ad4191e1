"""Where a GPU computes, blocks whose states are in RAM are stepped beside the backward pass. VRAM is played here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.core import Promise
from brim.errors import TransferError
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.step import apply_choice
from brim.techniques.blocks import find_blocks
from brim.techniques.streaming.weight_streaming import Weights
from support.offloaded import Words, assert_same, batch, machine, make, offloaded, train

_SOON_S = 20.0


class Patient(torch.optim.SGD):
    """Steps nothing before ``begin`` is set; says so if that never happens."""

    begin: threading.Event
    waited_in_vain = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.begin.wait(_SOON_S):
            Patient.waited_in_vain = True
        super().step()


def patient(begin: threading.Event) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        Patient.begin, Patient.waited_in_vain = begin, False
        return Patient(model.parameters(), lr=1e-2, momentum=0.9)

    return made


def fitted_model(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Words, torch.optim.Optimizer]:
    model = make()
    return model, make_optimizer(model)


def test_backward_goes_on_while_a_block_is_stepped(tmp_path: Path) -> None:
    begin = threading.Event()
    begin.set()
    model, optimizer = fitted_model(patient(begin))
    twin = make()
    want = train(twin, torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9), steps=range(1))
    # The head is the first to be complete; these gradients come later, and before they are anybody's to be stepped.
    model.layers[3].down.weight.register_post_accumulate_grad_hook(lambda _: begin.set())
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram", block_bytes=1) as handle:
        begin.clear()
        loss = model(batch(0))
        with handle.final():
            loss.backward()
        optimizer.step()
        assert not Patient.waited_in_vain
        assert [loss.item()] == want
        assert_same(model, twin)


class Failing(torch.optim.SGD):
    """Its third step fails, counted from when ``calls`` is set to 0."""

    calls = -(10**6)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Failing.calls += 1
        if Failing.calls == 3:
            raise ArithmeticError("the third block")
        super().step()


@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_what_a_step_raises_reaches_the_caller(early: bool, tmp_path: Path) -> None:
    Failing.calls = -(10**6)
    model, optimizer = fitted_model(lambda m: Failing(m.parameters(), lr=1e-2, momentum=0.9))
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram") as handle:
        Failing.calls = 0
        with pytest.raises(ArithmeticError, match="the third block"):
            train(model, optimizer, steps=range(1), final=handle.final if early else None)
        handle.reset()
        optimizer.zero_grad()
        Failing.calls = 10
        train(model, optimizer, steps=range(1), final=handle.final if early else None)
        assert Failing.calls > 10


def test_threads_end_with_the_handle(tmp_path: Path) -> None:
    model, optimizer = fitted_model(lambda m: torch.optim.AdamW(m.parameters()))
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram") as handle:
        train(model, optimizer, steps=range(1), final=handle.final)
        assert any(thread.name.startswith("brim-update") for thread in threading.enumerate())
    assert not any(thread.name.startswith("brim-update") for thread in threading.enumerate())


@pytest.mark.parametrize("sizes", [[(40, 20)], [(40, 60)], [(20, 20), (20, 30), (100, 1)]])
def test_the_room_is_given_in_a_circle_and_never_twice(sizes: list[tuple[int, int]]) -> None:
    from brim.techniques.optimizer_offload.host_device_copy import BackgroundUpdates, _Update

    class Room:
        work_bytes = 100

    class Whole:
        host, fake = None, False

    class Over:
        def __init__(self) -> None:
            self.asked = False

        def result(self) -> None:
            self.asked = True

    beside: Any = BackgroundUpdates(Whole(), Room())  # type: ignore[arg-type]
    for size, count in sizes:
        for _ in range(count):
            begin, end = beside._room(size)
            assert begin >= 0 and end <= Room.work_bytes and end - begin == size
            assert all(end <= other.begin or other.end <= begin for other in beside._running)
            beside._running.append(_Update(begin, end, Over()))  # type: ignore[arg-type]
    beside.close()


def test_gradients_do_not_wait_for_their_update_in_vram(tmp_path: Path) -> None:
    """The first update holds the thread up, two more have room beside it."""
    begin = threading.Event()
    begin.set()
    model, optimizer = fitted_model(patient(begin))
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram", block_bytes=10_000) as handle:
        begin.clear()
        gone: list[weakref.ref[torch.Tensor]] = []
        for layer in model.layers[:3]:
            gradient = torch.ones_like(layer.up.weight)
            gone.append(weakref.ref(gradient.untyped_storage()))
            handle._background.begin([(layer.up.weight, gradient)], "a block", lambda carried: _step(carried, begin))
            del gradient
            assert [reference() for reference in gone] == [None] * len(gone)
        assert len(handle._background._running) == 3
        begin.set()
        handle._background.join()


def _step(carried: Any, begin: threading.Event) -> None:
    assert begin.wait(_SOON_S)
    with carried.stepping():
        pass


def test_an_interrupted_step_leaves_no_update_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = fitted_model(lambda m: torch.optim.AdamW(m.parameters()))
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram") as handle:
        model(batch(0)).backward()

        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(handle._background, "_wait_for_first", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert not handle._background._running
        monkeypatch.undo()


def test_a_handle_that_could_not_be_removed_still_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = fitted_model(lambda m: torch.optim.AdamW(m.parameters()))
    with offloaded(model, optimizer, machine("emulated", tmp_path), states="ram") as handle:
        train(model, optimizer, steps=range(1), final=handle.final)

        def refusing() -> None:
            raise TransferError("Cannot read the states.", "The disk is gone.")

        monkeypatch.setattr(handle._storage, "restore", refusing)
        with pytest.raises(TransferError):
            handle.remove()
        monkeypatch.undo()
        assert len(train(model, optimizer, steps=range(1, 2), final=handle.final)) == 1


def test_memory_is_closed_after_the_last_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, order = threading.Event(), []
    model, memory = make(), machine("emulated", tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = Choice(states="ram").plan(model="w", hardware="h", budget_bytes={}, promise=Promise(peak_bytes={}))
    fitted = apply_choice(model, optimizer, plan, memory, find_blocks(model), Weights())
    offload, close = fitted.offload, memory.close
    assert offload is not None

    def update(carried: Any) -> None:
        _step(carried, begin)
        order.append("updated")

    parameter = model.layers[0].up.weight
    offload._background.begin([(parameter, torch.ones_like(parameter))], "a block", update)
    monkeypatch.setattr(memory, "close", lambda: (order.append("closed"), close()))
    threading.Timer(0.2, begin.set).start()
    fitted.close()
    assert order == ["updated", "closed"]
    assert not any(thread.name.startswith("brim-update") for thread in threading.enumerate())
