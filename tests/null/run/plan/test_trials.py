"""The best plans for this machine are timed in short runs, once, and the fastest of them comes first."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from brim.core import Decision, Hardware, Plan, Promise
from brim.core.hardware import RAM
from brim.planning import opening
from brim.planning.generation import plan_generation
from brim.planning.opening import timed_weights
from brim.planning.request import Answer, Machine, Proposal, Request, machine_of
from brim.planning.strategy.effects import Effect
from brim.processes import python_command
from brim.run.plan import search
from support.tiny_model import save_llama

MIB = 1 << 20


def proposal(name: str, step_s: float) -> Proposal:
    plan = Plan(
        model="m",
        hardware="here",
        task="generate",
        budget_bytes={RAM: MIB},
        decisions=(Decision(technique="weight_streaming", block=name, choice=f"stream:{name}"),),
        promise=Promise(peak_bytes={RAM: 1}, step_s=step_s),
    )
    command = "brim generate m --prompt ... --max-new-tokens 9 --ram 1MiB"
    streamed = Effect(technique="weight_streaming", what=name, saves_bytes={RAM: 1}, costs_s=0.1)
    return Proposal(plan=plan, step_s=step_s, limited_by="disk", techniques=[streamed], command=command)


def blocks(answer: Answer) -> list[str]:
    return [each.plan.decisions[0].block for each in answer.proposals]


@pytest.fixture
def answer(tmp_path: Path, known_machine: Hardware, cache: Path) -> Answer:
    folder = tmp_path / "m"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(64 * MIB)
    (folder / "config.json").write_text("{}")
    proposals = [proposal("a", 1.0), proposal("b", 1.1), proposal("c", 1.2), proposal("d", 1.3), proposal("e", 9.0)]
    machine = Machine(hardware=known_machine, budget_bytes={RAM: MIB})
    return Answer(request=Request(model=folder, ram="1MiB"), machine=machine, proposals=proposals)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Give runs of plans these seconds, by block; return the list of those that are run."""

    def install(**seconds: float | None) -> list[str]:
        ran: list[str] = []

        def run_s(answer: Answer, proposal: Proposal) -> float | None:
            ran.append(proposal.plan.decisions[0].block)
            return seconds[ran[-1]]

        monkeypatch.setattr(search, "_run_s", run_s)
        return ran

    return install


def test_the_best_three_are_run_once_and_the_fastest_is_first(answer: Answer, run: Callable[..., list[str]]) -> None:
    ran = run(a=3.0, b=1.0, c=2.0)
    timed = search.with_trials(answer, Path(answer.request.model))
    assert blocks(timed) == ["b", "c", "a", "d", "e"] and ran == ["a", "b", "c"]
    assert [each.timed for each in timed.proposals] == [True, True, True, False, False]
    assert [each.step_s for each in timed.proposals] == [1.0, 2.0, 3.0, 1.3, 9.0]
    assert timed.proposals[0].plan.promise.step_s == 1.0
    assert timed.interval_s(timed.proposals[0]) == (1.0, 1.0)
    low_s, high_s = timed.interval_s(timed.proposals[3])
    assert low_s < 1.3 < high_s
    again = search.with_trials(answer, Path(answer.request.model))
    assert blocks(again) == blocks(timed) and len(ran) == 3  # the same plan, without another run


def test_a_plan_whose_run_fails_follows_those_that_ran(answer: Answer, run: Callable[..., list[str]]) -> None:
    run(a=3.0, b=None, c=2.0)
    timed = search.with_trials(answer, Path(answer.request.model))
    assert blocks(timed) == ["c", "a", "b", "d", "e"]
    assert [each.timed for each in timed.proposals] == [True, True, False, False, False]


def test_a_request_is_timed_once_whatever_plans_it_has_later(answer: Answer, run: Callable[..., list[str]]) -> None:
    ran, folder = run(a=3.0, b=1.0, c=2.0), Path(answer.request.model)
    search.with_trials(answer, folder)
    later = replace(answer, proposals=[proposal("e", 0.9), *answer.proposals])
    assert blocks(search.with_trials(later, folder)) == ["b", "a", "e", "c", "d", "e"] and ran == ["a", "b", "c"]


