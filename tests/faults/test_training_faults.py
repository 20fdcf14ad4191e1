"""Disks that fail while a model trains, and two trainings at once: one typed error, no hang."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.cli import main
from brim.core.hardware import RAM, VRAM
from brim.errors import TransferError
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.planning.strategy.step import Fitted
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from support.failing import Calls
from support.forked import forked, was_killed
from support.streamed import MIB, X, make_net
from support.tiny_model import held
from support.trainings import BATCH, SEQ, course, weights


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


@pytest.mark.skipif(sys.platform != "linux", reason="another training is a copy of this process")
def test_a_second_training_is_refused_while_the_first_is_in_its_first_step(
    tiny: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    command = ["train", str(tiny), "--data", str(text), "--output", str(output), "--ram", "1GiB", "--device", "cpu"]
    command += ["--steps", "2", "--seq", str(SEQ), "--batch", str(BATCH)]
    (begun, tells), (waits, goes_on) = os.pipe(), os.pipe()

    def first() -> None:
        step = Fitted.step

        def waiting(self: Fitted, *arguments: Any, **options: Any) -> Any:
            Fitted.step = step  # type: ignore[method-assign]
            os.write(tells, b".")
            os.read(waits, 1)
            return step(self, *arguments, **options)

        Fitted.step = waiting  # type: ignore[method-assign]
        sys.stdout = sys.stderr = (tmp_path / "told").open("w")
        assert main(command) == 0

    pid = forked(first)
    os.close(tells)
    assert os.read(begun, 1) == b".", (tmp_path / "told").read_text()
    for more in ([], ["--resume"], ["--overwrite"]):
        assert main([*command, *more]) == 2
        told = capfd.readouterr()
        assert told.out == "" and told.err.count("Error: ") == 1 and "Traceback" not in told.err
        assert f"Another training writes to it: process {pid} on " in told.err
    os.write(goes_on, b".")
    assert not was_killed(pid)
    assert [step for step, _ in course(output)] == [1, 2] and weights(output)
    for end in (begun, waits, goes_on):
        os.close(end)
