"""Of plans that are as fast, the one that moves least is taken, and none that is slower than a simple one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.solver import BlockCost, Job, plan_streaming
from brim.planning.solver.tie_break import AS_FAST, Weighed, quietest
from brim.techniques.streaming.weight_streaming import NAME, RESIDENT

GIB = 1 << 30


def weigh(seconds: float, moved: float, held: int = 0) -> Weighed:
    return Weighed(seconds=seconds, moved_bytes=moved, held_bytes=held)


def pick(*found: Weighed, most_s: float = float("inf")) -> Weighed:
    return quietest(found, lambda one: one, most_s=most_s)


def test_what_is_as_fast_and_moves_less_is_taken() -> None:
    fast, quiet, slow = weigh(1.0, 10), weigh(1.0 + 0.9 * AS_FAST, 2), weigh(1.0 + 1.1 * AS_FAST, 0)
    assert pick(fast, quiet, slow) is quiet
    assert pick(slow, quiet, fast) is quiet


def test_of_those_that_move_as_much_the_one_that_holds_less() -> None:
    large, small = weigh(1.0, 5, 100), weigh(1.005, 5, 50)
    assert pick(large, small) is small


def test_no_tie_is_slower_than_what_somebody_has_without_a_planner() -> None:
    fast, quiet = weigh(1.0, 10), weigh(1.008, 2)
    assert pick(fast, quiet, most_s=1.004) is fast
    assert pick(fast, quiet, most_s=1.008) is quiet


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 9), st.integers(0, 9)), min_size=1), st.floats(0, 10))
def test_it_is_never_slower_than_that_and_never_by_more_than_a_hundredth(
    rows: list[tuple[float, int, int]], most_s: float
) -> None:
    found = [weigh(*row) for row in rows]
    best = pick(*found, most_s=most_s)
    least_s = min(one.seconds for one in found)
    assert least_s <= best.seconds <= max(least_s, min(most_s, (1 + AS_FAST) * least_s))


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
