"""``brim train`` as its command line runs it: its own loop, opened from the files, its budget counted from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from brim.core import Plan
from brim.run.train.loop import Request, train
from brim.run.train.report import StepReport
from peers.training import LR, Outcome, Setting

TITLE = "brim train"
PACKAGE = "brim"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    output = setting.scratch / "output"
    reports: list[StepReport] = []
    request = Request(
        model=setting.checkpoint,
        data=setting.data,
        output=output,
        ram=setting.budget_bytes,
        device="cpu",
        disk_folder=str(setting.scratch),
        batch=setting.batch,
        seq=setting.seq,
        steps=setting.steps,
        lr=LR,
    )
    setting.begin()
    result = train(request, on_step=reports.append)
    return Outcome(
        losses=result.losses,
        step_s=[report.step_s for report in reports],
        value=lambda name: _saved(output, name),
        peak_growth_bytes=result.measured_bytes["ram"],
        facts={
            "promised_bytes": dict(result.promised_bytes),
            "measured_bytes": dict(result.measured_bytes),
            **choice_of(result.plan, setting.batch),
            "notes": result.notes,
            "written_bytes_per_step": reports[-1].written_bytes,
        },
    )


def choice_of(plan: Plan, batch: int) -> dict[str, Any]:
    """What the plan does, without its blocks; ``exact``: it does plain PyTorch's operations and no others."""
    found: dict[str, set[str]] = {}
    for decision in plan.decisions:
        found.setdefault(decision.technique, set()).add(decision.choice)
    whole = plan.settings["micro_batch"] >= batch and not plan.settings["chunk_tokens"]
    choices = {technique: sorted(choices) for technique, choices in found.items()}
    return {"choice": choices, "settings": dict(plan.settings), "exact": whole}


def _saved(folder: Path, name: str) -> torch.Tensor:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118  # not a mapping
                found: torch.Tensor = opened.get_tensor(name)
                return found
    raise KeyError(name)
