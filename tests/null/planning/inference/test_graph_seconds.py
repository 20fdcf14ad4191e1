"""A plan for a GPU promises the seconds and bytes of tokens that CUDA graphs generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.estimation.step_memory import PROMPT, TOKEN, Observation, watch_example
from brim.planning.inference.choose import GenerationCase, GenerationStrategy, search_generation
from brim.planning.inference.memory import Sizes
from brim.planning.opening import open_subject
from brim.planning.request import Request, machine_of
from brim.techniques.decoding_graphs import GRAPH_BYTES
from brim.techniques.streaming.placement import FROM_RAM
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from support.planned import LLAMA

_STEP_BYTES = 4 << 20  # of a search that lowers the budget


def case_on(folder: Path, gpu: str, layers: int = 4) -> GenerationCase:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    asked = Request(model=path, gpu=gpu, ram="8GiB", seq=64, new_tokens=16, host_compute=False)
    return open_subject(asked, machine_of(asked)).case


def without_graphs(case: GenerationCase) -> GenerationStrategy:
    return search_generation(replace(case, request=replace(case.request, graphs=False)))


def test_tokens_by_graphs_wait_for_few_launches_and_take_their_bytes(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")
    strategy, plain = search_generation(case), without_graphs(case)
    graphs_bytes = strategy.plan.settings[GRAPH_BYTES]
    assert GRAPH_BYTES not in plain.plan.settings
    # Launches of a pass take longer than its kernels here; those of transformers' loop are left.
    assert 30 * case.hardware.dispatch_s < strategy.plan.promise.step_s < 0.6 * plain.plan.promise.step_s
    before, promised = plain.plan.promise.peak_bytes[VRAM], strategy.plan.promise.peak_bytes[VRAM]
    assert before + graphs_bytes <= promised <= before + graphs_bytes + _STEP_BYTES


def test_weights_are_streamed_to_make_room_for_graphs(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060", layers=40)
    tight = {VRAM: without_graphs(case).plan.promise.peak_bytes[VRAM] + _STEP_BYTES, RAM: case.budget_bytes[RAM]}
    plan = search_generation(replace(case, budget_bytes=tight)).plan
    assert GRAPH_BYTES in plan.settings and FROM_RAM in plan.choices(STREAMING).values()
    assert plan.promise.peak_bytes[VRAM] <= tight[VRAM]


def test_weights_stay_where_graphs_would_take_more_than_a_tenth(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")
    tight = replace(case, budget_bytes={VRAM: 260 << 20, RAM: case.budget_bytes[RAM]})
    assert search_generation(tight).plan == without_graphs(tight).plan


def test_a_gpu_without_cuda_has_no_graphs(tmp_path: Path) -> None:
    known = case_on(tmp_path, "RTX 3060")
    case = replace(known, hardware=replace(known.hardware, name="a GPU of another kind"))
    assert search_generation(case).plan == without_graphs(case).plan


def test_a_pass_that_waits_for_values_is_promised_launch_by_launch(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")

    def waiting(sizes: Sizes) -> Observation:
        return replace(case.watch(sizes), waits=frozenset({TOKEN}))

    assert (
        search_generation(replace(case, watch=waiting)).plan.promise.step_s
        == without_graphs(case).plan.promise.step_s
    )


class Masked(nn.Module):
    def __init__(self, select: Any) -> None:
        super().__init__()
        self.linear, self.select = nn.Linear(4, 4), select

    def forward(self, x: torch.Tensor) -> Any:
        return self.select(self.linear(x))


@pytest.mark.parametrize(
    ("select", "waits"),
    [
        (lambda x: x[[0, 1]], ()),
        (lambda x: x[torch.tensor([1, 0])], ()),
        (lambda x: x[x > 0], (PROMPT,)),
        (lambda x: x.nonzero(), (PROMPT,)),
    ],
)
def test_an_observation_has_the_passes_in_which_the_host_waits(select: Any, waits: Sequence[str]) -> None:
    assert watch_example(Masked(select), [torch.ones(2, 4)]).waits == frozenset(waits)
