"""The answer of ``brim explain`` for each kind of file: JSON, text, timelines and tables."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from brim.cli.explain import source as explain_source
from brim.cli.explain import text as explain_text
from brim.cli.explain.source import Source
from brim.cli.explain.text import short
from brim.cli.options import readable
from brim.core import Timeline, Trace
from brim.errors import FormatError, UsageError
from brim.printable import Readable
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.explain.source import Source
    from brim.core.leak import Leak
    from brim.profiles.figures import Profile
    from brim.report.explain import Difference
    from brim.report.oom.reader import OomMessage


Cell = str | int | float | bool | None
Rows = tuple[str, tuple[str, ...], tuple[tuple[Cell, ...], ...]]  # title, columns, rows


@dataclass(frozen=True, kw_only=True, repr=False)
class Explained(Readable):
    """The explanation of a failure or of a recorded run.

    Attributes:
        title: A name for a report's head.
        body: The document of ``brim explain --json``.
        lines: The text of ``brim explain``.
        views: The runs with their names, to draw.
        notes: Sentences of the HTML report, the verdict first.
        tables: Tables of the HTML report: title, columns and rows.
    """

    title: str
    body: dict[str, Any]
    lines: Sequence[str]
    views: Sequence[tuple[str, Timeline]] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Rows] = field(default_factory=list)

    def summary(self) -> str:
        """Return the text that ``brim explain`` prints."""
        return "\n".join(map(readable, self.lines))  # names in an unknown file are of any origin

    def plot(self) -> str:
        """Return the HTML page that ``brim explain --html`` writes, with a chart of each run."""
        from brim.report.html.page import Table, View, page

        views = [View(timeline=timeline, title=title) for title, timeline in self.views]
        tables = [Table(title=title, columns=columns, rows=rows) for title, columns, rows in self.tables]
        first, *rest = [*self.notes, ""]
        notes = [note for note in rest if note]
        return page(views, title=self.title, verdict=first, tables=tables, notes=notes)


def explain(source: BaseException | Timeline | str | Path, what_if: Sequence[str] = ()) -> Explained:
    """Explain why memory ran out, or the memory of a recorded run, as ``brim explain`` does.

    Args:
        source: An out-of-memory exception, the text of its message, a timeline, or a file: a log, a memory snapshot
            of PyTorch, a file of ``brim.watch``, a trace of PyTorch's profiler or a timeline of brim.
        what_if: Allocator settings to replay a snapshot under: ``"expandable_segments:True"``, or ``"best"``.

    Returns:
        The answer, with the text that ``brim explain`` prints and the document of its ``--json``.

    Raises:
        FormatError: The exception, the text or the file says nothing about memory, or the file cannot be read.
        UsageError: ``what_if`` was given for anything but a snapshot, or the file is one of brim that records no run.
    """
    if isinstance(source, Timeline):
        _refuse_settings(what_if, source.name)
        return _of_timeline(source, source.name)
    text = "".join(traceback.format_exception(source)) if isinstance(source, BaseException) else str(source)
    if isinstance(source, BaseException) or "\n" in text:
        name = type(source).__name__ if isinstance(source, BaseException) else "the text"
        _refuse_settings(what_if, name)
        return _of_messages(name, text)
    if isinstance(source, str) and not what_if:
        with contextlib.suppress(FormatError):  # a message of one line, or the name of a file
            return _of_messages("the text", text)
    with explain_source.opened(Path(text)) as opened:
        if opened.kind != explain_source.SNAPSHOT:
            _refuse_settings(what_if, opened.name)
        return BY_KIND[opened.kind](opened, tuple(what_if))


def _refuse_settings(settings: Sequence[str], name: str) -> None:
    if settings:
        raise UsageError(
            f"Cannot use --what-if with {name}.", "It has no run that can be replayed.", "Give a memory snapshot."
        )


def of_log(source: Source, settings: tuple[str, ...]) -> Explained:
    """Explain the most informative out-of-memory message of a log, and name the others."""
    with explain_source.log_of(source) as log:
        return _of_messages(source.name, log)


def _of_messages(name: str, log: str | BinaryIO) -> Explained:
    from brim.report.oom.reader import primary, read_oom

    try:
        messages = read_oom(log)
    except FormatError as error:
        raise FormatError(f"Cannot read an out-of-memory message in {name}.", error.reason, error.todo) from None
    chosen = primary(messages)
    others = [message for message in messages if message is not chosen]
    body = {"kind": explain_source.LOG, "source": name} | chosen.to_json()
    return Explained(
        title=f"{name}: {chosen.cause.replace('_', ' ')}",
        body=body | {"others": [message.to_json() for message in others]},
        lines=explain_text.of_message(chosen, others),
        notes=[chosen.why, chosen.text],
        tables=[_numbers(chosen), advice_table([asdict(advice) for advice in chosen.advice])],
    )


def _numbers(message: OomMessage) -> Rows:
    rows = tuple((name.replace("_", " "), count) for name, count in message.numbers_bytes.items())
    return f"{message.family} on {message.device}", ("number", "bytes"), rows


def advice_table(advice: Sequence[Mapping[str, Any]]) -> Rows:
    return (
        "What to do",
        ("advice", "helps", "to paste"),
        tuple((advised["text"], bool(advised["helps"]), advised["paste"]) for advised in advice),
    )


def of_snapshot(
    source: Source,
    settings: tuple[str, ...],
    *,
    leaks: Mapping[int, Leak] | None = None,
    revise: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> Explained:
    """Explain a memory snapshot. ``revise`` may change the devices' documents before the text is made."""
    from brim.cli.explain.snapshot import explain_snapshot

    devices = explain_snapshot(source.path, source.name, settings, leaks=leaks)
    bodies = [device.body for device in devices]
    revise(bodies)
    notes = [f"Device {body['device']}: {body['headline']}" for body in bodies]
    if bodies:
        notes.append("Categories are inferred from stacks and lifetimes; a recording does not hold them.")
    notes += [f"Device {body['device']}: {explain_text.untried(body)}." for body in bodies if body["untried"]]
    return Explained(
        title=source.name,
        body={"kind": source.kind, "source": source.name, "devices": bodies},
        lines=explain_text.of_snapshot(bodies),
        views=[(f"device {each.body['device']}", each.timeline) for each in devices],
        notes=notes,
        tables=[table for body in bodies for table in _snapshot_tables(body)],
    )


