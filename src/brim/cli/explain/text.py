"""The text of ``brim explain``: the cause first, then the numbers, then advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.report.oom.reader import OomMessage

WHEN = {"peak": "at the peak", "oom": "when it failed", "end": "at the end"}
MOST_LINES = 8  # of a list
_NO_STACK = "(stack not recorded, as in a backward pass)"
_LET_GO = (
    "Keep numbers (loss.item()) or detached copies on the CPU instead of tensors with their graphs, give caches a "
    "bound, and register hooks once. Smaller steps and other settings only delay the end."
)
_Lines = list[str]


def of_message(chosen: OomMessage, others: Sequence[OomMessage]) -> _Lines:
    rank = f" ({chosen.rank})" if chosen.rank else ""
    by = f", by {chosen.program}" if chosen.program and chosen.program not in chosen.family else ""
    doing = f", in the phase: {chosen.phase}" if chosen.phase else ""
    headline = f"{chosen.family} on {chosen.device}{rank}{by}{doing}: {chosen.cause.replace('_', ' ')}"
    lines = [headline, chosen.why]
    for name, count in chosen.numbers_bytes.items():
        lines.append(f"  {name.replace('_', ' '):18} {format_bytes(count):>10}  {count:,} bytes")
    lines += [
        f"  {name.replace('_', ' '):18}  unknown to the program that printed the message" for name in chosen.unknown
    ]
    lines += [f"  also in the message: {size}" for size in chosen.not_read]
    lines += _advice([asdict(advice) for advice in chosen.advice])
    for message in others[:MOST_LINES]:
        rank = f" ({message.rank})" if message.rank else ""
        lines.append(f"also: {message.family} on {message.device}{rank}: {message.cause.replace('_', ' ')}")
    if len(others) > MOST_LINES:
        lines.append(f"also: {len(others) - MOST_LINES} more")
    return lines


def _advice(advice: Sequence[Mapping[str, Any]]) -> _Lines:
    lines = []
    for number, item in enumerate(advice, 1):
        lines.append(f"{number}. {'' if item['helps'] else '(does not help) '}{item['text']}")
        if item["paste"] and item["helps"]:
            lines.append(f"     {item['paste']}")
    return lines


def of_snapshot(devices: Sequence[Mapping[str, Any]]) -> _Lines:
    if not devices:
        return ["The snapshot holds no events and no segments."]
    return [line for device in devices for line in _device(device)]


def _device(device: Mapping[str, Any]) -> _Lines:
    replay = device["replay"]
    settings = device["settings"] or "default settings"
    lines = [f"device {device['device']}: {device['headline']}"]
    lines += [f"  {line}" for line in (of_leak(device["leak"]) if device["leak"] else [])]
    lines += [
        f"  {device['events']:,} events, {settings}; replayed: {replay['addresses_matched']:,} of "
        f"{replay['allocations']:,} addresses, {replay['segments_matched']:,} of {replay['segments']:,} segments "
        "agree",
        f"  reserved at the peak: {format_bytes(replay['peak_reserved_measured_bytes'])} measured, "
        f"{format_bytes(replay['peak_reserved_replayed_bytes'])} replayed; "
        f"allocated {format_bytes(replay['peak_allocated_replayed_bytes'])}",
    ]
    if replay["ooms"]:
        lines.append(f"  out of memory: {replay['ooms']} times")
    for moment in _shown(device["moments"]):
        lines += [f"  {line}" for line in _moment(moment)]
    lines += [f"  {line}" for line in of_peak(device["peak"], "by category, inferred from stacks")]
    for run in device["what_if"]:
        lines.append(f"  {_what_if_line(run, replay['peak_reserved_measured_bytes'])}")
    if device["untried"]:
        lines.append(f"  {untried(device)}")
    return lines + [f"  {line}" for line in _advice(device["advice"])]


def untried(device: Mapping[str, Any]) -> str:
    """Return a sentence about derived settings that were not replayed."""
    return f"not replayed, to save time (use --what-if): {', '.join(device['untried'])}"


def _shown(moments: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first failure, and the peak if it differs; without either, the end."""
    failed = [moment for moment in moments if moment["what"] == "oom"][:1]
    peak = [moment for moment in moments if moment["what"] == "peak"]
    if failed and peak and failed[0]["reserved_bytes"] == peak[0]["reserved_bytes"]:
        peak = []
    return failed + peak or list(moments)


