"""Disks that fail while a model trains through streamed weights: one typed error, and nothing hangs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.errors import TransferError
from brim.run.fit.machine import Need, machine, make_plan, put_in_force
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from support.failing import Calls
from support.streamed import MIB, X, make_net
from support.tiny_model import held


@pytest.fixture(autouse=True)
def _places(cache: object, scratch: object) -> None:
    """A cache and a scratch folder of the test's own."""


@pytest.fixture(params=["cpu", "emulated"])
def fit(request: pytest.FixtureRequest) -> Callable[[nn.Module], WeightStreaming]:
    def fit(net: nn.Module) -> WeightStreaming:
        budget = {RAM: MIB} if request.param == "cpu" else {VRAM: MIB, RAM: MIB}
        hardware = machine(request.param)
        partition, plan = make_plan(net, hardware, budget, Need(step_bytes=0), Weights(), task="train")
        assert len([d for d in plan.decisions if d.choice == "stream:disk"]) >= 4
        return put_in_force(net, partition, plan, hardware, Weights(), request.param, training=True)

    return fit


def gradients(net: nn.Module) -> list[torch.Tensor]:
    net(X).pow(2).sum().backward()
    made = [p.grad for p in net.parameters()]
    net.zero_grad()
    return made


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_any_one_failed_read_is_one_error_and_the_next_step_works(
    fit: Callable[[nn.Module], WeightStreaming], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    wanted, before = gradients(net), held()
    handle, reads = fit(net), Calls(monkeypatch, "preadv", errno.EIO)
    assert same(gradients(net), wanted)
    assert same(gradients(net), wanted)
    per_step = reads.count // 2
    assert per_step >= 5
    for n in range(1, per_step + 1):
        failed = 0
        reads.fail(n)
        for _ in range(3):  # reads are ahead of use
            try:
                assert same(gradients(net), wanted)
            except TransferError as error:
                failed += 1
                assert os.strerror(errno.EIO) in str(error)
                net.zero_grad()
        assert failed <= 1
    handle.remove()
    assert same(gradients(net), wanted)
    del handle
    assert held() == before


def test_a_full_disk_is_told_and_nothing_hangs(
    fit: Callable[[nn.Module], WeightStreaming], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held()
    for n in range(1, 7):
        net = make_net()
        handle, writes = fit(net), Calls(monkeypatch, "pwrite", errno.ENOSPC)
        writes.bad = lambda call, n=n: call >= n
        with pytest.raises(TransferError, match=os.strerror(errno.ENOSPC)):
            for _ in range(3):
                gradients(net)
                for name, block in handle.blocks:
                    with handle.updating(name), torch.no_grad():
                        for parameter in block:
                            parameter.add_(1)
            handle.settle()
        writes.bad = lambda call: False
        handle.close()
        del handle, net
        assert held()["threads"] == before["threads"]
        monkeypatch.undo()
