"""The answer of ``brim explain`` for each kind of file: JSON, text, timelines and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from brim.cli.explain import source as explain_source
from brim.cli.explain import text as explain_text
from brim.cli.explain.source import Source
from brim.errors import FormatError

if TYPE_CHECKING:
    from brim.core.leak import Leak
    from brim.core.timeline import Timeline
    from brim.profiles.figures import Profile
    from brim.report.oom.reader import OomMessage

Cell = str | int | float | bool | None
Rows = tuple[str, tuple[str, ...], tuple[tuple[Cell, ...], ...]]  # title, columns, rows


@dataclass(frozen=True, kw_only=True)
class Explained:
    """``body`` is the JSON document, ``lines`` the text; ``views``, ``notes`` and ``tables`` make the report."""

    title: str
    body: dict[str, Any]
    lines: Sequence[str]
    views: Sequence[tuple[str, Timeline]] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Rows] = field(default_factory=list)


def of_log(source: Source, settings: tuple[str, ...]) -> Explained:
    """Explain the out-of-memory message that says most in a log, and name the others."""
    from brim.report.oom.reader import primary, read_oom

    try:
        with explain_source.log_of(source) as log:
            messages = read_oom(log)
    except FormatError as error:
        raise FormatError(
            f"Cannot read an out-of-memory message in {source.name}.", error.found, error.todo
        ) from None
    chosen = primary(messages)
    others = [message for message in messages if message is not chosen]
    body = {"kind": source.kind, "source": source.name} | chosen.to_json()
    return Explained(
        title=f"{source.name}: {chosen.cause.replace('_', ' ')}",
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


def of_timeline(source: Source, settings: tuple[str, ...]) -> Explained:
    from brim.report.explain import summary
    from brim.report.idle import attribute

    timeline = explain_source.timeline_of(source)
    peak, idle = summary(timeline), attribute(timeline)
    failed = timeline.out_of_memory
    body: dict[str, Any] = {
        "kind": source.kind,
        "source": source.name,
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
        title=timeline.name or source.name,
        body=body | {"headline": headline},
        lines=[headline, *explain_text.of_peak(body["peak"]), *explain_text.of_idle(body["idle"])],
        views=[("", timeline)],
        notes=[headline],
        tables=[_waits(body["idle"])] if idle.computed else [],
    )


def _waits(idle: Mapping[str, Any]) -> Rows:
    rows = tuple((wait["label"], wait["cause"], wait["seconds"], wait["count"]) for wait in idle["waits"][:50])
    return "What compute waited for", ("what", "cause", "time_s", "times"), rows


def of_profile(source: Source, settings: tuple[str, ...]) -> Explained:
    from brim.profiles import nsight
    from brim.profiles import profiler as profile
    from brim.report.idle import attribute

    read = nsight.read if source.kind == explain_source.NSIGHT else profile.read
    recorded: Profile = read(source.path)
    body = recorded.to_json() | {"source": source.name, "profiler": recorded.kind, "kind": source.kind}
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
    migrations = tuple(
        (cause, row["count"], row["bytes"], row["seconds"]) for cause, row in device["migrations"].items()
    )
    tables: list[Rows] = [
        (f"Idle by cause, {name}", ("cause", "time_s"), idle),
        (f"The longest gaps, {name}", ("start_s", "duration_s", "cause", "waited for"), gaps),
        (f"Copies, {name}", ("kind", "unified memory", "count", "bytes", "time_s"), copies),
        (f"Kernels, {name}", ("kernel", "count", "time_s"), kernels),
        (f"Migrations of unified memory, {name}", ("cause", "count", "bytes", "time_s"), migrations),
    ]
    return [table for table in tables if table[2]]


BY_KIND: dict[str, Callable[[Source, tuple[str, ...]], Explained]] = {
    explain_source.LOG: of_log,
    explain_source.SNAPSHOT: of_snapshot,
    explain_source.TIMELINE: of_timeline,
    explain_source.PROFILE: of_profile,
    explain_source.NSIGHT: of_profile,
}