def _snapshot_tables(body: dict[str, Any]) -> list[Rows]:
    name = f"device {body['device']}"
    tables: list[Rows] = [advice_table(body["advice"])] if body["advice"] else []
    if body["what_if"]:
        tables.append(_what_if_table(body["what_if"], name))
    for moment in body["moments"]:
        when = f"{name}, {explain_text.WHEN[moment['what']]}"
        sizes = tuple(
            (explain_text.size_name(row["limit_bytes"]), row["count"], row["bytes"]) for row in moment["free_by_size"]
        )
        tables.append((f"Free blocks: {when}", ("size", "blocks", "bytes"), sizes))
        pinned = tuple(
            (f"{row['address']:#x}", row["bytes"], row["free_bytes"], row["blocks_in_use"], explain_text.pins(row))
            for row in moment["segments"]
        )
        heads = ("segment", "size_bytes", "free_bytes", "blocks in use", "pinned by")
        tables.append((f"Segments with pinned free memory: {when}", heads, pinned))
    return tables


def _what_if_table(runs: Sequence[Mapping[str, Any]], name: str) -> Rows:
    columns = ("settings", "reserved at the peak_bytes", "allocated at the peak_bytes", "serves the failed request")
    rows = tuple(
        (run["settings"] or "default", run["peak_reserved_bytes"], run["peak_allocated_bytes"], run["serves_failure"])
        for run in runs
    )
    return f"Replayed under other settings, {name}", columns, rows


def print_run(run: Timeline | Trace) -> None:
    """Print a run; of a trace, on a GPU of unlimited memory."""
    from brim.estimation.simulation import simulate

    print(explain(simulate(run) if isinstance(run, Trace) else run).summary())


def of_timeline(source: Source, settings: tuple[str, ...]) -> Explained:
    return _of_timeline(explain_source.timeline_of(source), source.name)


