"""``brim plan``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from brim.cli import verdict
from brim.cli.loading import MODELS, load
from brim.cli.options import command, print_json, write_html
from brim.cli.plan.options import PlanOptions, file_name
from brim.core import EventKind, Timeline
from brim.core.options import build
from brim.errors import BudgetError, UsageError
from brim.requests.plan import MeshRequest, Request
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.console import Console
    from brim.planning.request import Answer, Proposal
    from brim.planning.strategy.effects import Effect
    from brim.report.html.page import Table


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
    "engine_name": (_SEVERAL - {"engine", "global_batch"})
    | {"engine_name", "gpus", "vram", "disk", "batch", "new_tokens", "precision", "lossless"},
    "compare_gpus": _SEVERAL | {"compare_gpus", "price", "disk", "lossless"},
    "gpus": _SEVERAL | {"gpus", "top"},
}
_UNUSED = {
    "diffusers": {"seq", "new_tokens", "lossless"},
    "llama.cpp": {"precision"},
    "deepspeed": {"new_tokens", "lossless", "precision"},
    "fsdp": {"new_tokens", "lossless", "precision"},
}
_WHY = ": splits are searched for AdamW, full training and bf16"
_ONLY_WITH = {
    "price": ("--compare-gpus", "--compare-gpus 1,2,4"),
    **dict.fromkeys(("gpus_per_node", "global_batch", "engine"), ("--gpus", "--gpus")),
}


@command(PlanOptions)
def plan(options: PlanOptions) -> int | None:
    """Find the fastest plans to train or run a model that fit a machine.

    MODEL is a hub id, a name of the catalog, a folder, or a .gguf file. For training it may also be file.py:build, a
    function that returns a pair of a model and its inputs. Where a model does not fit in this machine's memory, the
    best three plans are run for a few steps; otherwise no weights are read. Exit code 3: nothing fits; the answer
    names changes that would fit.
    """
    _refuse_unused(click.get_current_context())
    if options.engine_name is not None:
        from brim.cli.plan.comparisons import show_engine

        return show_engine(build(MeshRequest, vars(options)), options.engine_name, options.output, options.as_json)
    if options.compare_gpus is not None:
        from brim.cli.plan.comparisons import show_counts

        return show_counts(options)
    if options.gpus is not None:
        from brim.cli.plan.comparisons import show_splits

        return show_splits(build(MeshRequest, vars(options)), options.output, options.as_json)
    for name, needed in _ONLY_WITH.items():
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} was given without {needed[0]}.", todo=f"Give {needed[1]}.")
    load("brim.run.plan.search", MODELS)
    return _show(_answer(options), options.output, options.html, options.as_json)


def _refuse_unused(context: click.Context) -> None:
    """Raise UsageError for options that have no effect with several GPUs, or for another engine."""
    asked = next((name for name in _USED if context.params[name] is not None), None)
    if asked is None:
        return
    flags = {option.name or "": option.opts[0] for option in context.command.params}
    used = _USED[asked] - _UNUSED.get(context.params["engine_name"] or "", set())
    unused = [flags[name] for name in flags if name not in used and _given(context, name)]
    if unused:
        unused_flags = ", ".join(unused)
        raise UsageError(
            f"{unused_flags} {'was' if len(unused) == 1 else 'were'} given beside {flags[asked]}.",
            f"It would have no effect{_WHY if asked != 'engine_name' else ''}.",
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
    with Console(stderr=True).status("Planning"), redirect_stdout(sys.stderr):  # what the user's function prints
        answer = answer_to(request, precisions=options.precisions)
        answer = _with_files(answer, output)
        for index in range(len(answer.proposals) if output is not None else 0):
            write(file_name(output or Path(), index), answer, index)
    return answer


def _show(answer: Answer, output: Path | None, html: Path | None, as_json: bool) -> int | None:
    if html is not None:
        _write_page(html, answer)
    if as_json:
        print_json(answer.to_json())
    else:
        print_answer(answer, output)
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


def print_answer(answer: Answer, output: Path | None = None) -> None:
    from brim.cli.console import Console

    console = Console(highlight=False, soft_wrap=True)
    machine = answer.machine
    budget = ", ".join(f"{format_bytes(n)} of {tier.upper()}" for tier, n in machine.budget_bytes.items())
    console.print(verdict.of_plans(answer), style="bold")
    console.print(f"{answer.title} with {budget}")
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
    from brim.planning.factory import is_factory
    from brim.planning.training import DATA, TRAINED

    tiers = _tiers_of(answer)
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
    columns = ("", *(tier.upper() for tier in tiers), step, "tokens/s", "limited by", "above bound")
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


_TIERS = ("vram", "ram", "disk")


def _tiers_of(answer: Answer) -> list[str]:
    """Return the tiers that at least one plan uses."""
    used: set[str] = set()
    for proposal in answer.proposals:
        used |= {tier for tier, count in proposal.plan.promise.peak_bytes.items() if count}
    return [tier for tier in _TIERS if tier in used]


def _write_page(path: Path, answer: Answer) -> None:
    from brim.report.html.page import Table, View, page

    request, tiers = answer.request, _tiers_of(answer)
    tables = []
    if answer.proposals:
        tables.append(_plans(answer, tiers))
        best = answer.proposals[0]
        tables += [_effects("What plan 1 uses", best.techniques), _effects("Other ways to save memory", best.frees)]
        commands = tuple((number, proposal.command) for number, proposal in enumerate(answer.proposals, 1))
        tables.append(Table(title="Commands", columns=("plan", "command"), rows=commands))
    else:
        changes = tuple((proposal.change, proposal.command) for proposal in answer.nearest)
        tables.append(Table(title="It fits with", columns=("change", "command"), rows=changes))
    tables.append(_precisions(answer))
    budget = tuple((tier.upper(), count) for tier, count in answer.machine.budget_bytes.items())
    tables.append(Table(title="Budget", columns=("tier", "bytes"), rows=budget))
    assumed = tuple((text,) for text in answer.machine.assumed)
    tables.append(Table(title="What was assumed", columns=("of the machine",), rows=assumed))
    tables = [table for table in tables if table.rows]
    views = [
        View(timeline=_picture(proposal, answer), plan=proposal.plan)
        for proposal in answer.proposals[:1]
        if proposal.timeline
    ]
    notes = [] if answer.proposals else [answer.refusal]
    title = f"{request.model}: a plan to {request.task} on {answer.machine.hardware.name}"
    write_html(path, page(views, title=title, verdict=verdict.of_plans(answer), tables=tables, notes=notes))


def _plans(answer: Answer, tiers: Sequence[str]) -> Table:
    from brim.report.html.page import Table

    rows: tuple[tuple[Any, ...], ...] = tuple(
        (
            number,
            *(proposal.plan.promise.peak_bytes.get(tier, 0) for tier in tiers),
            proposal.step_s,
            answer.tokens_per_s(proposal),
            proposal.limited_by,
            proposal.gap,
        )
        for number, proposal in enumerate(answer.proposals, 1)
    )
    peaks = (f"{tier}_bytes" for tier in tiers)
    columns = ("plan", *peaks, "step_s", "tokens per second", "limited by", "gap_share")
    note = "Peak of each tier. Each plan was proved: a step was traced with the plan in force."
    return Table(title="Plans", columns=columns, rows=rows, note=note)


def _picture(proposal: Proposal, answer: Answer) -> Timeline:
    """Return the schedule of a plan; if it has no bytes, with the peak of the compute tier."""
    assert proposal.timeline is not None
    compute = (proposal.hardware or answer.machine.hardware).compute
    if any(event.kind is EventKind.ALLOC and event.tier == compute for event in proposal.timeline):
        return proposal.timeline
    timeline = Timeline(proposal.timeline.name, measured=False, facts=dict(proposal.timeline.facts))
    rest = proposal.plan.promise.peak_bytes.get(compute, 0)
    for decision in proposal.plan.decisions:
        if decision.choice == "resident" and decision.bytes <= rest:
            timeline.add(EventKind.ALLOC, compute, decision.bytes, label=decision.block, category="parameter")
            rest -= decision.bytes
    timeline.add(EventKind.ALLOC, compute, rest, label="peak of everything else", category="temporary")
    for event in proposal.timeline:
        timeline.add(**{name: getattr(event, name) for name in event.__slots__})
    return timeline


def _effects(title: str, effects: Sequence[Effect]) -> Table:
    from brim.report.html.page import Table

    tiers = [tier for tier in _TIERS if any(effect.saves_bytes.get(tier) for effect in effects)]
    rows = tuple(
        (effect.technique, effect.what, *(effect.saves_bytes.get(tier) or None for tier in tiers), effect.costs_s)
        for effect in effects
    )
    columns = ("technique", "which", *(f"saves_{tier}_bytes" for tier in tiers), "costs_s")
    return Table(title=title, columns=columns, rows=rows, note="Negative: the technique needs more.")


def _precisions(answer: Answer) -> Table:
    from brim.report.html.page import Table

    names = list(dict.fromkeys(name for row in answer.precisions for name in row.forms))
    columns = ["block", "count"]
    for name in names:
        columns += [f"{name}_bytes", f"{name} moved_s", f"{name} computed_s"]
    rows = []
    for row in answer.precisions:
        cells: list[Any] = [row.kind, row.count]
        for name in names:
            form = row.forms.get(name)
            cells += [form.bytes, form.move_s, form.compute_s] if form else [None] * 3
        rows.append((*cells, row.streamed, row.resident))
    columns += ["better streamed", "better resident"]
    note = "Seconds per token. A streamed block takes the longer of its copy and its computation."
    return Table(title="Which precision?", columns=tuple(columns), rows=tuple(rows), note=note)
