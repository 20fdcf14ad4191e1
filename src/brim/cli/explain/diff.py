"""``brim explain --diff``: two files of one kind, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from brim.cli.explain import source as explain_source
from brim.cli.explain.answers import Explained, Rows, of_profile
from brim.cli.explain.text import short
from brim.errors import UsageError
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.explain.source import Source
    from brim.core.timeline import Timeline
    from brim.report.diff import Difference

_RUNS = (explain_source.SNAPSHOT, explain_source.TIMELINE)
_PROFILES = (explain_source.PROFILE, explain_source.NSIGHT)
MOST_LINES = 8
_BREAKDOWNS = ("by_category", "by_module", "by_label", "by_stack", "by_segment_size")


def compared(before: Source, after: Source) -> Explained:
    """Compare two files. Raises UsageError if their kinds cannot be compared."""
    kinds = {before.kind, after.kind}
    if kinds <= set(_RUNS):
        return _runs(before, after)
    if kinds <= set(_PROFILES):
        return _profiles(before, after)
    problem = f"{before.name} is of the kind {before.kind}, {after.name} of the kind {after.kind}"
    if kinds == {explain_source.LOG}:
        problem += ", which hold messages and no runs"
    raise UsageError("Cannot compare these two.", f"{problem}.", "Give two snapshots or timelines, or two profiles.")


def _devices(source: Source) -> dict[int, tuple[Timeline, dict[str, float]]]:
    """Return Timelines and further numbers by device."""
    if source.kind == explain_source.TIMELINE:
        timeline = explain_source.timeline_of(source)
        return {int(timeline.facts.get("device", 0)): (timeline, {})}
    from brim.recordings import snapshot
    from brim.recordings.timeline import recorded_run

    recorded = snapshot.read(source.path)
    devices = {}
    for history in recorded.devices:
        run = recorded_run(history, source.name, stacks=recorded.stacks)
        peak = next((moment for moment in run.moments if moment.what == "peak"), run.moments[-1])
        devices[history.device] = (
            run.timeline,
            {
                "pinned_at_the_peak_bytes": float(peak.pinned_bytes),
                "cached_at_the_peak_bytes": float(peak.cached_bytes),
                "largest_free_at_the_peak_bytes": float(peak.largest_free_bytes),
                "segments_pinned_at_the_peak": float(peak.segments_with_pins),
            },
        )
    return devices


def _runs(before: Source, after: Source) -> Explained:
    from brim.report.diff import diff

    left, right = _devices(before), _devices(after)
    shared = sorted(left.keys() & right.keys())
    if not shared:
        raise UsageError(
            "Cannot compare these two runs.", f"They share no device: {sorted(left)} and {sorted(right)}."
        )
    differences = {
        device: diff(left[device][0], right[device][0], before_facts=left[device][1], after_facts=right[device][1])
        for device in shared
    }
    bodies = [
        {"device": device, "headline": headline(difference)} | difference.to_json()
        for device, difference in differences.items()
    ]
    return Explained(
        title=f"{before.name} and {after.name}",
        body={
            "kind": "diff",
            "before": before.name,
            "after": after.name,
            "only_before": sorted(left.keys() - right.keys()),
            "only_after": sorted(right.keys() - left.keys()),
            "devices": bodies,
        },
        lines=[line for body in bodies for line in _lines(body)],
        views=[(when, side[device][0]) for device in shared for when, side in (("before", left), ("after", right))],
        notes=[f"Device {body['device']}: {body['headline']}" for body in bodies],
        tables=[table for body in bodies for table in _tables(body)],
    )


def headline(difference: Difference) -> str:
    """Return a sentence about the change of the peak, and the largest change in the same direction."""
    numbers = {change.name: (change.before or 0, change.after or 0) for change in difference.figures}
    old, new = numbers["reserved_peak_bytes"]
    used, uses = numbers["allocated_peak_bytes"]
    text = f"reserved at the peak {_change(old, new)}, allocated {_change(used, uses)}"
    total = uses - used
    alike = [
        change
        for change in difference.by_category or difference.by_label
        if change.name and change.grown_bytes * total > 0
    ]
    if alike:
        most = alike[0]
        text += f"; most of it {most.name}: {_change(most.before_bytes, most.after_bytes)}"
    return f"{text}. {difference.new_stacks} new stacks at the peak, {difference.gone_stacks} gone."


def _change(before: float, after: float) -> str:
    sign = "+" if after >= before else "-"
    return f"{format_bytes(before)} -> {format_bytes(after)} ({sign}{format_bytes(abs(after - before))})"


def _lines(body: Mapping[str, Any]) -> list[str]:
    lines = [f"device {body['device']}: {body['headline']}"]
    lines += [f"  {change['name'].replace('_', ' ')}: {_shown(change)}" for change in body["figures"]]
    for key in _BREAKDOWNS:
        if not body[key]:
            continue
        lines.append(f"  {key.replace('_', ' ')}:")
        for change in body[key][:MOST_LINES]:
            state = " new" if not change["before_count"] else " gone" if not change["after_count"] else ""
            name = short(change["name"].split("\n")[0]) or "(not known)"
            lines.append(f"    {_change(change['before_bytes'], change['after_bytes'])}{state}  {name}")
    return lines


def _shown(figure: Mapping[str, Any]) -> str:
    return f"{_number(figure['name'], figure['before'])} -> {_number(figure['name'], figure['after'])}"


def _is_of_a_list(name: str) -> bool:
    """Return whether a figure's name contains that of a kernel, copy, gap or wait."""
    return name.startswith(("kernels.", "copies.", "gaps.", "waits."))


