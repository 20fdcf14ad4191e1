"""Memory and scratch disks that end, impossible budgets: one clear error, the module as it was, nothing leaked."""

from __future__ import annotations

import gc
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import brim
from brim.errors import BrimError, BudgetError, ModelError, TransferError
from support.failing import Allocations
from support.streamed import FITS, MIB, X, least_bytes, load_streamed, make_net, same_values
from support.tiny_model import held


@pytest.fixture(autouse=True)
def _inference(cache: Path, scratch: Path) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", list(FITS))
def test_wherever_memory_ends_the_module_is_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    before, want, values = held(), net(X), {k: v.clone() for k, v in net.state_dict().items()}
    addresses = [id(p) for p in net.parameters()]
    allocations = Allocations(monkeypatch)
    FITS[kind](net)
    net(X)
    net.brim.remove()
    total = allocations.count
    assert total >= 3
    for n in range(1, total + 1):
        allocations.fail(n)
        with pytest.raises(BudgetError, match="are already in use") as caught:
            FITS[kind](net)
            net(X)
        assert caught.value.smallest_bytes
        if "brim" in vars(net):  # it ended while running
            net.brim.remove()
        allocations.fail(0)
        assert same_values(net.state_dict(), values)
        assert [id(p) for p in net.parameters()] == addresses
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
        assert torch.equal(net(X), want)
        del caught
        assert held() == before


def test_a_scratch_folder_that_is_not_there_or_not_writable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    want = net(X)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "missing", tmp_path / "file"):
        monkeypatch.setenv("BRIM_SCRATCH", str(place))
        with pytest.raises(TransferError, match="BRIM_SCRATCH") as caught:
            FITS["cpu"](net)
        assert str(place) in str(caught.value)
        assert "brim" not in vars(net)
        assert torch.equal(net(X), want)


@pytest.mark.parametrize("limit", [100_000, 1_000_000])
def test_a_full_scratch_disk_is_one_error_and_the_module_is_as_it_was(scratch: Path, limit: int) -> None:
    net = make_net()
    before, want, values = held(scratch), net(X), {k: v.clone() for k, v in net.state_dict().items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(TransferError, match="scratch file") as caught:
            FITS["cpu"](net)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(scratch) in str(caught.value)
    assert same_values(net.state_dict(), values)
    assert torch.equal(net(X), want)
    del caught
    assert held(scratch) == before


def test_a_change_that_finds_no_room_is_told_and_the_handle_goes_on(scratch: Path, llama: Path) -> None:
    model, ids = load_streamed(llama), torch.arange(4)[None]
    want = model(ids).logits
    streamed = [d.block for d in model.brim.plan.decisions if d.choice == "stream:disk"]
    block = model.get_submodule(next(name for name in streamed if "layers" in name))

    def change(module: nn.Module, args: object) -> None:
        next(module.parameters()).add_(1)

    hook = block.register_forward_pre_hook(change)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for _ in range(3):
            with pytest.raises(TransferError, match="scratch file"):
                model(ids)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    hook.remove()
    assert torch.equal(model(ids).logits, want)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(FITS))
def test_fitting_and_removing_again_and_again_leaks_nothing(kind: str) -> None:
    net = make_net()
    want = net(X)

    def once() -> None:
        handle = FITS[kind](net)
        assert torch.equal(net(X), want)
        handle.remove()

    once()
    before, rss = held(), []
    for _ in range(5):
        for _ in range(10):
            once()
        gc.collect()
        rss.append(psutil.Process().memory_info().rss)
    assert held() == before
    assert min(rss[-2:]) - rss[0] < 8 * MIB  # of forty times a module of 2 MiB


@pytest.mark.thorough
def test_loading_and_dropping_again_and_again_leaks_nothing(saved_llama: Path) -> None:
    ids = torch.arange(4)[None]
    load_streamed(saved_llama)(ids)
    before, least, rss = held(), least_bytes(saved_llama), []
    for turn in range(6):
        model = load_streamed(saved_llama, least)
        model(ids)
        if turn % 3 == 0:
            model.brim.remove()
        elif turn % 3 == 1:
            model.brim.close()
            model.brim.close()
        del model
        gc.collect()
        rss.append(psutil.Process().memory_info().rss)
        assert held() == before
    assert min(rss[-2:]) - min(rss[:3]) < 8 * MIB


def test_only_pickled_weights_are_refused_and_a_pickle_beside_safetensors_is_not_touched(llama: Path) -> None:
    boom = llama / "pytorch_model.bin"
    torch.save({"model.norm.weight": torch.zeros(1)}, boom)
    boom.write_bytes(b"\x80\x04cos\n_exit\n(I7\ntR." + boom.read_bytes())  # os._exit(7) for whoever unpickles it
    os.utime(boom, (1, 1))
    assert brim.load(llama)(torch.arange(4)[None]).logits.shape == (1, 4, 300)
    assert boom.stat().st_atime == 1
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="never loads pickles"):
        brim.load(llama)


def test_a_budget_larger_than_the_machine_and_a_nonsense_one_are_errors(saved_llama: Path) -> None:
    for amount, word in (("900TiB", "This machine has"), ("3 potatoes", "8GiB, 512MiB"), (-1, "negative")):
        with pytest.raises(BrimError, match=word) as caught:
            brim.load(saved_llama, ram=amount)
        assert caught.value.exit_code == 2
    for amount in (2.5e9, "9" * 5000, "9" * 400 + ".5"):
        with pytest.raises(BrimError):
            brim.fit(make_net(), ram=amount)  # type: ignore[arg-type]


def test_the_smallest_budget_that_an_error_names_works(scratch: Path) -> None:
    net = make_net()
    want = net(X)
    for kind in ("cpu", "emulated"):
        tier = "ram" if kind == "cpu" else "vram"
        options: dict[str, Any] = {"device": kind, "activations": 16 << 10}
        with pytest.raises(BudgetError) as caught:
            brim.fit(net, **{tier: 0}, **options)
        least = caught.value.smallest_bytes[tier]
        with pytest.raises(BudgetError):
            brim.fit(net, **{tier: least - 1}, **options)
        handle = brim.fit(net, **{tier: least}, **options)
        assert torch.equal(net(X), want)
        assert handle.memory.compute.peak_bytes <= least
        handle.remove()
        assert shutil.disk_usage(scratch).free  # and the scratch file is gone with it
        assert list(scratch.iterdir()) == []
