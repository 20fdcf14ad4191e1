"""What PyTorch's allocator is foreseen to reserve for a generation, traced without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError
from brim.planning.inference import device_memory
from brim.planning.inference.choose import GenerationCase, GenerationSearch, follow, search_generation
from brim.planning.inference.device_memory import SLACK_BYTES, DeviceMemory, Passes
from brim.planning.inference.pass_seconds import PassSeconds
from brim.planning.opening import open_subject
from brim.planning.request import Machine, Request
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from brim.units import GIB, MIB
from support.generating import save_words_llama
from support.recorded_cases import GPU

WEIGHTS_BYTES = 4 * 11 * MIB  # and as much as a vocabulary of 300 words
WORKSPACE_BYTES = 9 * MIB  # cuBLAS's, of most GPUs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words_llama(tmp_path_factory.mktemp("llama"), layers=4)


def case_of(saved: Path, vram: int, seq: int = 16) -> GenerationCase:
    asked = Request(model=saved, seq=seq, new_tokens=8, precision="fp32", host_compute=False)
    on = Machine(hardware=GPU, budget_bytes={VRAM: vram, RAM: GIB}, assumed=("all of it",))
    return open_subject(asked, on).case


def least_bytes(saved: Path) -> int:
    with pytest.raises(BudgetError) as refused:
        search_generation(case_of(saved, MIB))
    return refused.value.smallest_bytes[VRAM]


def foreseen(case: GenerationCase, limit_bytes: int | None = None, called: bool = False) -> int:
    strategy = search_generation(case)
    passes = Passes(sizes=strategy.sizes, placement=strategy.placement, called=called)
    memory = DeviceMemory(case.module, case.hardware, case.weights)
    return memory.reserved_bytes(strategy.partition, strategy.plan, passes, limit_bytes)


def test_weights_the_workspace_and_little_else(saved: Path, cache: Path) -> None:
    count = foreseen(case_of(saved, GIB))
    assert WEIGHTS_BYTES + WORKSPACE_BYTES < count < WEIGHTS_BYTES + WORKSPACE_BYTES + SLACK_BYTES + 16 * MIB


@pytest.mark.thorough
def test_weights_that_stream_are_not_there(saved: Path, cache: Path) -> None:
    whole, streamed = case_of(saved, GIB), case_of(saved, least_bytes(saved))
    assert set(search_generation(streamed).plan.choices(STREAMING).values()) == {"stream:ram"}
    assert foreseen(streamed) < foreseen(whole) - 10 * MIB


@pytest.mark.thorough
def test_a_program_that_calls_the_model_also_has_the_last_scores(saved: Path, cache: Path) -> None:
    case = case_of(saved, GIB, seq=2000)
    assert foreseen(case, called=True) > foreseen(case) + 2000 * 300 * 4


@pytest.mark.thorough
def test_it_is_traced_once(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(saved, GIB)
    first = foreseen(case)
    monkeypatch.setattr(device_memory, "trace", None)
    assert foreseen(case_of(saved, GIB)) == first


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU of a plan is this machine's."""
    monkeypatch.setattr(PassSeconds, "is_here", True)
    yield


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_no_plan_for_the_gpu_that_is_here_passes_its_budget(saved: Path, cache: Path) -> None:
    least = least_bytes(saved)
    for vram in (least, least + 5 * MIB, least + 20 * MIB, GIB):
        case = case_of(saved, vram)
        strategy = search_generation(case)
        assert strategy.plan.promise.peak_bytes[VRAM] <= vram
        assert strategy.plan.budget_bytes == case.budget_bytes
        memory = case.device_memory
        assert memory is not None
        assert GenerationSearch(case)._reserved_bytes(memory, strategy, vram) <= vram


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_a_plan_of_another_machine_is_refused_where_the_allocator_here_takes_more(saved: Path, cache: Path) -> None:
    case = case_of(saved, GIB)
    plan = search_generation(case).plan
    assert follow(case, plan).plan.promise == plan.promise
    with pytest.raises(BudgetError, match=r"PyTorch would reserve .* of VRAM, of 44 MiB"):
        follow(case, replace(plan, budget_bytes={**plan.budget_bytes, VRAM: WEIGHTS_BYTES}))