def _readable(name: str) -> str:
    return name if _is_of_a_list(name) else name.replace("_", " ")


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith(("_s", "seconds")) or "_by_cause" in name:
        return format_seconds(value)
    if "_share" in name and not _is_of_a_list(name):
        return f"{value:.1%}"
    return f"{value:,.0f}"


def _tables(body: Mapping[str, Any]) -> list[Rows]:
    device = body["device"]
    tables: list[Rows] = [_figure_table(f"Before and after, device {device}", body["figures"])]
    columns = ("what", "before_bytes", "after_bytes", "change_bytes", "blocks before", "blocks after")
    for key in _BREAKDOWNS:
        rows = tuple(
            (
                change["name"] or "(not known)",
                change["before_bytes"],
                change["after_bytes"],
                change["after_bytes"] - change["before_bytes"],
                change["before_count"],
                change["after_count"],
            )
            for change in body[key]
        )
        if rows:
            tables.append((f"Changes {key.replace('_', ' ')}, device {device}", columns, rows))
    return tables


def _figure_table(title: str, figures: Sequence[Mapping[str, Any]]) -> Rows:
    rows = tuple(
        (figure["name"], _number(figure["name"], figure["before"]), _number(figure["name"], figure["after"]))
        for figure in figures
    )
    return title, ("figure", "before", "after"), rows


def _profiles(before: Source, after: Source) -> Explained:
    from brim.report.diff import figures

    left, right = of_profile(before, ()), of_profile(after, ())
    old, new = ({device["device"]: device for device in side.body["devices"]} for side in (left, right))
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise UsageError("Cannot compare these two profiles.", f"They share no device: {sorted(old)}, {sorted(new)}.")
    bodies = [
        {
            "device": device,
            "figures": [asdict(figure) for figure in figures(old[device], new[device]) if figure.name != "device"],
        }
        for device in shared
    ]
    lines = []
    for body in bodies:
        lines.append(f"device {body['device']}:")
        changed = [figure for figure in body["figures"] if figure["before"] != figure["after"]]
        lines += [f"  {_readable(figure['name'])}: {_shown(figure)}" for figure in changed]
    return Explained(
        title=f"{before.name} and {after.name}",
        body={"kind": "diff", "before": before.name, "after": after.name, "devices": bodies},
        lines=lines,
        views=[
            (f"{when}: {title}", view) for when, s in (("before", left), ("after", right)) for title, view in s.views
        ],
        notes=[*left.notes, *right.notes],
        tables=[_figure_table(f"Before and after, device {body['device']}", body["figures"]) for body in bodies],
    )
