"""Plans to train: proved for the budget, never slower than what is simple, and run exactly as they were made."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.cli.train import train as command
from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, ModelError
from brim.planning.proof import fits
from brim.planning.request import Machine, Proposal, Request
from brim.planning.solver.schedule import lane_of as lane
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.search import TrainingSearch
from brim.planning.training import BESIDE_BYTES, case_of, plan_training
from brim.techniques.streaming.placement import FROM_RAM

MIB, GIB = 1 << 20, 1 << 30
GPU = Hardware(
    name="a card",
    compute=VRAM,
    tiers=(
        Tier(name=VRAM, capacity_bytes=24 * GIB, bytes_per_s=400e9),
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=40e9),
        Tier(name=DISK, capacity_bytes=1000 * GIB),
    ),
    links=(
        Link(source=RAM, target=VRAM, bytes_per_s=12e9, duplex_bytes_per_s=10e9),
        Link(source=VRAM, target=RAM, bytes_per_s=12e9, duplex_bytes_per_s=10e9),
        Link(source=DISK, target=RAM, bytes_per_s=3e9),
    ),
    flops_per_s={"float32": 20e12, "bfloat16": 40e12},
)

pytestmark = pytest.mark.slow  # every plan is a search and several traces
LAYERS, HIDDEN, SEQ, BATCH = 4, 256, 128, 4


def llama(folder: Path, *, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("saved") / "llama")


def asked(model: Path, **options: Any) -> Request:
    return Request(**{"model": model, "task": "train", "batch": BATCH, "seq": SEQ, "top": 2, **options})


def machine(vram: int, ram: int = 8 * GIB) -> Machine:
    return Machine(hardware=GPU, budget_bytes={VRAM: vram, RAM: ram, DISK: 100 * GIB}, assumed=("all of it",))


def planner_of(request: Request, on: Machine) -> TrainingSearch:
    return TrainingSearch(replace(case_of(request, on, 0), exact=True))


def choice_of(proposal: Proposal) -> Choice:
    return Choice.of(proposal.plan)


def beside(whole: int, share: float) -> int:
    """``share`` of what tensors take of ``whole``, and what the program takes beside them."""
    spent = BESIDE_BYTES[VRAM]
    return spent + int((whole - spent) * share)


@cache
def roomy(model: Path) -> Mapping[str, int]:
    """What the plain step takes."""
    (best, *_) = plan_training(asked(model, top=1), machine(8 * GIB))
    assert not choice_of(best).offloads_optimizer
    return best.plan.promise.peak_bytes


def test_where_all_fits_all_stays_and_the_command_says_so(model: Path) -> None:
    best = plan_training(asked(model), machine(8 * GIB))[0]
    choice = choice_of(best)
    assert (choice.micro_batch, choice.states, choice.streams, choice.checkpointing) == (BATCH, "keep", False, {})
    assert best.limited_by == "compute"
    assert best.techniques == []
    words = shlex.split(best.command)
    assert words[:2] == ["brim", "train"]
    context = command.make_context("train", words[2:], resilient_parsing=False)
    assert context.params["checkpointing"] == "none"
    assert context.params["micro_batch"] == BATCH
    assert context.params["offload_optimizer"] == "keep"  # as the request has it
    assert words[words.index("--offload-optimizer") + 1] == "none"
    assert context.params["stream_weights"] is False
    assert words[words.index("--stream-weights") + 1] == "off"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.25, 0.95), ram=st.sampled_from([64, 512]))
def test_what_is_offered_fits_is_ranked_and_nothing_simple_is_faster(model: Path, share: float, ram: int) -> None:
    on = machine(int(roomy(model)[VRAM] * share), ram * MIB)
    request = asked(model)
    try:
        found = plan_training(request, on)
    except BudgetError as error:
        assert error.smallest_bytes
        return
    judge = planner_of(request, on)
    for one in found:
        assert fits(judge.peaks(judge.assignment(choice_of(one)), choice_of(one)), on.budget_bytes)  # type: ignore[arg-type]
        assert fits(one.plan.promise.peak_bytes, on.budget_bytes)
        assert one.proved
        assert one.gap <= 0.01
        assert one.step_s == one.plan.promise.step_s > 0
    told = [float(f"{one.step_s:.4g}") for one in found]
    assert told == sorted(told)
    for way in judge.baselines():
        simple = judge.prove(way, corrects=False)
        assert simple is None or found[0].step_s <= simple.step_s * (1 + 1e-3)


def test_more_memory_is_never_slower(model: Path) -> None:
    whole = roomy(model)[VRAM]
    sizes = [whole * part // 16 for part in (11, 12, 14, 18)]
    steps = [plan_training(asked(model, top=1), machine(size))[0].step_s for size in sizes]
    assert all(more <= less for less, more in itertools.pairwise(steps))
    assert steps[0] > steps[-1]


@pytest.mark.parametrize(("vram", "ram"), [(20 * MIB, 8 * GIB), (100 * MIB, 16 * MIB), (8 * MIB, 8 * MIB)])
def test_where_nothing_fits_the_smallest_bytes_do(model: Path, vram: int, ram: int) -> None:
    on = machine(vram, ram)
    with pytest.raises(BudgetError) as refused:
        plan_training(asked(model, top=1), on)
    need = refused.value.smallest_bytes
    assert need
    assert all(count > on.budget_bytes[tier] for tier, count in need.items())
    (best,) = plan_training(asked(model, top=1), replace(on, budget_bytes={**on.budget_bytes, **need}))
    assert fits(best.plan.promise.peak_bytes, {**on.budget_bytes, **need})


def test_each_technique_says_what_it_saves_and_what_else_would(model: Path) -> None:
    whole = roomy(model)[VRAM]
    best = plan_training(asked(model), machine(beside(whole, 0.5)))[0]
    assert best.techniques
    for effect in best.techniques:
        assert effect.what
        assert any(count > 0 for count in effect.saves_bytes.values()) or effect.costs_s <= 0
    assert best.frees
    for effect in best.frees:
        assert max(effect.saves_bytes.values()) >= MIB
    assert best.to_json()["frees"][0].keys() == {"technique", "what", "saves_bytes", "costs_s"}


def test_a_base_that_is_only_read_stays_as_it_is_stored_and_goes_one_way(tmp_path: Path) -> None:
    wide = llama(tmp_path / "wide", hidden=1024)  # 0.1 GB in 16 bits: what a process takes besides is little to that
    request = asked(wide, method="lora", batch=1, top=1, precision="bf16-mixed")
    whole = plan_training(request, machine(8 * GIB))[0].plan.promise.peak_bytes[VRAM]
    on = machine(whole * 7 // 10)
    (best,) = plan_training(request, on)
    choice = choice_of(best)
    assert (choice.states, choice.gradients) == ("keep", "keep")
    assert fits(best.plan.promise.peak_bytes, {VRAM: whole * 7 // 10})
    judge = planner_of(request, on)
    proved = judge.prove(judge.assignment(choice), corrects=False)  # type: ignore[arg-type]
    assert proved is not None
    busy = proved.schedule.busy_s()
    assert busy[lane(RAM, VRAM)] > 0
    assert busy.get(lane(VRAM, RAM), 0) == 0


def test_an_optimizer_of_its_own_keeps_its_states(model: Path) -> None:
    whole = plan_training(asked(model, precision="bf16-master"), machine(8 * GIB))[0].plan.promise.peak_bytes[VRAM]
    for one in plan_training(asked(model, precision="bf16-master"), machine(whole - MIB)):
        choice = choice_of(one)
        assert (choice.states, choice.gradients, choice.in_backward, choice.streams) == ("keep", "keep", False, False)


def test_a_model_without_a_loss_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["ViTModel"], "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "intermediate_size": 64}))
    with pytest.raises(ModelError, match="train"):
        plan_training(asked(tmp_path), machine(8 * GIB))


# -- deep models, of which a few layers are traced

DEEP = 14
WAYS: list[dict[str, Any]] = [
    {},
    {"micro_batch": 1},
    {"kept": {"full": range(DEEP)}},
    {"kept": {"full": range(0, DEEP, 2)}, "micro_batch": 2},
    {"kept": {"selective": range(7)}, "states": "ram"},
    {"kept": {"offload": range(DEEP)}, "states": "ram", "in_backward": True},
    {"streams": range(0, DEEP, 2), "states": "ram", "in_backward": True},
    {"streams": range(DEEP), "kept": {"full": range(DEEP)}, "states": "disk", "in_backward": True},
    {"states": "ram", "gradients": "ram", "micro_batch": 1, "chunk_tokens": 256},
]


def layer(number: int) -> str:
    return f"model.layers.{number}"


def choice_for(way: Mapping[str, Any], precision: str) -> Choice:
    kept = way.get("kept", {})
    streamed = {layer(n): FROM_RAM for n in way.get("streams", ())}
    return Choice(
        precision=precision,
        micro_batch=way.get("micro_batch", BATCH),
        checkpointing={layer(n): name for name, layers in kept.items() if name != "offload" for n in layers},
        activations=tuple(layer(n) for n in kept.get("offload", ())),
        states=way.get("states", "keep"),
        gradients=way.get("gradients", "keep"),
        in_backward=way.get("in_backward", False),
        chunk_tokens=way.get("chunk_tokens", 0),
        streaming=streamed,
        streaming_settings={"ring_slots": 2, "staging_slots": 2} if streamed else {},
    )


@pytest.fixture(scope="module")
def planners(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingSearch, TrainingSearch]:
    """Of a deep model: one that traces few layers, and one that traces all."""
    deep = llama(tmp_path_factory.mktemp("saved") / "deep", layers=DEEP, hidden=512)
    case = case_of(asked(deep, seq=256), machine(8 * GIB), 0)
    return TrainingSearch(case), TrainingSearch(replace(case, exact=True))


def test_the_profile_of_few_layers_is_that_of_all(planners: tuple[TrainingSearch, TrainingSearch]) -> None:
    few, every = (one.profile for one in planners)
    for part in ("weight_bytes", "gradient_bytes", "state_bytes", "early_gradient_bytes", "head_bytes"):
        assert getattr(few, part) == getattr(every, part), part
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=2e-3)
    assert few.update_s == pytest.approx(every.update_s, rel=0.01)
    assert sum(few.outside_s) == pytest.approx(sum(every.outside_s), rel=0.02)
    for one, other in zip(few.blocks, every.blocks, strict=True):
        assert one.name == other.name
        assert one.kept_bytes == pytest.approx(other.kept_bytes, rel=0.01)
        assert one.forward_s + one.backward_s == pytest.approx(other.forward_s + other.backward_s, rel=0.02)


@pytest.mark.parametrize("way", WAYS, ids=[" ".join(way) or "plain" for way in WAYS])
def test_a_few_layers_say_what_all_of_them_take(
    way: dict[str, Any], planners: tuple[TrainingSearch, TrainingSearch]
) -> None:
    few, every = planners
    choice = choice_for(way, "bf16-mixed")
    known = few.assignment(choice)
    assert known is not None
    said, true = few.peaks(known, choice), every.peaks(known, choice)
    assert said[DISK] == true[DISK]
    assert said[RAM] == pytest.approx(true[RAM], rel=0.05)  # slabs
    # Tensors to the byte; of segments that the allocator could not fill, rather too many.
    assert true[VRAM] - MIB <= said[VRAM] <= true[VRAM] + 96 * MIB
