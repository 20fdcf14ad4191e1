"""What a plan to train promises on a processor is what every one of its layers takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM
from brim.planning.request import Machine, Request
from brim.planning.solver.step_profile import KEEP, Assignment, Frame
from brim.planning.strategy.case import TrainingCase
from brim.planning.strategy.search import TrainingSearch
from brim.planning.training import case_of
from brim.techniques.streaming.placement import RESIDENT

GIB = 1 << 30
CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(
        Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=20e9),
        Tier(name=DISK, capacity_bytes=1000 * GIB),
    ),
    links=(Link(source=DISK, target=RAM, bytes_per_s=3e9),),
    flops_per_s={"float32": 1e11},
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500,
    "max_position_embeddings": 64,
}  # fmt: skip


def case(folder: Path, ram_bytes: int) -> TrainingCase:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    on = Machine(hardware=CPU, budget_bytes={RAM: ram_bytes, DISK: 100 * GIB}, assumed=("all of it",))
    return case_of(Request(model=folder, task="train", batch=8, seq=64), on, 0)


@pytest.mark.thorough
def test_on_a_processor_no_layer_is_left_out_of_a_proof(tmp_path: Path) -> None:
    """The holes of a heap do not grow layer by layer: a plan that was made of a few layers was refused by its run."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    on = Machine(hardware=CPU, budget_bytes={RAM: 8 * GIB, DISK: 100 * GIB}, assumed=("all of it",))
    case = case_of(Request(model=tmp_path, task="train", batch=2, seq=32), on, 0)
    planner = TrainingSearch(case)
    names = [block.name for block in planner.profile.blocks]
    assignment = Assignment(
        frame=Frame(micro_batch=2, states=DISK, in_backward=True),
        weights=dict.fromkeys(names, RESIDENT),
        activations=dict.fromkeys(names, KEEP),
    )
    choice = planner.choice(assignment)
    whole = case.step.simulate(choice).peak_bytes
    assert planner.peaks(assignment, choice) == case.step.in_all(choice, whole)
