"""Ways to run a training step: they fit, they are spread, and what is free is taken first."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.core import EventKind, Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.planning.solver import steps
from brim.planning.solver.cost_model import held_bytes, peak_bytes
from brim.planning.solver.schedule import COMPUTE, lane_of
from brim.planning.solver.schedule import UPDATE as UPDATES
from brim.planning.solver.step_profile import (
    BACKWARD,
    FULL,
    FULL_OFFLOAD,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    UPDATE,
    Assignment,
    BlockProfile,
    Frame,
    Limits,
    StepProfile,
)
from brim.planning.solver.steps import training_step_s
from brim.planning.solver.training import baselines, best, smallest
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM, RESIDENT

MIB, GIB = 1 << 20, 1 << 30
GPU = Hardware(
    name="a card",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=24 * GIB, bytes_per_s=900e9),
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=40e9),
        Tier(name=DISK, capacity_bytes=1000 * GIB),
    ),
    links=(
        Link(source=RAM, target=VRAM, bytes_per_s=24e9),
        Link(source=VRAM, target=RAM, bytes_per_s=24e9),
        Link(source=DISK, target=RAM, bytes_per_s=5e9),
    ),
)
CPU = replace(GPU, name="a processor", compute=RAM, links=(GPU.links[2],))
COUNT = 8


def profile(*, batch: int = 4, kept: int = 100 * MIB, weights: int = 50 * MIB, seconds: float = 0.01) -> StepProfile:
    """A step of eight blocks, all trained."""
    blocks = [
        BlockProfile(
            name=f"layer.{index}",
            bytes=weights,
            trained_bytes=weights,
            forward_s=seconds,
            backward_s=2 * seconds,
            kept_bytes={KEEP: kept, SELECTIVE: kept // 2, FULL: kept // 10},
            again_s={SELECTIVE: seconds / 4, FULL: seconds},
            offload_bytes=kept * 9 // 10,
        )
        for index in range(COUNT)
    ]
    held = COUNT * weights
    return StepProfile(
        batch=batch,
        blocks=blocks,
        weight_bytes=held,
        gradient_bytes=held,
        state_bytes=2 * held,
        peak_bytes={BACKWARD: 3 * held + COUNT * kept, UPDATE: 4 * held},
        outside_s=(0.001, 0.002),
        update_s=0.004,
    )


def limits(vram: int, ram: int = 64 * GIB, **more: object) -> Limits:
    return Limits(budget_bytes={VRAM: vram, RAM: ram, DISK: 1000 * GIB}, **more)  # type: ignore[arg-type]


def fastest(step: StepProfile, hardware: Hardware, within: Limits) -> tuple[float, Assignment]:
    timed = [(training_step_s(step, hardware, made)[0], made) for made in best(step, hardware, within)]
    return min(timed, key=lambda pair: pair[0])


def plain(step: StepProfile, **more: object) -> Assignment:
    names = [block.name for block in step.blocks]
    frame = Frame(micro_batch=step.batch, **more)  # type: ignore[arg-type]
    return Assignment(frame=frame, weights=dict.fromkeys(names, RESIDENT), activations=dict.fromkeys(names, KEEP))


def test_where_all_fits_nothing_is_done() -> None:
    step = profile()
    seconds, made = fastest(step, GPU, limits(24 * GIB))
    assert set(made.weights.values()) == {RESIDENT}
    assert set(made.activations.values()) == {KEEP}
    assert made.frame.states == KEEP
    assert seconds == pytest.approx(COUNT * 0.03 + 0.003 + 0.004)


def test_a_plain_step_lasts_as_long_as_its_compute() -> None:
    step = profile()
    seconds, schedule = training_step_s(step, GPU, plain(step))
    assert seconds == pytest.approx(COUNT * 0.03 + 0.007)
    assert set(schedule.busy_s()) == {COMPUTE}


def test_activations_leave_before_weights_do_and_only_as_many_as_must() -> None:
    step = profile()
    need = step.peak_bytes[BACKWARD]
    _, made = fastest(step, GPU, limits(need - 300 * MIB, fixed={"states": KEEP, "micro_batch": 4}))
    counts = Counter(made.activations.values())
    assert set(made.weights.values()) == {RESIDENT}
    assert counts[KEEP] >= 2
    assert counts[KEEP] < COUNT


@pytest.mark.thorough
def test_with_little_memory_weights_come_and_go_evenly() -> None:
    step = profile(kept=10 * MIB, weights=200 * MIB)
    _, made = fastest(step, GPU, limits(1300 * MIB))
    streamed = [index for index, choice in enumerate(made.weights.values()) if choice == FROM_RAM]
    assert 0 < len(streamed) < COUNT
    gaps = [after - before for before, after in itertools.pairwise(streamed)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert made.frame.states != KEEP


@pytest.mark.thorough
def test_disk_is_used_only_where_ram_is_short() -> None:
    step = profile(kept=10 * MIB, weights=200 * MIB)
    _, roomy = fastest(step, GPU, limits(1300 * MIB))
    _, short = fastest(step, GPU, limits(1300 * MIB, ram=700 * MIB))
    assert FROM_DISK not in roomy.weights.values()
    assert roomy.frame.states == RAM
    assert FROM_DISK in short.weights.values() or short.frame.states == DISK


def test_on_a_processor_disk_is_the_only_other_place() -> None:
    step = profile()
    found = list(best(step, CPU, Limits(budget_bytes={RAM: 1200 * MIB})))
    assert found
    for made in found:
        assert made.frame.states in (KEEP, DISK)
        assert set(made.weights.values()) <= {RESIDENT, FROM_DISK}


def test_nothing_fits_into_nothing() -> None:
    assert list(best(profile(), GPU, limits(10 * MIB))) == []


def test_orders_hold() -> None:
    within = limits(24 * GIB, fixed={"micro_batch": 2, "states": DISK}, activations=(FULL,), single_pass=False)
    for made in best(profile(), GPU, within):
        assert (made.frame.micro_batch, made.frame.states, made.frame.in_backward) == (2, DISK, False)
        assert set(made.activations.values()) == {FULL}


def test_what_a_proof_found_beyond_the_model_is_taken_into_account() -> None:
    step = profile()
    need = max(step.peak_bytes.values()) + 8192
    only_plain = {"fixed": {"states": KEEP, "micro_batch": 4, "in_backward": False}, "activations": (KEEP,)}
    assert any(set(m.weights.values()) == {RESIDENT} for m in best(step, GPU, limits(need, **only_plain)))
    more = limits(need, corrections={VRAM: 64 * MIB}, **only_plain)
    assert all(set(m.weights.values()) != {RESIDENT} for m in best(step, GPU, more))


def test_copies_hide_behind_compute_until_the_link_is_the_limit() -> None:
    step = profile(seconds=0.05)
    names = [block.name for block in step.blocks]
    streamed = replace(plain(step, in_backward=True), weights=dict.fromkeys(names, FROM_RAM))
    slow = Hardware(
        name="slow", compute=VRAM, tiers=GPU.tiers,
        links=(Link(source=RAM, target=VRAM, bytes_per_s=0.2e9), Link(source=VRAM, target=RAM, bytes_per_s=24e9)),
    )  # fmt: skip
    resident_s, _ = training_step_s(step, GPU, plain(step))
    hidden_s, _ = training_step_s(step, GPU, streamed)
    bound_s, schedule = training_step_s(step, slow, streamed)
    assert hidden_s <= resident_s * 1.05
    moved_s = 2 * (COUNT - streamed.frame.slots) * step.blocks[0].bytes / 0.2e9  # at its ends it holds what comes
    assert bound_s == pytest.approx(moved_s, rel=0.15)
    idle = [event for event in schedule.timeline("steps", VRAM) if event.kind is EventKind.IDLE]
    waited_s = sum(event.duration_s for event in idle if event.label == lane_of(RAM, VRAM))
    assert waited_s > moved_s  # over three steps


@pytest.mark.parametrize(("slots", "in_backward", "loads"), [(2, True, 12), (3, True, 10), (2, False, 20)])
def test_the_ring_holds_what_is_wanted_again_where_passes_turn(slots: int, in_backward: bool, loads: int) -> None:
    """Of eight blocks, those last used forward are the first used backward; a later update needs each once more."""
    step = profile(seconds=1.0)
    made = plain(step, slots=slots, in_backward=in_backward)
    made = replace(made, weights=dict.fromkeys(made.weights, FROM_DISK))
    _, schedule = training_step_s(step, CPU, made)
    names = [task.name for task in schedule.tasks]
    firsts = [index for index, name in enumerate(names) if name == "layer.0 forward"]
    third = schedule.tasks[firsts[1] + 1 : firsts[2] + 1]
    assert sum(task.lane == lane_of(DISK, RAM) for task in third) == loads


def test_updating_in_backward_hides_the_processors_work() -> None:
    step = profile(weights=400 * MIB, kept=400 * MIB, seconds=0.1)
    after_s, _ = training_step_s(step, GPU, plain(step, states=RAM))
    beside_s, _ = training_step_s(step, GPU, plain(step, states=RAM, in_backward=True))
    assert beside_s < after_s * 0.9


def test_a_batch_in_pieces_keeps_a_slow_link_free() -> None:
    """Weights that stream come twice a step, however large the batch, where its activations find no room."""
    step = profile(batch=8, kept=4 * GIB, weights=GIB, seconds=0.08)
    frozen = [replace(block, trained_bytes=0) for block in step.blocks]
    peaks = {BACKWARD: COUNT * 5 * GIB, UPDATE: COUNT * GIB}
    step = replace(step, blocks=frozen, gradient_bytes=0, state_bytes=0, peak_bytes=peaks)
    slow = replace(GPU, links=tuple(replace(link, bytes_per_s=10e9) for link in GPU.links))
    at_most = limits(7 * GIB, states_leave=False, single_pass=False)
    seconds, chosen = fastest(step, slow, at_most)
    assert chosen.frame.micro_batch == 8 and chosen.frame.block_rows
    other_s, other = fastest(step, slow, replace(at_most, activations=(KEEP, OFFLOAD, SELECTIVE)))
    assert other.frame.micro_batch < 8 and seconds < other_s


# The link's and the memory's bytes per second, and the seconds of a step's compute: of an H200, a 4090 and a 3060 for
# 1.1 B float32 parameters and 8 x 1024 tokens.
MACHINES = [(55e9, 200e9, 0.23), (25e9, 60e9, 0.6), (12e9, 40e9, 2.86)]


def adam(link_bytes_per_s: float, ram_bytes_per_s: float, compute_s: float) -> tuple[StepProfile, Hardware]:
    """AdamW of 1.1 billion parameters on a machine."""
    step = profile(batch=1, weights=550_000_000, kept=GIB, seconds=compute_s / 3 / COUNT)
    tiers = (GPU.tiers[0], replace(GPU.tiers[1], bytes_per_s=ram_bytes_per_s), GPU.tiers[2])
    links = tuple(replace(link, bytes_per_s=link_bytes_per_s) for link in GPU.links[:2])
    return step, replace(GPU, tiers=tiers, links=(*links, GPU.links[2]))


@pytest.mark.parametrize("machine", MACHINES)
def test_states_that_visit_the_gpu_keep_its_busiest_lane_busy(machine: tuple[float, float, float]) -> None:
    step, hardware = adam(*machine)
    seconds, _ = training_step_s(step, hardware, plain(step, states=RAM, in_backward=True, gpu_sixteenths=6))
    bound_s = max(machine[2], step.state_bytes / machine[0])
    assert bound_s <= seconds <= 1.05 * bound_s


@pytest.mark.parametrize("machine", MACHINES)
def test_states_on_disk_come_to_the_gpu_at_the_rate_of_the_drive(machine: tuple[float, float, float]) -> None:
    step, hardware = adam(*machine)
    seconds, schedule = training_step_s(step, hardware, plain(step, states=DISK, in_backward=True, gpu_sixteenths=6))
    reads_s = step.state_bytes / hardware.link(DISK, RAM).bytes_per_s
    bound_s = max(machine[2], reads_s)
    assert seconds == pytest.approx(bound_s, rel=0.05)
    assert {lane_of(RAM, VRAM), lane_of(VRAM, RAM), lane_of(DISK, RAM)} <= set(schedule.busy_s())


@pytest.mark.parametrize(
    ("machine", "on_gpu"), [(MACHINES[0], True), (MACHINES[1], True), ((3e9, 200e9, 0.6), False)]
)
def test_the_gpu_updates_where_the_link_is_fast(machine: tuple[float, float, float], on_gpu: bool) -> None:
    step, hardware = adam(*machine)
    _, chosen = fastest(step, hardware, limits(24 * GIB, fixed={"states": RAM}))
    assert bool(chosen.frame.gpu_sixteenths) == on_gpu


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("link_bytes_per_s", "compute_s", "repeated"), [(55e9, 1.74, True), (25e9, 6.6, True), (12e9, 38.7, False)]
)
def test_lora_in_a_fraction_of_its_memory_is_as_fast_as_the_busiest_lane(
    link_bytes_per_s: float, compute_s: float, repeated: bool
) -> None:
    """LoRA of a 7B over 32 x 1024 tokens in 8 GiB, on an H200, a 4090 and a 3060: recomputed where the link is the
    slower way to bring activations back, offloaded where computing is.
    """
    step = profile(batch=32, weights=405 * MIB, kept=4800 * MIB, seconds=compute_s / 3 / 32)
    like = replace(step.blocks[0], trained_bytes=0, backward_bytes=2400 * MIB)
    blocks = [replace(like, name=f"layer.{index}") for index in range(32)]
    peaks = {BACKWARD: 32 * 5205 * MIB, UPDATE: 32 * 405 * MIB}
    step = replace(
        step, blocks=blocks, weight_bytes=peaks[UPDATE], gradient_bytes=0, state_bytes=0, peak_bytes=peaks, update_s=0
    )
    card = replace(GPU, links=tuple(replace(link, bytes_per_s=link_bytes_per_s) for link in GPU.links))
    seconds, chosen = fastest(step, card, limits(8 * GIB, 200 * GIB, states_leave=False, single_pass=False))
    assert seconds <= 1.05 * chosen.bound_s
    assert ({FULL, FULL_OFFLOAD, SELECTIVE} >= set(chosen.activations.values())) == repeated
    if repeated:  # where the link is not the limit, weights may come more often
        assert step.passes(chosen.frame.micro_batch) <= 2
    print(f"{seconds:.2f} s, bound {chosen.bound_s:.2f} s")


@pytest.mark.parametrize(("seconds", "kept"), [(0.002, 60), (0.005, 60), (0.01, 60), (0.01, 5)])
def test_updates_in_backward_are_found_where_they_hide_what_states_wait_for(seconds: float, kept: int) -> None:
    step = replace(profile(kept=kept * MIB, seconds=seconds), update_s=0.2)
    by_hand = plain(step, states=DISK, in_backward=True)
    room = limits(0, held(step, by_hand, CPU)[RAM] + 50 * MIB)
    assert fastest(step, CPU, room)[0] <= training_step_s(step, CPU, by_hand)[0] * (1 + 1e-6)


def step_s(step: StepProfile, made: Assignment, shares: dict[tuple[str, str], float]) -> float:
    """Return a step's seconds on the CPU where lanes keep ``shares`` of their speeds beside each other."""
    with mock.patch.object(steps, "contention_of", lambda _: shares):
        return training_step_s(step, CPU, made)[0]