def _of_timeline(timeline: Timeline, name: str) -> Explained:
    from brim.report.explain import summary
    from brim.report.idle import attribute

    peak, idle = summary(timeline), attribute(timeline)
    failed = timeline.out_of_memory
    body: dict[str, Any] = {
        "kind": explain_source.TIMELINE,
        "source": name,
        "name": timeline.name,
        "measured": timeline.measured,
        "events": len(timeline),
        "facts": timeline.facts,
        "peak": asdict(peak),
        "process_peak_bytes": timeline.peak_bytes.process,
        "out_of_memory": None if failed is None else {"bytes": failed.bytes, "label": failed.label},
        "idle": idle.to_json(),
    }
    headline = explain_text.timeline_headline(body)
    return Explained(
        title=timeline.name or name,
        body=body | {"headline": headline},
        lines=[headline, *explain_text.of_peak(body["peak"]), *explain_text.of_idle(body["idle"])],
        views=[("", timeline)],
        notes=[headline],
        tables=[_waits(body["idle"])] if idle.computed else [],
    )


def _waits(idle: Mapping[str, Any]) -> Rows:
    rows = tuple((wait["label"], wait["cause"], wait["seconds"], wait["count"]) for wait in idle["waits"][:50])
    return "Causes of waiting", ("what", "cause", "time_s", "times"), rows


def of_profile(source: Source, settings: tuple[str, ...]) -> Explained:
    from brim.profiles import profiler
    from brim.report.idle import attribute

    recorded: Profile = profiler.read(source.path)
    body = recorded.to_json() | {"source": source.name}
    tables: list[Rows] = []
    for device, plain in zip(recorded.devices, body["devices"], strict=True):
        plain["waits"] = attribute(device.timeline).to_json()["waits"][:20]
        tables += _profile_tables(plain)
    views = [(f"device {device.device} {device.name}".strip(), device.timeline) for device in recorded.devices]
    if len(recorded.host):
        views.append(("host", recorded.host))
    lines = explain_text.of_profile(body)
    return Explained(
        title=source.name, body=body, lines=lines, views=views, notes=explain_text.profile_notes(body), tables=tables
    )


def _profile_tables(device: Mapping[str, Any]) -> list[Rows]:
    name = f"device {device['device']}"
    idle = tuple((cause, seconds) for cause, seconds in device["idle_by_cause"].items())
    gaps = tuple(
        (row["start_s"], row["duration_s"], max(row["causes"], key=row["causes"].get, default=""), row["label"])
        for row in device["gaps"]
    )
    copies = tuple(
        (row["kind"], row["unified"], row["count"], row["bytes"], row["seconds"]) for row in device["copies"]
    )
    kernels = tuple((row["name"], row["count"], row["seconds"]) for row in device["kernels"])
    tables: list[Rows] = [
        (f"Idle by cause, {name}", ("cause", "time_s"), idle),
        (f"The longest gaps, {name}", ("start_s", "duration_s", "cause", "waited for"), gaps),
        (f"Copies, {name}", ("kind", "unified memory", "count", "bytes", "time_s"), copies),
        (f"Kernels, {name}", ("kernel", "count", "time_s"), kernels),
    ]
    return [table for table in tables if table[2]]


BY_KIND: dict[str, Callable[[Source, tuple[str, ...]], Explained]] = {
    explain_source.LOG: of_log,
    explain_source.SNAPSHOT: of_snapshot,
    explain_source.TIMELINE: of_timeline,
    explain_source.PROFILE: of_profile,
}


_RUNS = (explain_source.SNAPSHOT, explain_source.TIMELINE)
MOST_LINES = 8
_BREAKDOWNS = ("by_category", "by_module", "by_label", "by_stack", "by_segment_size")


def compared(before: Source, after: Source) -> Explained:
    """Compare two files. Raises UsageError if their kinds cannot be compared."""
    kinds = {before.kind, after.kind}
    if kinds <= set(_RUNS):
        return _runs(before, after)
    if kinds == {explain_source.PROFILE}:
        return _profiles(before, after)
    problem = f"{before.name} is of the kind {before.kind}, {after.name} of the kind {after.kind}"
    if kinds == {explain_source.LOG}:
        problem = "Both are error messages, which hold no runs"
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
    from brim.report.explain import diff

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
    from brim.report.explain import figures

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
