"""What ``brim plan`` proposes for generating fits, is proved, and is not slower than the simple ways."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, UnsupportedError
from brim.planning.generation import baselines, gap, plan_generation, propose
from brim.planning.opening import open_subject
from brim.planning.request import Machine, Proposal, Request, machine_of
from brim.planning.subject import Subject
from brim.run.plan.search import answer_to
from brim.techniques.streaming.placement import COMPUTE_RAM, FROM_RAM, RESIDENT
from brim.techniques.streaming.weight_streaming import NAME
from support.planned import LLAMA
from support.tiny_model import save_llama

pytestmark = pytest.mark.slow  # every plan is a search and several traces

MIB = 1 << 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def request(model: Path, **more: Any) -> Request:
    return Request(model=model, **{"gpu": "RTX 3060", "ram": "8GiB", "seq": 64, "new_tokens": 16, **more})


@pytest.fixture(scope="module")
def subject(config: Path) -> Subject:
    asked = request(config)
    return open_subject(asked, machine_of(asked))


def under(subject: Subject, vram: int, ram: int = 8 << 30) -> Subject:
    return subject.on(dataclasses.replace(subject.machine, budget_bytes={VRAM: vram, RAM: ram}))


def choices(proposal: Proposal) -> set[str]:
    return set(proposal.plan.choices(NAME).values())


def test_what_fits_stays_and_is_limited_by_compute(config: Path) -> None:
    asked = request(config)
    first = plan_generation(asked, machine_of(asked))[0]
    assert choices(first) == {RESIDENT}
    assert first.limited_by == "compute" and first.proved and first.gap <= 0.01


def test_what_does_not_fit_is_streamed_or_computed_where_it_rests(config: Path) -> None:
    asked = request(config, vram="160MiB")
    machine = machine_of(asked)
    first = plan_generation(asked, machine)[0]
    assert choices(first) & {FROM_RAM, COMPUTE_RAM}
    assert first.plan.promise.peak_bytes[VRAM] <= machine.budget_bytes[VRAM]
    assert first.techniques and sum(effect.saves_bytes.get(VRAM, 0) for effect in first.techniques) > 0
    assert first.limited_by in ("link", "RAM", "compute")


def test_the_processor_alone_is_proposed_beside_the_gpu(config: Path) -> None:
    asked = request(config)
    found = plan_generation(asked, machine_of(asked))
    (alone,) = (one for one in found if "--device" in shlex.split(one.command))
    assert set(alone.plan.promise.peak_bytes) == {RAM}
    assert alone.limited_by == "RAM"
    assert found[0].step_s <= alone.step_s


def test_proposals_come_fastest_first_each_with_a_command_that_parses(config: Path) -> None:
    from brim.cli.generate import generate

    asked = request(config, prefer="memory", batch=2)
    found = plan_generation(asked, machine_of(asked))
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    assert {one.plan.choices("precision")[""] for one in found} >= {"bf16", "int8", "int4"}
    for one in found:
        words = shlex.split(one.command)
        assert words[:2] == ["brim", "generate"]
        known = {name for parameter in generate.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_fewer_bits_take_less_and_are_never_chosen_unasked(config: Path) -> None:
    wide, narrow = (
        plan_generation(request(config, precision=name), machine_of(request(config)))[0] for name in ("bf16", "int8")
    )
    assert narrow.plan.promise.peak_bytes[VRAM] < 0.7 * wide.plan.promise.peak_bytes[VRAM]
    found = plan_generation(request(config, prefer="memory", lossless=True), machine_of(request(config)))
    assert {one.plan.choices("precision")[""] for one in found} <= {"bf16", "fp16"}


def test_where_memory_is_preferred_the_gpu_does_it_in_the_least(config: Path) -> None:
    fast = answer_to(request(config, lossless=True)).proposals[0]
    small = answer_to(request(config, lossless=True, prefer="memory")).proposals
    first = small[0]
    assert first.hardware is None, "the GPU computes"
    assert first.plan.promise.peak_bytes[VRAM] < 0.6 * fast.plan.promise.peak_bytes[VRAM]
    held = [one.plan.promise.peak_bytes[VRAM if one.hardware is None else RAM] for one in small]
    assert held == sorted(held)
    assert first.plan.promise.peak_bytes[VRAM] <= first.plan.budget_bytes[VRAM]


def test_a_refusal_says_a_budget_that_does(config: Path) -> None:
    asked = request(config, vram="66MiB", ram="200MiB")
    machine = machine_of(asked)
    with pytest.raises(BudgetError) as caught:
        plan_generation(asked, machine)
    ((tier, smallest),) = caught.value.smallest_bytes.items()
    assert smallest > machine.budget_bytes[tier]


def test_a_model_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]}))
    with pytest.raises(UnsupportedError, match="does not generate"):
        plan_generation(request(path), machine_of(request(path)))


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(90, 300), st.integers(0, 60))
def test_more_memory_is_never_slower_and_no_simple_way_is_faster(subject: Subject, vram: int, more: int) -> None:
    try:
        small = propose(under(subject, vram * MIB))
    except BudgetError:
        return
    promise = small.plan.promise
    assert promise.peak_bytes[VRAM] <= vram * MIB
    assert promise.step_s >= promise.bound_s > 0
    assert all(promise.step_s <= seconds * (1 + 1e-9) for seconds in baselines(small).values())
    large = propose(under(subject, (vram + more) * MIB))
    assert large.plan.promise.step_s <= promise.step_s * 1.001


@pytest.mark.parametrize(("wider", "vram", "most"), [(1, 180, 0.01), (3, 822, 0.03), (3, 1092, 0.01)])
def test_the_gap_is_small_where_blocks_are_alike(tmp_path: Path, wider: int, vram: int, most: float) -> None:
    """In seconds of the pass. Blocks are few: under a small budget the link waits for a slot now and then, of which
    the bound knows nothing."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {name: wider * LLAMA[name] for name in sizes}))
    asked = request(path)
    found = propose(under(open_subject(asked, machine_of(asked)), vram * MIB))
    assert gap(found) <= most


@pytest.mark.parametrize("vram", [None, "8GiB"])
def test_seconds_of_a_large_model_are_within_a_hundredth_of_the_bound(vram: str | None) -> None:
    """Processor and link share what does not fit: 88 and 157 ms. The least busy lanes alone gave 100 and 163."""
    asked = Request(model="llama-3-8b", gpu="RTX 3060", seq=512, vram=vram)
    found = plan_generation(asked, machine_of(asked))
    assert all(one.gap <= 0.01 for one in found)
    assert found[0].step_s < (0.095 if vram is None else 0.160)


def test_a_stored_model_on_this_machine_gets_what_generate_will_promise(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_llama(tmp_path_factory.mktemp("stored") / "llama", layers=6, hidden=256)
    asked = Request(model=folder, seq=16, new_tokens=4, ram="300MiB")
    machine = machine_of(asked)
    (first,) = plan_generation(asked, machine)
    assert first.plan.promise.peak_bytes[RAM] <= 300 * MIB
    assert first.step_s > 0
    assert first.command == f"brim generate {folder} --prompt ... --ram 300MiB --max-new-tokens 4"


def test_machine_is_kept(config: Path) -> None:
    asked = request(config)
    machine: Machine = machine_of(asked)
    assert {one.plan.hardware for one in plan_generation(asked, machine)} == {
        machine.hardware.name,
        f"{machine.hardware.name}'s host",
    }