def test_both_directions_of_a_drive_share_its_time() -> None:
    step = profile()
    moved_s = step_s(step, plain(step, states=DISK), {})
    assert training_step_s(step, CPU, plain(step, states=DISK))[0] > 1.1 * moved_s


def test_what_updates_leave_a_drive_is_told_apart_from_what_products_do() -> None:
    """In turn with a drive, updates and the states that they wait for take as long as one after the other."""
    step = replace(profile(), update_s=0.5)
    made, read, write = plain(step, states=DISK), lane_of(DISK, RAM), lane_of(RAM, DISK)
    in_turn = {(a, b): 0.5 for a in (UPDATES, read, write) for b in (UPDATES, read, write) if a != b}
    beside_s, turns_s = step_s(step, made, {}), step_s(step, made, in_turn)
    moved_s = 2 * step.state_bytes / 5e9  # read, and written as fast
    held_s = step_s(step, plain(step), {})
    assert held_s == pytest.approx(COUNT * 0.03 + 0.003 + 0.5)
    assert beside_s < held_s + 0.35 * moved_s
    assert turns_s == pytest.approx(held_s + moved_s, rel=0.08)


@settings(max_examples=60)
@given(
    left=st.dictionaries(
        st.sampled_from(list(itertools.permutations((COMPUTE, lane_of(DISK, RAM), lane_of(RAM, DISK)), 2))),
        st.floats(0.05, 1.0),
    ),
    seconds=st.floats(1e-4, 0.1),
    layers=st.integers(1, COUNT),
    in_backward=st.booleans(),
)
def test_states_on_a_drive_make_no_step_faster_however_lanes_slow_each_other(
    left: dict[tuple[str, str], float], seconds: float, layers: int, in_backward: bool
) -> None:
    step = profile(seconds=seconds)
    step = replace(step, blocks=step.blocks[:layers])
    held_s = step_s(step, plain(step, in_backward=in_backward), left)
    moved_s = step_s(step, plain(step, states=DISK, in_backward=in_backward), left)
    assert moved_s >= held_s * (1 - 1e-9)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_many_micro_batches_take_as_long_as_they_would_one_by_one(micro_batch: int) -> None:
    step = profile(batch=8)
    made = replace(plain(step), frame=Frame(micro_batch=micro_batch))
    seconds, _ = training_step_s(step, GPU, made)
    assert seconds == pytest.approx(COUNT * 0.03 + 0.007)


