"""``brim plan --html``: the plan, as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.cli import verdict
from brim.cli.options import write_html
from brim.core import EventKind, Timeline
from brim.report.html.page import Table, View, page

if TYPE_CHECKING:
    from brim.planning.request import Answer, Proposal
    from brim.planning.strategy.effects import Effect

TIERS = ("vram", "ram", "disk")


def tiers_of(answer: Answer) -> list[str]:
    """Return the tiers that at least one plan uses."""
    used: set[str] = set()
    for proposal in answer.proposals:
        used |= {tier for tier, count in proposal.plan.promise.peak_bytes.items() if count}
    return [tier for tier in TIERS if tier in used]


def write_page(path: Path, answer: Answer) -> None:
    request, tiers = answer.request, tiers_of(answer)
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
    tiers = [tier for tier in TIERS if any(effect.saves_bytes.get(tier) for effect in effects)]
    rows = tuple(
        (effect.technique, effect.what, *(effect.saves_bytes.get(tier) or None for tier in tiers), effect.costs_s)
        for effect in effects
    )
    columns = ("technique", "which", *(f"saves_{tier}_bytes" for tier in tiers), "costs_s")
    return Table(title=title, columns=columns, rows=rows, note="Negative: the technique needs more.")


def _precisions(answer: Answer) -> Table:
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
