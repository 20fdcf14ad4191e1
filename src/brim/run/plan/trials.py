"""Time the best plans on this machine, each in a short run of its own, and list the fastest first."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from brim.core import Plan
from brim.measure.user_cache import fingerprint
from brim.memory.scratch import scratch_folder
from brim.planning import file as plan_file
from brim.planning.request import PLAN_FILE, Answer, Proposal
from brim.planning.seconds.measurement_cache import Remembered
from brim.processes import bound, python_command

_METHOD = 1  # raised when the runs change
MOST_PLANS = 3
_UNCERTAIN = 1.5  # slower plans are not timed: most predictions are off by less
_LIMIT_S = 120.0  # of a plan's run, loading included
_STEPS, _NEW_TOKENS = 3, 16


def with_trials(answer: Answer, folder: Path) -> Answer:
    """Return ``answer`` with its fastest plans timed by the weights in ``folder``, and the fastest of them first.

    Plans whose run fails follow. Runs are made once for a request, and their seconds are cached: with other plans,
    which differ with the bytes that a process holds, a plan that is made twice would not be the same plan.
    """
    near = [p for p in answer.proposals if p.step_s <= _UNCERTAIN * answer.proposals[0].step_s][:MOST_PLANS]
    if len(near) < 2 or not near[0].techniques:  # nothing is faster than all in memory
        return answer
    files = sorted(folder.glob("*.safetensors"))
    request = fingerprint(files, replace(answer.request, top=MOST_PLANS).command())
    memory = Remembered("timed-plans", (_METHOD, answer.machine.hardware.name, torch.__version__))
    if memory.get(request, count=1) is None:
        seconds = {f"{request} {_kind(each.plan)}": _run_s(answer, each) for each in near}
        measured = {name: [step_s] for name, step_s in seconds.items() if step_s is not None}
        memory.keep({request: [len(measured) + 1.0], **measured})
    timed = [_timed(each, memory.get(f"{request} {_kind(each.plan)}", count=1)) for each in near]
    timed.sort(key=lambda each: (not each.timed, each.step_s if each.timed else 0.0))
    return replace(answer, proposals=[*timed, *answer.proposals[len(near) :]])


def _kind(plan: Plan) -> str:
    """Return a name of the techniques and settings. Proposals of an answer differ in more than numbers of blocks."""
    choices = sorted({(decision.technique, decision.choice) for decision in plan.decisions})
    return fingerprint((), choices, len(plan.decisions), sorted(plan.settings.items()))


def _timed(proposal: Proposal, seconds: Sequence[float] | None) -> Proposal:
    if seconds is None:
        return proposal
    plan = replace(proposal.plan, promise=replace(proposal.plan.promise, step_s=seconds[0]))
    return replace(proposal, plan=plan, step_s=seconds[0], timed=True)


def _run_s(answer: Answer, proposal: Proposal) -> float | None:
    """Return the seconds of a step in a short run of the plan; None where it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="brim-trial-", dir=scratch_folder()) as scratch:
        file = Path(scratch) / PLAN_FILE
        plan_file.write(file, replace(answer, proposals=(proposal,)))
        device = [] if proposal.hardware is None else ["--device", "cpu"]
        words = [*_arguments(answer, Path(scratch)), *device, "--plan", str(file), "--json"]
        command = bound(python_command("-m", "brim", *words, "--", str(answer.request.model)))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
        except (subprocess.TimeoutExpired, OSError):
            return None
    if done.returncode:
        return None
    if answer.request.task == "train":
        return float(json.loads(done.stdout)["step_s"])
    if answer.request.batch == 1:
        seconds = json.loads(done.stdout)["steady_s_per_token"]  # None: the model ended after a few tokens
        return None if seconds is None else float(seconds)
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    return float(summary["seconds"] * summary["batch"] / summary["tokens"])


def _arguments(answer: Answer, scratch: Path) -> Sequence[str]:
    """Return the words of a short run: of a few steps over a generated text, or of a few tokens."""
    request = answer.request
    if request.task == "train":
        data = scratch / "data.txt"
        data.write_text("a b c d " * ((_STEPS + 1) * request.batch * request.seq), encoding="utf-8")
        return ["train", "--data", str(data), "--output", str(scratch / "trained"), "--steps", str(_STEPS)]
    words = ["generate", "--no-chat", "--max-new-tokens", str(min(_NEW_TOKENS, request.new_tokens))]
    if request.batch == 1:
        return [*words, "--prompt", "a b c"]
    prompts = scratch / "prompts.txt"
    prompts.write_text("a b c\n" * request.batch, encoding="utf-8")
    return [*words, "--prompts", str(prompts)]
