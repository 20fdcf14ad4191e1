"""A plan for a GPU promises the seconds and bytes of tokens that CUDA graphs generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.estimation.step_memory import PROMPT, TOKEN, Observation, watch_example
from brim.planning.inference.choose import GenerationCase, GenerationStrategy, follow, search_generation
from brim.planning.inference.memory import Sizes
from brim.planning.opening import open_subject
from brim.planning.request import Request, machine_of
from brim.techniques.decoding_graphs import GRAPH_BYTES, graph_bytes
from brim.techniques.streaming.placement import FROM_RAM
from brim.techniques.streaming.weight_streaming import NAME as STREAMING
from support.planned import LLAMA

_STEP_BYTES = 4 << 20  # of a search that lowers the budget


def case_on(folder: Path, gpu: str, config: dict[str, Any] = LLAMA, new_tokens: int = 16) -> GenerationCase:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    asked = Request(model=path, gpu=gpu, ram="8GiB", seq=64, new_tokens=new_tokens, host_compute=False)
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


DEEP = {**LLAMA, "num_hidden_layers": 48}
WIDE = {**LLAMA, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 6}


@pytest.mark.parametrize(("config", "graphs"), [(DEEP, True), (WIDE, False)], ids=["deep", "wide"])
def test_weights_are_streamed_to_make_room_for_graphs_only_if_tokens_are_no_slower(
    config: dict[str, Any], graphs: bool, tmp_path: Path
) -> None:
    case = case_on(tmp_path, "RTX 3060", config)
    resident_bytes = without_graphs(case).plan.promise.peak_bytes[VRAM]
    budget = {VRAM: resident_bytes + _STEP_BYTES, RAM: case.budget_bytes[RAM]}
    tight = replace(case, budget_bytes=budget)
    plan, plain = search_generation(tight).plan, without_graphs(tight).plan
    assert (GRAPH_BYTES in plan.settings) == graphs == (FROM_RAM in plan.choices(STREAMING).values())
    assert plan.promise.peak_bytes[VRAM] <= budget[VRAM]
    assert plan.promise.step_s <= plain.promise.step_s + 30 * case.hardware.dispatch_s


def test_weights_stay_where_graphs_would_take_more_than_a_tenth(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")
    tight = replace(case, budget_bytes={VRAM: 260 << 20, RAM: case.budget_bytes[RAM]})
    assert search_generation(tight).plan == without_graphs(tight).plan


def test_a_gpu_without_cuda_has_no_graphs(tmp_path: Path) -> None:
    known = case_on(tmp_path, "RTX 3060")
    case = replace(known, hardware=replace(known.hardware, name="a GPU of another kind"))
    assert search_generation(case).plan == without_graphs(case).plan


def test_a_pass_that_waits_for_values_has_no_graphs(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")

    def waiting(sizes: Sizes) -> Observation:
        return replace(case.watch(sizes), waits=frozenset({TOKEN}))

    assert search_generation(replace(case, watch=waiting)).plan == without_graphs(case).plan


T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16, "d_ff": 128,
    "num_layers": 2, "num_heads": 4, "vocab_size": 100, "decoder_start_token_id": 0,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(("config", "new_tokens"), [(T5, 16), (MAMBA, 16), (LLAMA, 5)])
def test_what_no_graph_would_generate_is_promised_without(
    config: dict[str, Any], new_tokens: int, tmp_path: Path
) -> None:
    case = case_on(tmp_path, "RTX 3060", config, new_tokens)
    assert search_generation(case).plan == without_graphs(case).plan


def test_a_file_followed_without_graphs_is_promised_without(tmp_path: Path) -> None:
    case = case_on(tmp_path, "RTX 3060")
    given, plain = search_generation(case).plan, without_graphs(case)
    assert GRAPH_BYTES in given.settings
    again = follow(case, given)
    assert again.plan.promise == given.promise and again.plan.settings == given.settings
    other = follow(replace(case, request=replace(case.request, graphs=False)), given)
    assert GRAPH_BYTES not in other.plan.settings and other.job == plain.job
    assert other.plan.promise.step_s == pytest.approx(plain.plan.promise.step_s)


def test_layers_with_heads_of_several_sizes_count_as_the_largest() -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, global_head_dim=32))
    cache = graph_bytes(model, 1, 100, planned=True) - graph_bytes(model, 1, 0, planned=True) - 16 * 4 * 2 * 100
    assert cache == 100 * 2 * 32 * 6 * 4


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
        (lambda x: x.index_put((torch.tensor([0]),), torch.ones(1, 4)), ()),
        (lambda x: x.index_put((torch.ones(2, dtype=torch.bool),), torch.ones(2, 4)), (PROMPT,)),
    ],
)
def test_an_observation_has_the_passes_in_which_the_host_waits(select: Any, waits: Sequence[str]) -> None:
    assert watch_example(Masked(select), [torch.ones(2, 4)]).waits == frozenset(waits)
