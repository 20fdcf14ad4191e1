"""What tests on a GPU share: a device whose rates need no measuring, and that copies are waited for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from brim import accelerator, device
from brim.core import Hardware, Link, Tier
from brim.core.hardware import RAM, VRAM
from brim.errors import UnsupportedError
from brim.measure import probe as probing


@pytest.fixture(scope="session", autouse=True)
def known_gpu(cache_home: Path, known_machine: Hardware) -> Iterator[Hardware | None]:
    """Round figures for the device in the session's cache: plans in tests depend on its memory alone."""
    if not torch.cuda.is_available():
        yield None
        return
    machine = replace(
        known_machine,
        name=torch.cuda.get_device_name(),
        compute=VRAM,
        tiers=(Tier(name=VRAM, capacity_bytes=0, bytes_per_s=500e9), *known_machine.tiers),
        links=(
            *known_machine.links,
            Link(source=RAM, target=VRAM, bytes_per_s=20e9),
            Link(source=VRAM, target=RAM, bytes_per_s=20e9),
        ),
        flops_per_s={"float32": 20e12, "tf32": 80e12, "bfloat16": 160e12, "float16": 160e12, "float8_e4m3fn": 300e12},
    )
    facts = probing._fingerprint(accelerator.available(accelerator.CUDA), cache_home / "brim")
    probing._store(machine, probing._cache_file(facts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        yield machine


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests() -> None:
    """Free what earlier tests left in cycles: a test that measures memory would see it freed within itself."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_out_of_order() -> Iterator[None]:
    """On the rehearsal device: no two streams touch the same memory without one waiting for the other.

    It looks where it was started with ``--order late`` or ``seeded``.
    """
    try:
        rehearsed = device.loaded()
    except UnsupportedError:
        yield
        return
    rehearsed.reset()
    yield
    assert rehearsed.hazards() == []
