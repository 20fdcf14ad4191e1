"""Of equally fast plans, the one that moves the fewest bytes is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.solver import BlockCost, Job
from brim.techniques.streaming.weight_streaming import NAME, RESIDENT
from support.planned import plan_streaming

GIB = 1 << 30


CPU = Hardware(
    name="processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=1 << 40, bytes_per_s=1e10), Tier(name=DISK, capacity_bytes=1 << 44)),
    links=(Link(source=DISK, target=RAM, bytes_per_s=float(GIB)),),
    flops_per_s={"float32": 1e12},
)
GPU = replace(
    CPU,
    compute=VRAM,
    tiers=(Tier(name=VRAM, capacity_bytes=1 << 40, bytes_per_s=1e12), *CPU.tiers),
    links=(*CPU.links, Link(source=RAM, target=VRAM, bytes_per_s=4.0 * GIB)),
)


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_a_plan_that_hides_its_copies_keeps_what_it_has_room_for(hardware: Hardware) -> None:
    """Every placement takes as long as compute does, but for what hooks cost."""
    blocks = [BlockCost(name=f"b{i}", bytes=GIB, compute_s=100.0, overhead_s=1e-4) for i in range(8)]
    job = Job(model="Model", task="generate", blocks=blocks, fixed_bytes=0, step_bytes=0)
    budget = {RAM: 64 * GIB, hardware.compute: 6 * GIB}
    choices = plan_streaming(job, hardware, budget).choices(NAME)
    assert sum(choice == RESIDENT for choice in choices.values()) == 4  # beside a ring of two
