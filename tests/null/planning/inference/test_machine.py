"""Budgets as they are given: amounts, shares of what a tier has, and what is taken where nothing is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from brim.core import Hardware, Tier
from brim.core.hardware import RAM, VRAM
from brim.errors import UsageError
from brim.measure import capacity
from brim.measure.capacity import free_bytes
from brim.planning.inference import machine
from brim.planning.inference.machine import budgets, within_room
from brim.planning.request import Request, machine_of
from brim.units import exact_bytes

GIB = 1 << 30
CPU = Hardware(name="cpu", compute=RAM, tiers=(Tier(name=RAM, capacity_bytes=10 * GIB),))


def test_a_share_is_of_the_whole_tier() -> None:
    assert budgets(CPU, None, "80%") == {RAM: 8 * GIB}
    assert budgets(CPU, "50%", "80%") == {RAM: 5 * GIB}, "where RAM computes, the smaller of the two holds"
    gpu = replace(CPU, compute=VRAM, tiers=(Tier(name=VRAM, capacity_bytes=4 * GIB), *CPU.tiers))
    assert budgets(gpu, "25%", "10%", device="emulated") == {RAM: GIB, VRAM: GIB}


def test_nothing_given_is_what_is_free_less_a_tenth() -> None:
    whole = replace(CPU, tiers=(Tier(name=RAM, capacity_bytes=1 << 60),))
    assert budgets(whole, None, None)[RAM] <= free_bytes(RAM)


@pytest.mark.parametrize(("vram", "ram", "wanted"), [
    (None, None, (63, 9)), (None, "20GiB", (54, 20)), ("40GiB", None, (40, 36)), ("40GiB", "20GiB", (40, 20)),
])  # fmt: skip
def test_a_gpu_that_computes_in_ram_does_not_take_it_twice(
    vram: str | None, ram: str | None, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """80 GiB of one memory are free: nine tenths of its parts, and what is given as it is."""
    tiers = (Tier(name=VRAM, capacity_bytes=96 * GIB), Tier(name=RAM, capacity_bytes=96 * GIB))
    gb10 = SimpleNamespace(type="cpu", index=None, shares_ram=lambda: True)
    monkeypatch.setattr(machine, "computing", lambda _: gb10)
    monkeypatch.setattr(machine, "device_free_bytes", lambda _: 80 * GIB)
    monkeypatch.setattr(machine, "free_bytes", lambda _: 80 * GIB)
    monkeypatch.setattr(machine, "check_room", lambda *_: None)
    given = budgets(Hardware(name="one memory", compute=VRAM, tiers=tiers), vram, ram)
    assert (given[VRAM] // GIB, given[RAM] // GIB) == wanted


def test_a_budget_that_the_container_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_limits", lambda proc: iter([(600 << 20, 350 << 20)]))
    assert budgets(CPU, None, 300 << 20) == {RAM: 300 << 20}
    own = nn.Embedding.from_pretrained(torch.empty(60 << 10, 1 << 10))  # 240 MiB
    assert budgets(CPU, None, 590 << 20, owners=[own]) == {RAM: 590 << 20}, "the model's own counts"
    for vram, ram in ((None, "590MiB"), ("590MiB", None)):
        with pytest.raises(UsageError, match="350 MiB of that are free"):
            budgets(CPU, vram, ram)
    assert budgets(CPU, None, None)[RAM] <= 315 << 20
    assert within_room({RAM: 500 << 20}, given=False) == {RAM: 315 << 20}
    with pytest.raises(UsageError, match="350 MiB of that are free"):
        within_room({RAM: 500 << 20}, given=True)


def test_a_share_beside_a_card_of_the_catalog() -> None:
    request = Request(model="gpt2", gpu="RTX 3060", vram="50%", ram="8GiB")
    whole = machine_of(replace(request, vram=None)).hardware.tier(VRAM).capacity_bytes
    assert machine_of(request).budget_bytes[VRAM] == whole // 2
    assert "--vram 50%" in request.command() and exact_bytes("50%") == "50%"
    with pytest.raises(UsageError, match="total is unknown"):
        machine_of(replace(request, ram="80%"))  # of a host that nobody described
