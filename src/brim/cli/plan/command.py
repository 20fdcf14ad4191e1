"""``brim plan``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from brim.cli import verdict
from brim.cli.loading import MODELS, load
from brim.cli.options import command, print_json
from brim.cli.plan.options import PlanOptions, file_name
from brim.core.options import build
from brim.errors import BudgetError, UsageError
from brim.requests.plan import MeshRequest, Request
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.console import Console
    from brim.planning.request import Answer, Proposal
    from brim.planning.strategy.effects import Effect


# Options that apply to plans for several GPUs; a comparison includes one GPU, whose plan may use RAM and disk.
_SEVERAL = {
    "model",
    "task",
    "gpu",
    "ram",
    "ram_gb_per_s",
    "seq",
    "gpus_per_node",
    "engine",
    "global_batch",
    "output",
    "as_json",
}
_USED = {
    "compare_gpus": _SEVERAL | {"compare_gpus", "price", "disk", "lossless"},
    "gpus": _SEVERAL | {"gpus", "top"},
}
_ONLY_WITH = {
    "price": ("--compare-gpus", "--compare-gpus 1,2,4"),
    **dict.fromkeys(("gpus_per_node", "global_batch", "engine"), ("--gpus", "--gpus")),
}


@command(PlanOptions)
def plan(options: PlanOptions) -> int | None:
    """Find the fastest plans to train or run a model that fit a machine.

    MODEL is a name of the catalog, a folder, or a .gguf file. For training it may also be file.py:build, a function
    that returns a pair of a model and its inputs. Where a model does not fit in this machine's memory, the best three
    plans are run for a few steps; otherwise no weights are read. Exit code 3: nothing fits; the answer names changes
    that would fit.
    """
    _refuse_unused(click.get_current_context())
    if options.compare_gpus is not None:
        from brim.cli.plan.compare import show

        return show(options)
    if options.gpus is not None:
        from brim.cli.plan import meshes as plan_meshes

        return plan_meshes.show(build(MeshRequest, vars(options)), options.output, options.as_json)
    for name, needed in _ONLY_WITH.items():
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} was given without {needed[0]}.", todo=f"Give {needed[1]}.")
    load("brim.run.plan.search", MODELS)
    if not options.regimes:
        return _show(_answer(options), options.output, options.html, options.as_json)
    if options.precisions or options.router_statistics:
        raise UsageError(
            "Cannot use --regimes with --precisions or --router-statistics.", "It makes its own comparison."
        )
    from brim.cli.plan.compare import show_regimes

    show_regimes(build(Request, vars(options)), options.output, options.html, options.as_json)
    return None


def _refuse_unused(context: click.Context) -> None:
    """Raise UsageError for options that have no effect with several GPUs."""
    asked = next((name for name in _USED if context.params[name] is not None), None)
    if asked is None:
        return
    flags = {option.name or "": option.opts[0] for option in context.command.params}
    unused = [flags[name] for name in flags if name not in _USED[asked] and _given(context, name)]
    if unused:
        unused_flags = ", ".join(unused)
        raise UsageError(
            f"{unused_flags} {'was' if len(unused) == 1 else 'were'} given beside {flags[asked]}.",
            "It would have no effect: splits are searched for AdamW, full training and bf16.",
            f"Leave out {unused_flags}, or {flags[asked]}.",
        )  # fmt: skip


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def _answer(options: PlanOptions) -> Answer:
    """The answer, its plans written to ``output``."""
    from brim.cli.console import Console
    from brim.planning.file import write
    from brim.run.plan.search import answer_to

    request, output = build(Request, vars(options)), options.output
    with Console(stderr=True).status("Planning"):
        answer = answer_to(request, precisions=options.precisions, router_statistics=options.router_statistics)
        answer = _with_files(answer, output)
        for index in range(len(answer.proposals) if output is not None else 0):
            write(file_name(output or Path(), index), answer, index)
    return answer


def _show(answer: Answer, output: Path | None, html: Path | None, as_json: bool) -> int | None:
    if html is not None:
        from brim.cli.plan.page import write_page

        write_page(html, answer)
    if as_json:
        print_json(answer.to_json())
    else:
        _print(answer, output)
    return None if answer.proposals else BudgetError.exit_code


def _with_files(answer: Answer, output: Path | None) -> Answer:
    """Return commands with the names of their plan files; if none are written, with a preceding command that
    writes them."""
    from brim.planning.request import PLAN_FILE

    def named(proposal: Proposal, index: int) -> Proposal:
        name = str(file_name(output or Path(PLAN_FILE), index))
        if not proposal.command.startswith("brim "):  # a line of Python
            return replace(proposal, command=proposal.command.replace(PLAN_FILE, name))
        words = [name if word == PLAN_FILE else word for word in shlex.split(proposal.command)]
        writes = f"{answer.request.command()} --output {PLAN_FILE} && " if output is None and name in words else ""
        return replace(proposal, command=writes + shlex.join(words))

    return replace(answer, proposals=[named(proposal, index) for index, proposal in enumerate(answer.proposals)])


def _print(answer: Answer, output: Path | None) -> None:
    from brim.cli.console import Console

    console = Console(highlight=False, soft_wrap=True)
    request, machine = answer.request, answer.machine
    budget = ", ".join(f"{format_bytes(n)} of {tier.upper()}" for tier, n in machine.budget_bytes.items())
    console.print(verdict.of_plans(answer), style="bold")
    console.print(f"{request.model}: {request.task} on {machine.hardware.name} with {budget}")
    console.print(verdict.of_precision(*answer.precision))
    for assumed in machine.assumed:
        console.print(f"assumed: {assumed}")
    if answer.proposals:
        _print_plans(console, answer)
        if output is None:
            console.print("--output FILE writes plans to files, for --plan.")
    else:
        _print_nearest(console, answer)
    if answer.precisions:
        from brim.planning.precision_table import shown

        console.print(shown(answer.precisions))
    console.print(f"planned in {format_seconds(answer.took_s)}")


def _print_plans(console: Console, answer: Answer) -> None:
    from brim.cli.plan.page import tiers_of
    from brim.planning.factory import is_factory
    from brim.planning.training import DATA, TRAINED

    tiers = tiers_of(answer)
    step = "s per step" if answer.request.task == "train" else "s per token"
    plans = (
        (
            f"{number}",
            *(format_bytes(proposal.plan.promise.peak_bytes.get(tier, 0)) for tier in tiers),
            format_seconds(proposal.step_s),
            f"{answer.tokens_per_s(proposal):.3g}",
            proposal.limited_by,
            f"{proposal.gap:.1%}",
        )
        for number, proposal in enumerate(answer.proposals, 1)
    )
    columns = ("", *(tier.upper() for tier in tiers), step, "tokens/s", "limited by", "gap to best")
    console.print_table(columns, plans, left=("limited by",))
    for number, proposal in enumerate(answer.proposals, 1):
        console.print(f"{number}: {_in_words(proposal)}")
    best = answer.proposals[0]
    low_s, high_s = map(format_seconds, answer.interval_s(best))
    console.print(
        f"plan 1 was run: {step} is measured"
        if best.timed
        else f"{step} of plan 1 is predicted: between {low_s} and {high_s}, by the errors of earlier predictions"
    )
    for title, effects in (("plan 1 uses", best.techniques), ("would also save memory", best.frees)):
        if effects:
            rows = ((effect.technique, effect.what, _saved(effect), _costs(effect.costs_s)) for effect in effects)
            console.print_table((title, "use", "saves", "costs"), rows, left=("use", "saves"))
    for number, proposal in enumerate(answer.proposals, 1):
        console.print(f"{number}: {proposal.command}")
    if answer.request.task == "train" and not is_factory(answer.request.model):
        console.print(f"Replace {DATA} by your data, and {TRAINED} by the output folder.")


def _in_words(proposal: Proposal) -> str:
    return (
        "; ".join(f"{effect.technique}: {effect.what}" for effect in proposal.techniques)
        or "everything stays in memory"
    )


def _costs(seconds: float) -> str:
    if seconds < 0:
        return f"{format_seconds(-seconds)} less"
    return format_seconds(seconds) if seconds else "nothing"


def _saved(effect: Effect) -> str:
    """``2 GiB of VRAM, takes 2 GiB of RAM``."""
    parts = [(tier.upper(), count) for tier, count in effect.saves_bytes.items() if count]
    saved = [f"{format_bytes(count)} of {tier}" for tier, count in parts if count > 0]
    costs = [f"takes {format_bytes(-count)} of {tier}" for tier, count in parts if count < 0]
    return ", ".join([*saved, *costs])


def _print_nearest(console: Console, answer: Answer) -> None:
    console.print(answer.refusal)
    if not answer.nearest:
        console.print("No small change that fits was found.")
        return
    for change in answer.nearest:  # a line each: a table would break commands over several
        console.print(f"It fits with {change.change}: {change.command}")
