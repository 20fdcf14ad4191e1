"""What a plan to train promises on a processor is what every one of its layers takes."""

from __future__ import annotations

import json
from pathlib import Path

from brim.core import Hardware, Link, Tier
from brim.core.hardware import DISK, RAM
from brim.planner.step_profile import KEEP, Frame, Way
from brim.run.planning_request import Machine, Request
from brim.run.planning_training import case_of
from brim.run.training_search import Planner
from brim.techniques.placement import RESIDENT

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


def test_on_a_processor_no_layer_is_left_out_of_a_proof(tmp_path: Path) -> None:
    """The holes of a heap do not grow layer by layer: a plan that was made of a few layers was refused by its run."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    on = Machine(hardware=CPU, budget_bytes={RAM: 8 * GIB, DISK: 100 * GIB}, assumed=("all of it",))
    case = case_of(Request(model=tmp_path, task="train", batch=2, seq=32), on, 0)
    planner = Planner(case)
    names = [block.name for block in planner.profile.blocks]
    way = Way(
        frame=Frame(micro_batch=2, states=DISK, in_backward=True),
        weights=dict.fromkeys(names, RESIDENT),
        activations=dict.fromkeys(names, KEEP),
    )
    choice = planner.choice(way)
    whole = case.rehearsal.rehearse(choice).peak_bytes
    assert planner.peaks(way, choice) == case.rehearsal.in_all(choice, whole)
