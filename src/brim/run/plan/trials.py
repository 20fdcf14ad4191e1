"""Time the best plans on this machine, each in a short run of its own, and list the fastest first."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from brim.measure.user_cache import fingerprint
from brim.models.opening import prepare
from brim.planning import file as plan_file
from brim.planning.factory import is_factory
from brim.planning.generation import LEAST_TIMED_BYTES
from brim.planning.request import PLAN_FILE, Answer, Proposal
from brim.planning.seconds.measurement_cache import Remembered
from brim.processes import bound, python_command

_METHOD = 1  # raised when the runs change
MOST_PLANS = 3
_UNCERTAIN = 1.5  # slower plans are not timed: most predictions are off by less
_LIMIT_S = 120.0  # of a plan's run, loading included
_STEPS, _NEW_TOKENS = 3, 16


def with_trials(answer: Answer) -> Answer:
    """Return ``answer`` with its fastest plans timed, if they are for this machine, and the fastest of them first.

    Timings are cached: the same plans are timed once. Plans whose run fails keep their prediction.
    """
    near = [p for p in answer.proposals if p.step_s <= _UNCERTAIN * answer.proposals[0].step_s][:MOST_PLANS]
    folder = _folder(answer)
    if folder is None or len(near) < 2 or not near[0].techniques:  # nothing is faster than all in memory
        return answer
    # A command without the plan's file would choose by predictions again.
    own = [near[0], *(replace(p, command=_with_file(p)) if p.command == near[0].command else p for p in near[1:])]
    memory = Remembered("timed-plans", (_METHOD, answer.machine.hardware.name, torch.__version__))
    timed = [_timed(answer, proposal, folder, memory) for proposal in own]
    if all(proposal.timed for proposal in timed):
        timed.sort(key=lambda proposal: proposal.step_s)
    return replace(answer, proposals=[*timed, *answer.proposals[len(near) :]])


def _folder(answer: Answer) -> Path | None:
    """Return the folder of the weights if plans are timed: for this machine, of a model that is not small."""
    request, path = answer.request, Path(answer.request.model).expanduser()
    if request.prefer != "speed" or request.gpu is not None or answer.machine.assumed or is_factory(request.model):
        return None
    folder = prepare(path) if path.suffix.lower() == ".gguf" else path
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")] if folder.is_dir() else []
    return folder if sum(weights) >= LEAST_TIMED_BYTES else None


def _timed(answer: Answer, proposal: Proposal, folder: Path, memory: Remembered) -> Proposal:
    """Return ``proposal`` with measured seconds; unchanged where its run fails."""
    plan = proposal.plan
    facts = (plan.decisions, sorted(plan.settings.items()), answer.request.command())
    name = fingerprint(sorted(folder.glob("*.safetensors")), *facts)
    seconds = memory.get(name, count=1)
    if seconds is None:
        measured_s = _run_s(answer, proposal)
        if measured_s is None:
            return proposal
        seconds = [measured_s]
        memory.keep({name: seconds})
    plan = replace(plan, promise=replace(plan.promise, step_s=seconds[0]))
    return replace(proposal, plan=plan, step_s=seconds[0], timed=True)


def _run_s(answer: Answer, proposal: Proposal) -> float | None:
    """Return the seconds of a step in a short run of the plan; None where it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="brim-trial-") as scratch:
        file = Path(scratch) / PLAN_FILE
        plan_file.write(file, replace(answer, proposals=(proposal,)))
        command = python_command("-m", "brim", *_arguments(answer, file, Path(scratch)))
        if proposal.hardware is not None:
            command += ["--device", "cpu"]
        try:
            done = subprocess.run(
                bound(command),
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                stdin=subprocess.DEVNULL,
            )
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


def _arguments(answer: Answer, file: Path, scratch: Path) -> Sequence[str]:
    """Return the words of a short run: of a few steps over a generated text, or of a few tokens."""
    request = answer.request
    plan = ["--plan", str(file), "--json"]
    if request.task == "train":
        data = scratch / "data.txt"
        data.write_text("a b c d " * ((_STEPS + 1) * request.batch * request.seq), encoding="utf-8")
        words = ["train", str(request.model), "--data", str(data), "--output", str(scratch / "trained")]
        return [*words, "--steps", str(_STEPS), "--disk", str(scratch), *plan]
    prompts = scratch / "prompts.txt"
    prompts.write_text("a b c\n" * request.batch, encoding="utf-8")
    words = [
        "generate",
        str(request.model),
        "--no-chat",
        "--max-new-tokens",
        str(min(_NEW_TOKENS, request.new_tokens)),
    ]
    return [*words, *(["--prompt", "a b c"] if request.batch == 1 else ["--prompts", str(prompts)]), *plan]


def _with_file(proposal: Proposal) -> str:
    """Return the command of ``proposal`` with the plan's file instead of the options that the plan decides."""
    words = shlex.split(proposal.command)
    decided = ("--vram", "--ram", "--precision", "--no-host-compute", "--plan")
    first = min((words.index(word) for word in decided if word in words), default=len(words))
    return shlex.join([*words[:first], "--plan", PLAN_FILE])