def within(limits_: Limits, held: dict[str, int]) -> bool:
    return all(count <= limits_.budget_bytes.get(tier, count) for tier, count in held.items())


def held(step: StepProfile, made: Assignment, hardware: Hardware = GPU) -> dict[str, int]:
    return peak_bytes(held_bytes(step, hardware, made))


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    vram=st.integers(300, 4000),
    ram=st.integers(500, 8000),
    kept=st.integers(1, 300),
    weights=st.integers(10, 200),
    batch=st.sampled_from([1, 2, 4]),
)
def test_what_is_found_holds_no_more_than_the_budget_and_more_budget_is_never_slower(
    vram: int, ram: int, kept: int, weights: int, batch: int
) -> None:
    step = profile(batch=batch, kept=kept * MIB, weights=weights * MIB)
    small, large = limits(vram * MIB, ram * MIB), limits(vram * MIB * 5 // 4, ram * MIB * 5 // 4)
    found = list(best(step, GPU, small))
    for made in found:
        assert within(small, held(step, made))
        assert made.gap <= 0.01
    bounds = [min((m.bound_s for m in best(step, GPU, one)), default=float("inf")) for one in (small, large)]
    assert bounds[1] <= bounds[0] * (1 + 1e-3)


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(vram=st.integers(1, 1500), ram=st.integers(1, 3000), kept=st.integers(1, 300), weights=st.integers(10, 200))
def test_the_smallest_budget_is_one_and_little_less_is_none(vram: int, ram: int, kept: int, weights: int) -> None:
    step = profile(batch=2, kept=kept * MIB, weights=weights * MIB)
    asked = limits(vram * MIB, ram * MIB)
    found = smallest(step, GPU, asked)
    assert found is not None
    need, made = found
    assert within(replace(asked, budget_bytes={**asked.budget_bytes, **need}), held(step, made))
    for tier, count in need.items():
        assert list(best(step, GPU, replace(asked, budget_bytes={**asked.budget_bytes, **need})))
        less = {**asked.budget_bytes, **need, tier: count * 9 // 10 - MIB}
        assert not list(best(step, GPU, replace(asked, budget_bytes=less)))


def test_the_simple_ways_are_all_resident_checkpointed_and_streamed_from_where_there_is_room() -> None:
    step = profile()
    found = list(baselines(step, GPU, limits(24 * GIB)))
    assert plain(step).same(found[0])
    assert {frozenset(made.weights.values()) for made in found} == {
        frozenset({RESIDENT}), frozenset({FROM_RAM}), frozenset({FROM_DISK})
    }  # fmt: skip
    assert {frozenset(made.activations.values()) for made in found} == {frozenset({KEEP}), frozenset({FULL})}
    ordered = limits(24 * GIB, streams=False, activations=(FULL,), fixed={"micro_batch": 2, "states": KEEP})
    (only,) = baselines(step, GPU, ordered)
    assert (only.frame.micro_batch, set(only.activations.values())) == (2, {FULL})


def test_a_row_says_what_does_not_grow_with_rows() -> None:
    """Casts of weights are kept once, however few rows there are."""
    step = profile(batch=5, kept=100 * MIB)
    row = profile(batch=1, kept=60 * MIB, seconds=0.004)
    both = replace(step, row=row)
    assert both.at(5) is both
    assert both.at(1).blocks[0].kept_bytes[KEEP] == 60 * MIB
    assert both.at(3).blocks[0].kept_bytes[KEEP] == 80 * MIB
    assert both.at(3).blocks[0].forward_s == pytest.approx(0.007)
    assert step.at(1).blocks[0].kept_bytes[KEEP] == 20 * MIB
    _, made = fastest(both, GPU, limits(24 * GIB))
    assert made.frame.micro_batch == 5  # five passes take twice as long


def test_offloaded_activations_are_where_they_went() -> None:
    step = profile()
    names = [block.name for block in step.blocks]
    away = replace(plain(step), activations=dict.fromkeys(names, OFFLOAD))
    kept, gone = held(step, plain(step)), held(step, away)
    offloaded = COUNT * step.blocks[0].offload_bytes
    assert gone[RAM] - kept.get(RAM, 0) == offloaded
    assert kept[VRAM] - gone[VRAM] < offloaded  # two blocks' worth waits for its turn