def _moment(moment: Mapping[str, Any]) -> _Lines:
    sizes = [
        f"{entry['count']:,} {size_name(entry['limit_bytes'])} ({format_bytes(entry['bytes'])})"
        for entry in moment["free_by_size"]
        if entry["count"]
    ]
    lines = [
        f"{WHEN[moment['what']]} (event {moment['event']:,}, {format_seconds(moment['time_s'])}): allocated "
        f"{format_bytes(moment['allocated_bytes'])}, reserved {format_bytes(moment['reserved_bytes'])}, free "
        f"{format_bytes(moment['free_bytes'])}: {format_bytes(moment['pinned_bytes'])} pinned in "
        f"{moment['segments_with_pins']:,} segments by blocks in use, {format_bytes(moment['cached_bytes'])} in "
        "entirely free segments",
        f"  largest free block {format_bytes(moment['largest_free_bytes'])}; free blocks: "
        f"{', '.join(sizes) or 'none'}",
    ]
    for entry in moment["segments"][:4]:
        lines.append(
            f"  {format_bytes(entry['free_bytes'])} of {format_bytes(entry['bytes'])} at {entry['address']:#x} "
            f"pinned by {_blocks(entry['blocks_in_use'])}: {pins(entry)}"
        )
    return lines


def pins(segment: Mapping[str, Any]) -> str:
    """Return the blocks that pin a segment, the largest first, with the code that allocated them."""
    named = [
        f"{format_bytes(pin['bytes'])} {short(pin['label']) or '(stack not recorded)'}" for pin in segment["pins"]
    ]
    return "; ".join(named)


def of_leak(leak: Mapping[str, Any]) -> _Lines:
    """Return the program's lines whose allocations stay in use."""
    from brim.rehearsal.branches import keeping_lines

    rows = [(row["bytes_per_step"], short(row["line"])) for row in leak["lines"]]
    if len(rows) > MOST_LINES:
        rest = sum(size for size, _ in rows[MOST_LINES:])
        rows = [*rows[:MOST_LINES], (rest, f"{len(rows) - MOST_LINES:,} other lines")]
    seen = f"seen from {leak['unit']} {leak['since_step']:,} to {leak['steps']:,}"
    keeping = dict.fromkeys(line for row in leak["lines"] for line in keeping_lines(row["places"]))
    return [
        f"what each {leak['unit']} leaves in use ({seen}), by the line that requested it:",
        *(f"  {format_bytes(size):>10}  {line or _NO_STACK}" for size, line in rows),
        *([f"kept by {'; '.join(list(keeping)[:MOST_LINES])}"] if keeping else []),
        _LET_GO,
    ]


def short(frame: str) -> str:
    """Return a frame with the end of its path."""
    what, at, where = frame.rpartition(" at ")
    parts = where.split("/")
    return f"{what}{at}{'/'.join(parts[-3:])}" if len(parts) > 3 else frame[:160]


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def size_name(limit: int) -> str:
    return f"up to {format_bytes(limit)}" if limit >= 0 else "larger"


def _what_if_line(run: Mapping[str, Any], measured_bytes: int) -> str:
    fits = {
        None: "",
        True: ", serves the request that failed: yes",
        False: f", serves the request that failed: no ({format_bytes(run['failed_bytes'])} not served)",
    }[run["serves_failure"]]
    change = run["peak_reserved_bytes"] - measured_bytes
    return (
        f"with {run['settings'] or 'default settings'}: {format_bytes(measured_bytes)} -> "
        f"{format_bytes(run['peak_reserved_bytes'])} "
        f"({'+' if change >= 0 else '-'}{format_bytes(abs(change))}){fits}"
    )


