"""What brim answers today, recorded, so that a change that was meant to keep it shows any difference.

``python tests/support/recorded_cases.py`` writes ``recorded_cases.json`` anew: bytes to the byte, seconds to nine
digits, decisions by block, and every command's help. Machines and models are data; nothing here is measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

import brim
from brim.cli import COMMANDS
from brim.cli import brim as program
from brim.core import Hardware, Link, Plan, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError
from brim.planning.generation import plan_generation
from brim.planning.request import Machine, Request
from brim.planning.training import plan_training
from brim.units import GIB, MIB
from support.planned import LLAMA

FILE = Path(__file__).with_suffix(".json")
_DIGITS = 9

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
        Link(source=RAM, target=DISK, bytes_per_s=2e9),
    ),
    flops_per_s={"float32": 20e12, "bfloat16": 40e12},
)
CPU = Hardware(
    name="a processor",
    compute=RAM,
    tiers=(Tier(name=RAM, capacity_bytes=64 * GIB, bytes_per_s=20e9), Tier(name=DISK, capacity_bytes=1000 * GIB)),
    links=(
        Link(source=DISK, target=RAM, bytes_per_s=3e9),
        Link(source=RAM, target=DISK, bytes_per_s=2e9),
        Link(source=RAM, target=RAM, bytes_per_s=8e9),
    ),
    flops_per_s={"float32": 1e11, "bfloat16": 5e10},
)
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
MODELS = {"llama": LLAMA, "moe": MOE}


def gpu(vram: int, ram: int = 16 * GIB) -> Machine:
    return Machine(hardware=GPU, budget_bytes={VRAM: vram, RAM: ram, DISK: 100 * GIB}, assumed=("all of it",))


def cpu(ram: int) -> Machine:
    return Machine(hardware=CPU, budget_bytes={RAM: ram, DISK: 100 * GIB}, assumed=("all of it",))


# name -> model, machine, and what else is asked
GENERATIONS: dict[str, tuple[str, Machine, dict[str, Any]]] = {
    "generate: all fits a GPU": ("llama", gpu(GIB), {}),
    "generate: most fits a GPU": ("llama", gpu(150 * MIB), {"precision": "bf16"}),
    "generate: little fits a GPU": ("llama", gpu(100 * MIB), {"precision": "bf16"}),
    "generate: from disk beside a GPU": ("llama", gpu(110 * MIB, 310 * MIB), {"precision": "bf16"}),
    "generate: a batch, its cache partly in RAM": ("llama", gpu(320 * MIB), {"batch": 8, "seq": 1024}),
    "generate: int8 on a GPU": ("llama", gpu(115 * MIB), {"precision": "int8"}),
    "generate: as it is, quality first": ("llama", gpu(180 * MIB), {"prefer": "quality", "top": 3}),
    "generate: all fits RAM": ("llama", cpu(2 * GIB), {}),
    "generate: half fits RAM": ("llama", cpu(360 * MIB), {}),
    "generate: nothing fits": ("llama", cpu(260 * MIB), {}),
    "generate: experts fit a GPU": ("moe", gpu(GIB), {}),
    "generate: experts cached beside a GPU": ("moe", gpu(110 * MIB), {"precision": "bf16"}),
    "generate: experts cached from disk": ("moe", cpu(340 * MIB), {"precision": "bf16"}),
}
TRAININGS: dict[str, tuple[str, Machine, dict[str, Any]]] = {
    "train: all fits a GPU": ("llama", gpu(4 * GIB), {}),
    "train: states leave a GPU": ("llama", gpu(600 * MIB), {}),
    "train: lora in little": ("llama", gpu(250 * MIB), {"method": "lora"}),
    "train: fp32 with sgd": ("llama", gpu(480 * MIB), {"precision": "fp32", "optimizer": "sgd"}),
    "train: all fits RAM": ("llama", cpu(8 * GIB), {"precision": "fp32"}),
    "train: states on disk": ("llama", cpu(800 * MIB), {"precision": "fp32"}),
    "train: nothing fits": ("llama", gpu(40 * MIB), {}),
}
ESTIMATES: dict[str, dict[str, Any]] = {
    "estimate: generate bf16": {"task": "generate"},
    "estimate: generate fp32, batch 4": {"task": "generate", "precision": "fp32", "batch": 4},
    "estimate: generate int8": {"task": "generate", "precision": "int8"},
    "estimate: generate int4": {"task": "generate", "precision": "int4"},
    "estimate: train adamw": {"precision": "bf16-mixed"},
    "estimate: train sgd": {"precision": "fp32", "optimizer": "sgd"},
    "estimate: train adafactor": {"precision": "bf16", "optimizer": "adafactor"},
    "estimate: train adamw8bit": {"precision": "bf16", "optimizer": "adamw8bit"},
    "estimate: train lora": {"method": "lora", "precision": "bf16"},
    "estimate: train lora on int4": {"method": "lora", "precision": "int4"},
    "estimate: full checkpointing": {"checkpointing": "full", "precision": "bf16-mixed"},
    "estimate: selective checkpointing": {"checkpointing": "selective", "precision": "fp16-mixed"},
}


def _cases(folder: Path) -> dict[str, Callable[[], Any]]:
    """What to ask, by name."""
    paths = {}
    for name, config in MODELS.items():
        paths[name] = folder / name / "config.json"
        paths[name].parent.mkdir()
        paths[name].write_text(json.dumps(config))
    made: dict[str, Callable[[], Any]] = {}
    for name, (model, on, more) in GENERATIONS.items():
        asked = Request(model=paths[model], **{"seq": 64, "new_tokens": 16, "top": 1, **more})
        made[name] = lambda asked=asked, on=on: _proposals(plan_generation, asked, on)
    for name, (model, on, more) in TRAININGS.items():
        asked = Request(model=paths[model], task="train", **{"seq": 256, "batch": 2, "top": 1, **more})
        made[name] = lambda asked=asked, on=on: _proposals(plan_training, asked, on)
    for name, more in ESTIMATES.items():
        made[name] = lambda more=more: _estimate(paths["llama"], **{"task": "train", "seq": 256, **more})
    for command in ("", *COMMANDS):
        words = [command, "--help"] if command else ["--help"]
        made[f"help: brim {command}".rstrip()] = lambda words=words: _help(words)
    return made


def _proposals(planner: Callable[[Request, Machine], list[Any]], asked: Request, on: Machine) -> Any:
    try:
        found = planner(asked, on)
    except BudgetError as error:
        return {"needs_bytes": dict(error.smallest_bytes), "refusal": error.request}
    return [_plan(one.plan) | {"limited_by": one.limited_by} for one in found[: asked.top]]


def _plan(plan: Plan) -> dict[str, Any]:
    """Neighbouring blocks with one decision together."""
    rows = [(one.technique, one.choice, one.block, one.bytes) for one in plan.decisions]
    together = []
    for (technique, choice), few in groupby(rows, key=lambda row: row[:2]):
        held = list(few)
        blocks = held[0][2] if len(held) == 1 else f"{held[0][2]} ... {held[-1][2]}"
        together.append([technique, choice, len(held), blocks, sum(row[3] for row in held)])
    promise = plan.promise
    return {
        "decisions": together,
        "settings": dict(plan.settings),
        "peak_bytes": dict(promise.peak_bytes),
        "step_s": _told(promise.step_s),
        "bound_s": _told(promise.bound_s),
    }


def _told(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _estimate(model: Path, **asked: Any) -> dict[str, Any]:
    found = brim.estimate(model, gpu="RTX 4090", **asked)
    return {
        "peak_bytes": dataclasses.asdict(found.peak_bytes),
        "at_peak_bytes": dict(found.at_peak_bytes),
        "flops": found.flops,
        "step_s": None if found.step_s is None else _told(found.step_s),
    }


def _help(words: list[str]) -> list[str]:
    done = CliRunner().invoke(program, words, terminal_width=118, max_content_width=118, prog_name="brim")
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


NAMES = (*GENERATIONS, *TRAININGS, *ESTIMATES, *("help: brim " + c for c in COMMANDS), "help: brim")


def answers(folder: Path, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """What brim says now, as JSON has it. ``folder`` is an empty one, for configurations."""
    cases = _cases(folder)
    found: dict[str, Any] = json.loads(json.dumps({name: cases[name]() for name in names}))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        recorded = answers(Path(here))
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
