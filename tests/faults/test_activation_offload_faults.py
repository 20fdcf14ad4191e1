"""Activation offload on disks that fail and in memory that ends: one clear error, nothing left, and the next step."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import BrimError, BudgetError, TransferError
from brim.memory.tiers import Memory
from brim.memory.transfer import Ticket
from brim.techniques.activation_offload.technique import ActivationOffload, apply
from failing import Allocations
from offloaded_activations import KIB, TIERS, Net, example, same, step
from tiny_model import held

BLOCKS = ("blocks.0",)
LEAST, WINDOW = 48 * KIB, 128 * KIB


@pytest.fixture(params=list(TIERS))
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = TIERS[request.param]()
    yield made
    made.close()


def fitted(memory: Memory) -> tuple[Net, ActivationOffload]:
    net = Net(blocks=1)
    return net, apply(net, BLOCKS, memory, smallest_bytes=LEAST, window_bytes=WINDOW)


def check_nothing_is_left(memory: Memory, handle: ActivationOffload) -> None:
    gc.collect()
    handle.settle()
    assert (memory.compute.held_bytes, memory.ram.held_bytes) == (0, 0)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


class Calls:
    """A function that fails at chosen calls."""

    def __init__(
        self, owner: Any, name: str, failure: Callable[[], BaseException], *, main_only: bool = False
    ) -> None:
        self.count, self._bad, self._failure, self._function = 0, -1, failure, getattr(owner, name)
        self._main_only = main_only
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(owner, name, lambda *args: self(*args))

    def __call__(self, *args: Any) -> Any:
        if self._main_only and threading.current_thread() is not threading.main_thread():
            return self._function(*args)
        self.count += 1
        if self.count == self._bad:
            raise self._failure()
        return self._function(*args)

    @contextmanager
    def failing(self, call: int) -> Iterator[None]:
        self.count, self._bad = 0, call
        yield
        self._bad = -1

    def restore(self) -> None:
        self._patch.undo()


@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("preadv", errno.EIO)])
def test_a_disk_that_fails_at_any_call_is_one_error_and_the_next_step_is_right(call: str, code: int) -> None:
    want, x, before = step(Net(blocks=1), example()), example(), held()
    memory = TIERS["disk"]()
    net, handle = fitted(memory)
    calls = Calls(os, call, lambda: OSError(code, os.strerror(code)))
    try:
        with calls.failing(-1):
            assert same(want, step(net, x))
            total = calls.count
        assert total >= 5
        told = 0
        for n in range(1, total + 1):
            with calls.failing(n):
                try:
                    assert same(want, step(net, x))
                except TransferError as error:
                    told += 1
                    assert os.strerror(code) in str(error) and error.todo
                    del error
            check_nothing_is_left(memory, handle)
            assert same(want, step(net, x))
        # A read ahead is tried again when it is needed, and what is still here when its write fails is not lost.
        assert told == 0 if call == "preadv" else 0 < told <= total
    finally:
        calls.restore()
    handle.remove()
    memory.close()
    del memory, net, handle
    assert held() == before


def test_a_disk_that_stays_bad_fails_every_step_until_it_is_good_again() -> None:
    want, x, memory = step(Net(blocks=1), example()), example(), TIERS["disk"]()
    net, handle = fitted(memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", _bad)
        for _ in range(3):
            with pytest.raises(TransferError, match=os.strerror(errno.EIO)):
                step(net, x)
    check_nothing_is_left(memory, handle)
    assert same(want, step(net, x))
    memory.close()


def _bad(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_budget_that_is_too_small_is_named_and_a_larger_one_works() -> None:
    x, memory = example(), TIERS["disk"]()
    memory.use_disk(folder=None, limit_bytes=256 * KIB)
    net, handle = fitted(memory)
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"Cannot allocate .* of disk") as caught:
            step(net, x)
        assert caught.value.smallest_bytes["disk"] > 256 * KIB
    del caught
    check_nothing_is_left(memory, handle)
    handle.remove()
    assert same(step(Net(blocks=1), x), step(net, x))
    memory.close()


def test_wherever_memory_ends_the_step_is_right_or_one_error(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    want, x = step(Net(blocks=1), example()), example()
    net, handle = fitted(memory)
    allocations = Allocations(monkeypatch)
    assert same(want, step(net, x))
    total = allocations.count
    assert total >= 5
    for n in range(1, total + 1):
        handle.settle()
        allocations.fail(n)
        try:
            assert same(want, step(net, x))
        except BudgetError as error:
            assert error.smallest_bytes
            del error
        assert allocations.count >= n
        allocations.fail(0)
        check_nothing_is_left(memory, handle)
        assert same(want, step(net, x))


def test_budgets_that_are_far_too_small_are_one_error(memory: Memory) -> None:
    x = example()
    net, handle = fitted(memory)
    for pool in (memory.compute, memory.ram):
        limit, pool.limit_bytes = pool.limit_bytes, 8 * KIB
        with pytest.raises(BudgetError, match="activations"):
            step(net, x)
        check_nothing_is_left(memory, handle)
        pool.limit_bytes = limit
    assert same(step(Net(blocks=1), x), step(net, x))


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_of_the_models_own_or_ctrl_c_leaves_nothing(
    memory: Memory, failure: type[BaseException], way: str
) -> None:
    want, x = step(Net(blocks=1), example()), example()
    net, handle = fitted(memory)

    def fail(*_: object) -> None:
        raise failure("stopped here")

    places: list[nn.Module] = [net.blocks[0].out, net.blocks[0].up, net.blocks[0].down]
    for place in places:
        if way == "forward":
            hook = place.register_forward_pre_hook(fail)
        else:
            hook = place.register_full_backward_hook(fail)
        with pytest.raises(failure, match="stopped here"):
            step(net, x)
        hook.remove()
        check_nothing_is_left(memory, handle)
    assert same(want, step(net, x))


def test_ctrl_c_in_any_wait_is_recovered_from(memory: Memory) -> None:
    """It reaches the main thread wherever that is: most of the time waiting for a copy."""
    want, x = step(Net(blocks=1), example()), example()
    net, handle = fitted(memory)
    waits = Calls(Ticket, "wait", KeyboardInterrupt, main_only=True)
    try:
        with waits.failing(-1):
            step(net, x)
            total = waits.count
        assert total >= 5
        for n in range(1, total + 1, 3):
            with waits.failing(n), suppress(KeyboardInterrupt, BrimError):
                step(net, x)
            check_nothing_is_left(memory, handle)
            assert same(want, step(net, x))
    finally:
        waits.restore()


def test_a_closed_memory_is_told(memory: Memory) -> None:
    net, handle = fitted(memory)
    loss = net(example()).sum()
    memory.close()
    with pytest.raises(TransferError, match="closed"):
        loss.backward()
    del loss
    check_nothing_is_left(memory, handle)