def of_peak(peak: Mapping[str, Any], title: str = "by category") -> _Lines:
    """Return the memory in use at the peak."""
    if peak["event"] < 0:
        return ["nothing was allocated"]
    lines = [f"in use at the peak of {peak['tier']}, {format_bytes(peak['allocated_bytes'])}, {title}:"]
    lines += [
        f"  {format_bytes(group['bytes']):>10}  {group['name'] or '(not known)'} ({_blocks(group['count'])})"
        for group in peak["by_category"]
    ]
    named = [group for group in peak["by_label"] if group["name"]][:MOST_LINES]
    if named:
        lines.append("by the line that requested it:")
        lines += [
            f"  {format_bytes(group['bytes']):>10}  {short(group['name'])} ({_blocks(group['count'])})"
            for group in named
        ]
    return lines


def timeline_headline(body: Mapping[str, Any]) -> str:
    """Return a sentence about a run."""
    peak = body["peak"]
    what = "Measured" if body["measured"] else "Predicted"
    allocated = f"{format_bytes(peak['allocated_bytes'])} allocated at the peak of {peak['tier']}"
    reserved = f", {format_bytes(peak['reserved_peak_bytes'])} reserved"
    failed = body["out_of_memory"]
    if failed is None:
        return f"{what}: {allocated}{reserved}. No allocation failed."
    by = f" by {failed['label']}" if failed["label"] else ""
    return f"{what}: out of memory: {format_bytes(failed['bytes'])} were requested{by}. {allocated}{reserved}."


def of_idle(idle: Mapping[str, Any]) -> _Lines:
    if not idle["computed"] or not idle["wall_s"]:
        return []
    idle_s, wall_s = format_seconds(idle["idle_s"]), format_seconds(idle["wall_s"])
    share = f"{idle['idle_s'] / idle['wall_s']:.0%}"
    if idle["compute_recorded"]:
        busy_s = format_seconds(idle["busy_s"])
        lines = [f"computing {busy_s} of {wall_s}, idle {idle_s} ({share}), waiting for:"]
    else:
        rest = "the rest was not recorded"
        lines = [f"waiting {idle_s} of {wall_s} ({share}); {rest}. Waited for:"]
    for wait in idle["waits"][:MOST_LINES]:
        lines.append(
            f"  {format_seconds(wait['seconds']):>10}  {wait['cause']}: {wait['label']} ({wait['count']:,} times)"
        )
    return lines


def profile_notes(body: Mapping[str, Any]) -> _Lines:
    """Return a sentence per device."""
    if not body["devices"]:
        return ["Nothing ran on a device while this was recorded."]
    lines = []
    for device in body["devices"]:
        causes = sorted(device["idle_by_cause"].items(), key=lambda pair: -pair[1])
        why = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in causes[:3] if seconds)
        share = device["idle_s"] / device["wall_s"] if device["wall_s"] else 0.0
        lines.append(
            f"device {device['device']} {device['name']}: computed {format_seconds(device['busy_s'])} of "
            f"{format_seconds(device['wall_s'])}, idle {share:.0%}{f' ({why})' if why else ''}."
        )
    return lines


def of_profile(body: Mapping[str, Any]) -> _Lines:
    lines = []
    for note, device in zip(profile_notes(body), body["devices"] or [None], strict=True):
        lines.append(note)
        if device is not None:
            lines += [f"  {line}" for line in _profiled(device)]
    return lines


def _profiled(device: Mapping[str, Any]) -> _Lines:
    lines = [
        f"copies {format_seconds(device['copy_s'])}, {format_seconds(device['overlap_s'])} of it during compute; "
        f"memory operations are {device['memory_operations_share']:.1%} of what the device did; unified memory "
        f"{device['unified_share_time']:.1%} of their time, {device['unified_share_bytes']:.1%} of their bytes"
    ]
    for copy in device["copies"]:
        kind = f"{copy['kind']}{' (unified)' if copy['unified'] else ''}"
        lines.append(
            f"  {kind}: {copy['count']:,} copies, {format_bytes(copy['bytes'])}, {format_seconds(copy['seconds'])}"
        )
    if device["gaps"]:
        lines.append("longest gaps:")
    for gap in device["gaps"][:MOST_LINES]:
        cause = max(gap["causes"], key=gap["causes"].get, default="unknown")
        at = format_seconds(gap["start_s"])
        lines.append(f"  {format_seconds(gap['duration_s']):>10} at {at}: {cause}, {gap['label']}")
    return lines
