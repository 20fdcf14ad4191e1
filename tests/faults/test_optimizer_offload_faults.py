"""Memory and disks that end while an optimizer is offloaded: one clear error, nothing leaked, right afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import BrimError, BudgetError, TransferError
from brim.memory.tiers import Memory
from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload.technique import OptimizerOffload, apply
from failing import Allocations, Calls, full
from offloaded import Words, assert_same, assert_same_state, backward, groups, machine, make, train
from tiny_model import held

CASES = [
    ("cpu", "disk", "disk"),
    ("emulated", "ram", "ram"),
    ("emulated", "disk", "ram"),
    ("emulated", "keep", "ram"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path


@pytest.fixture
def memory(folder: Path) -> Iterator[Memory]:
    made = machine("cpu", folder)
    yield made
    made.close()


def make_both() -> tuple[Words, torch.optim.Optimizer]:
    model = make(layers=3)
    return model, torch.optim.AdamW(groups(model), lr=1e-2)


def is_plain(model: Words, optimizer: torch.optim.Optimizer) -> bool:
    """Nothing of ours is on it."""
    hooks = [p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()]
    offloaded = [v for state in optimizer.state.values() for v in state.values() if type(v) is OffloadedTensor]
    offloaded += [p.grad for p in model.parameters() if type(p.grad) is OffloadedTensor]
    return not any(hooks) and not offloaded and not {"step", "brim"} & vars(optimizer).keys()


def repeat_until_done(optimizer: torch.optim.Optimizer) -> int:
    """Call ``step`` again after each error. Returns how many there were."""
    for errors in range(50):
        try:
            optimizer.step()
        except BrimError:
            continue
        return errors
    raise AssertionError("it never went through")


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "states", "gradients"), CASES)
def test_wherever_memory_ends_nothing_is_lost(
    kind: str, states: str, gradients: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, plain = make_both()
    train(twin, plain, steps=range(2))
    allocations = Allocations(monkeypatch)
    before, total = held(), 1
    n = 0
    while n <= total:
        allocations.fail(n)
        memory = machine(kind, folder)
        model, optimizer = make_both()
        options: dict[str, Any] = {"states": states, "gradients": gradients, "block_bytes": 3000}
        errors = 0
        try:
            handle = apply(model, optimizer, memory, **options)
        except BudgetError as error:
            assert error.smallest_bytes and is_plain(model, optimizer)
            assert memory.ram.held_bytes == memory.compute.held_bytes == 0
            errors, handle = 1, apply(model, optimizer, memory, **options)
        for step in range(2):
            backward(model, step)
            errors += repeat_until_done(optimizer)
            optimizer.zero_grad()
        handle.remove()
        assert errors == (n > 0)
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert is_plain(model, optimizer)
        assert memory.ram.held_bytes == memory.compute.held_bytes == 0
        memory.close()
        total, n = (allocations.count if n == 0 else total), n + 1
    assert total >= 2  # at least the buffers that states and gradients pass through
    assert held() == before


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "code"), [("pwrite", errno.ENOSPC), ("preadv", errno.EIO)])
@pytest.mark.parametrize("buffer_bytes", [None, 1])
def test_a_disk_that_fails_once_is_one_error_and_the_step_goes_on(
    name: str, code: int, buffer_bytes: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, plain = make_both()
    train(twin, plain, steps=range(2))
    fault = Calls(monkeypatch, name, code)
    n, total = 0, 1
    while n <= total:
        memory = machine("cpu", folder)
        model, optimizer = make_both()
        handle = apply(model, optimizer, memory, states="disk", block_bytes=3000, buffer_bytes=buffer_bytes)
        fault.fail(n)
        errors = 0
        for step in range(2):
            backward(model, step)
            errors += repeat_until_done(optimizer)
            optimizer.zero_grad()
        errors += remove_until_done(handle)
        assert errors <= (n > 0)
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        assert is_plain(model, optimizer)
        assert memory.ram.held_bytes == 0
        memory.close()
        total, n = (fault.count if n == 0 else total), n + 1
    assert total > 4


def remove_until_done(handle: OptimizerOffload) -> int:
    for errors in range(50):
        try:
            handle.remove()
        except TransferError:
            continue
        return errors
    raise AssertionError("it never went through")


def until_done(do: Callable[[], Any]) -> Any:
    """Its result, after as many TransferErrors as there are."""
    for _ in range(50):
        with contextlib.suppress(TransferError):
            return do()
    raise AssertionError("it never went through")


def used(model: Words, optimizer: torch.optim.Optimizer) -> list[float]:
    """Two steps whose gradients are scaled, looked at before the step and looked at after it."""
    found = []

    def anew(step: int) -> None:
        optimizer.zero_grad()
        backward(model, step)

    for step in range(2):
        until_done(lambda step=step: anew(step))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for when in range(2):
            for gradient in gradients:
                found.append(until_done(lambda gradient=gradient: gradient.norm().item()))
                if when == 0:
                    gradient.mul_(torch.tensor(0.5))
            if when == 0:
                until_done(optimizer.step)
    return found


@pytest.mark.parametrize("buffer_bytes", [None, 1])
def test_gradients_whose_write_fails_are_kept_until_it_succeeds(
    buffer_bytes: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, plain = make_both()
    wanted = used(twin, plain)
    fault = Calls(monkeypatch, "pwrite", errno.ENOSPC)
    n, total = 0, 1
    while n <= total:
        memory = machine("cpu", folder)
        model, optimizer = make_both()
        options: dict[str, Any] = {"states": "keep", "gradients": "disk", "block_bytes": 3000}
        handle = apply(model, optimizer, memory, **options, buffer_bytes=buffer_bytes)
        fault.fail(n)
        assert used(model, optimizer) == wanted
        assert_same(model, twin)
        handle.remove()
        memory.close()
        total, n = (fault.count if n == 0 else total), n + 1
    assert total > 4


def test_a_disk_that_stays_full_is_told_at_each_step_and_the_optimizer_can_be_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, plain = make_both()
    memory = machine("cpu", folder)
    model, optimizer = make_both()
    handle = apply(model, optimizer, memory, states="disk", block_bytes=3000)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    backward(model, 0)
    backward(twin, 0)
    for _ in range(3):
        with pytest.raises(TransferError, match="No space left"):
            optimizer.step()
    monkeypatch.setattr(os, "pwrite", real)
    repeat_until_done(optimizer)
    plain.step()
    assert_same(model, twin)
    handle.remove()
    assert_same_state(optimizer.state_dict(), plain.state_dict())
    memory.close()


def test_a_disk_budget_that_is_too_small_is_told_before_anything_is_changed(folder: Path) -> None:
    memory = machine("cpu", folder)
    memory.close()
    memory.use_disk(folder=str(folder), limit_bytes=10_000)
    model, optimizer = make_both()
    with pytest.raises(BudgetError, match=r"Cannot allocate .* of disk"):
        apply(model, optimizer, memory, states="disk", block_bytes=3000)
    assert is_plain(model, optimizer) and memory.ram.held_bytes == 0
    memory.close()


def test_an_exception_of_the_optimizer_itself_is_passed_on_and_breaks_nothing(memory: Memory) -> None:
    model, optimizer = make_both()
    handle = apply(model, optimizer, memory, states="disk", gradients="disk", block_bytes=3000)
    train(model, optimizer, steps=[0])
    good = [group["betas"] for group in optimizer.param_groups]
    backward(model, 1)
    for group in optimizer.param_groups:
        group["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(g["params"]) for g in groups(model)]
    for group, betas in zip(optimizer.param_groups, good, strict=True):
        group["betas"] = betas
    handle.reset()
    optimizer.zero_grad()
    train(model, optimizer, steps=[2], final=handle.final)
    handle.remove()
    assert is_plain(model, optimizer)
    assert memory.ram.held_bytes == 0


def test_a_backward_pass_that_fails_in_the_middle_leaves_the_next_one_right(memory: Memory) -> None:
    model, optimizer = make_both()
    twin, plain = make_both()
    with_handle: OptimizerOffload = apply(model, optimizer, memory, states="disk", gradients="disk", block_bytes=3000)

    class Stop(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise Stop

    for its_model, its in ((model, optimizer), (twin, plain)):
        backward(its_model, 5)
        hook = its_model.layers[1].up.weight.register_hook(stop)
        with pytest.raises(Stop):
            backward(its_model, 6)
        hook.remove()
        its.zero_grad()
        train(its_model, its)
    assert_same(model, twin)
    with_handle.remove()


def test_dropping_a_fitted_optimizer_leaves_no_thread_or_file(folder: Path) -> None:
    def once() -> None:
        model, optimizer = make_both()
        memory = machine("cpu", folder)
        apply(model, optimizer, memory, states="disk", gradients="disk", block_bytes=3000)
        train(model, optimizer, steps=[0])

    once()
    before = held()
    once()
    assert held() == before
