"""Cached experts and blocks that the CPU computes: disks that fail, memory that ends, files that change."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.core import Plan
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, TransferError
from brim.models.opening import open_model
from brim.models.weights import by_parameter, materialize
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.blocks import Partition
from brim.techniques.experts.technique import NAME
from brim.techniques.streaming.weight_streaming import Weights
from support.failing import Allocations, Calls
from support.families import inputs, make, size_of
from support.hybrid import compute_some_in_ram
from support.tiny_model import held

GIVEN = inputs("qwen3-moe")


@pytest.fixture(autouse=True)
def _inference(cache: Path, scratch: Path) -> Iterator[None]:
    with torch.no_grad():
        yield


def model(**values: Any) -> Any:
    return make("qwen3-moe", num_hidden_layers=3, **values)


def with_experts(net: nn.Module, device: str, weights: Weights | None = None) -> tuple[Partition, Plan]:
    size = size_of(net)
    budget = {RAM: int(0.6 * size)} if device == "cpu" else {VRAM: int(0.6 * size), RAM: 2 * size}
    partition, plan = make_plan(
        net,
        machine(device),
        budget,
        Need(step_bytes=0),
        weights or Weights(),
        task="generate",  # type: ignore[arg-type]
    )
    assert plan.choices(NAME)
    return partition, plan


def on_host(net: nn.Module, device: str) -> tuple[Partition, Plan]:
    size = size_of(net)
    budget = {VRAM: int(0.85 * size), RAM: 2 * size}
    hardware = machine("emulated")
    partition, plan = make_plan(
        net, hardware, budget, Need(step_bytes=0, cache_experts=False), Weights(), task="forward"
    )
    return partition, compute_some_in_ram(plan, partition, 0.5)


WAYS: dict[str, tuple[Callable[..., tuple[Partition, Plan]], str]] = {
    "experts from disk": (with_experts, "cpu"),
    "experts from RAM": (with_experts, "emulated"),
    "computed by the CPU": (on_host, "emulated"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_wherever_memory_ends_the_module_is_as_it_was(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (planned, device) = model(), WAYS[way]
    want, values = net(**GIVEN).logits, {name: value.clone() for name, value in net.state_dict().items()}
    partition, plan = planned(net, device)
    before, allocations = held(), Allocations(monkeypatch)

    def fit_and_call() -> None:
        put_in_force(net, partition, plan, machine(device), Weights(), device)  # type: ignore[arg-type]
        assert torch.equal(net(**GIVEN).logits, want)

    fit_and_call()
    net.brim.remove()
    total = allocations.count
    assert total >= 3
    for n in sorted({*range(1, total + 1, max(1, total // 5)), total}):
        allocations.fail(n)
        with pytest.raises(BudgetError, match="are already in use"):
            fit_and_call()
        if "brim" in vars(net):  # it ended while running
            net.brim.remove()
        allocations.fail(0)
        assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
        assert "forward" not in vars(net.model.layers[0].mlp.experts)
        assert torch.equal(net(**GIVEN).logits, want)
        assert held() == before


@pytest.mark.parametrize("kernels", ["eager", "grouped_mm"])
def test_any_one_failed_read_of_an_expert_is_one_error_and_the_next_call_works(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    net.set_experts_implementation(kernels)
    want, before = net(**GIVEN).logits, held()
    partition, plan = with_experts(net, "cpu")
    handle = put_in_force(net, partition, plan, machine("cpu"), Weights(), "cpu")
    reads = Calls(monkeypatch, "preadv", errno.EIO)
    reads.fail(0)
    assert torch.equal(net(**GIVEN).logits, want)
    per_step = reads.count
    assert per_step >= 5
    for n in sorted({*range(1, per_step + 1, max(1, per_step // 6)), per_step}):
        reads.fail(n)
        failed = 0
        for _ in range(3):
            try:
                assert torch.equal(net(**GIVEN).logits, want)
            except TransferError as error:
                failed += 1
                assert error.todo
        assert failed <= 1
        assert torch.equal(net(**GIVEN).logits, want)
    handle.remove()
    assert torch.equal(net(**GIVEN).logits, want)
    del handle
    assert held() == before


def test_a_file_that_is_cut_short_is_an_error_and_works_again_when_mended(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened))
    partition, plan = with_experts(opened.module, "cpu", weights)
    handle = put_in_force(opened.module, partition, plan, machine("cpu"), weights, "cpu")
    want, path = opened.module(**GIVEN).logits, tmp_path / "model.safetensors"
    whole, times = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.truncate(10_000)
    for _ in range(2):
        with pytest.raises(TransferError, match="too early"):
            for _ in range(2):
                opened.module(**GIVEN)
    with pytest.raises(TransferError):
        handle.remove()
    path.write_bytes(whole)
    with pytest.raises(TransferError, match="It was written to since its header was read"):
        opened.module(**GIVEN)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the file that it was, as a copy with its times is
    assert torch.equal(opened.module(**GIVEN).logits, want)
    handle.remove()
    assert torch.equal(opened.module(**GIVEN).logits, want)


def test_an_interrupt_in_the_middle_of_the_experts_is_recovered_from() -> None:
    net = model()
    net.set_experts_implementation("eager")
    want = net(**GIVEN).logits
    partition, plan = with_experts(net, "emulated")
    handle = put_in_force(net, partition, plan, machine("emulated"), Weights(), "emulated")
    hook = net.model.layers[1].mlp.experts.act_fn.register_forward_pre_hook(_interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            net(**GIVEN)
    hook.remove()
    assert torch.equal(net(**GIVEN).logits, want)
    assert isinstance(net.model.layers[1].mlp.experts.gate_up_proj, nn.Parameter)
    handle.remove()
    assert torch.equal(net(**GIVEN).logits, want)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