def test_neither_what_is_far_slower_nor_a_model_in_memory_is_run(
    answer: Answer, run: Callable[..., list[str]]
) -> None:
    ran, folder = run(a=3.0, b=1.0, c=2.0), Path(answer.request.model)
    slower = replace(answer, proposals=[answer.proposals[0], answer.proposals[4]])
    resident = replace(answer, proposals=[replace(answer.proposals[0], techniques=()), *answer.proposals[1:]])
    for given in (slower, resident):
        assert search.with_trials(given, folder) == given and not ran


@pytest.mark.parametrize("why", ["nothing", "another machine", "assumed", "by memory", "small", "no weights"])
def test_plans_are_timed_on_this_machine_by_weights_that_are_here(why: str, answer: Answer) -> None:
    request, machine, folder = answer.request, answer.machine, Path(answer.request.model)
    if why == "another machine":
        request = replace(request, gpu="RTX 3060")
    elif why == "assumed":
        machine = replace(machine, assumed=("a drive",))
    elif why == "by memory":
        request = replace(request, prefer="memory")
    elif why == "small":
        (folder / "model.safetensors").write_bytes(b"")
    elif why == "no weights":
        shutil.rmtree(folder)
    assert timed_weights(request, machine) == (folder if why == "nothing" else None)


@pytest.mark.thorough
def test_plans_that_are_timed_beside_the_best_have_other_blocks_and_commands_with_their_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(tmp_path / "m")
    monkeypatch.setattr(opening, "_LEAST_TIMED_BYTES", 1)
    request = Request(model=folder, seq=32, new_tokens=8)
    machine = machine_of(request)
    (plain,) = plan_generation(request, machine)
    assert "--plan" not in plain.command
    tight = replace(machine, budget_bytes={RAM: plain.plan.promise.peak_bytes[RAM] - 24 * MIB})
    best, *rivals = sorted(plan_generation(request, tight), key=lambda each: "--plan" in each.command)
    assert rivals and "--plan" not in best.command
    assert all("--plan plan.json" in rival.command for rival in rivals)
    assert len({len(each.plan.choices("weight_streaming")) for each in (best, *rivals)}) == 1 + len(rivals)


@pytest.mark.slow  # its runs take as long as the machine lets them
@pytest.mark.parametrize("task", ["generate", "train"])
def test_plans_for_this_machine_are_timed_by_real_runs(task: str, tmp_path: Path, cache: Path) -> None:
    folder = save_llama(tmp_path / "m", layers=6)
    sizes = ["--seq", "32", *(["--batch", "4"] if task == "train" else ["--new-tokens", "24"])]

    def plans(*options: str) -> list[dict[str, Any]]:
        words = ["plan", str(folder), "--task", task, *sizes, *options, "--json"]
        done = subprocess.run(python_command("-m", "brim", *words), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)["plans"]
        return found

    (plain, *_) = plans("--ram", "3GiB")
    assert not plain["timed"]  # nothing is faster than all in memory
    ram = str(plain["peak_bytes"]["ram"] * 3 // 4)
    plans("--ram", ram)  # what it measures leaves memory behind, which later plans have for themselves
    found = plans("--ram", ram)
    seconds = [each["step_s"] for each in found if each["timed"]]
    assert len(seconds) >= 2 and seconds == sorted(seconds) and found[0]["timed"]
    assert found[0]["interval_s"] == [seconds[0]] * 2
    again = plans("--ram", ram, "--output", str(tmp_path / "plan.json"))
    assert {each["step_s"] for each in again if each["timed"]} <= set(seconds)  # a plan may have become another
    if task == "generate":
        run = ["generate", str(folder), "--prompt", "a b", "--max-new-tokens", "4"]
        assert main([*run, "--plan", str(tmp_path / "plan.json")]) == 0
