"""The explanation of a memory snapshot: plain values, a dictionary per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.core.leak import Leak
    from brim.core.timeline import Timeline
    from brim.recordings.history import DeviceHistory
    from brim.recordings.moments import Moment
    from brim.recordings.snapshot import Snapshot
    from brim.recordings.timeline import RecordedRun
    from brim.recordings.what_if import WhatIf
    from brim.report.failure import Failure
    from brim.report.phase import Advice

BEST = "best"
ALLOCATOR = "allocator:"  # prefix of a change of allocator settings
_UNKNOWN = "later events are not recorded"
MUCH_UNUSED = 0.05  # of memory reserved at the peak


@dataclass(frozen=True, kw_only=True)
class ExplainedDevice:
    """The JSON document and the Timeline of a device."""

    body: dict[str, Any]
    timeline: Timeline


def explain_snapshot(
    path: Path, name: str, settings: tuple[str, ...], *, leaks: Mapping[int, Leak] | None
) -> list[ExplainedDevice]:
    """Replay every device of the snapshot in ``path``, also under ``settings`` ("best": a search).

    ``leaks``: the known leaks by device; None: they are searched, from backward pass to backward pass.
    A run that failed is replayed under other settings anyway.
    Raises FormatError for a file that is no snapshot, UsageError for unknown settings.
    """
    from brim.allocator.config import AllocatorConfig
    from brim.recordings import snapshot
    from brim.recordings.leaks import recorded_leak

    for text in settings:
        if text != BEST:
            AllocatorConfig.parse(text)  # so that a wrong setting is refused before the file is read
    recorded = snapshot.read(path)
    return [
        _device(
            recorded,
            history,
            name,
            settings,
            recorded_leak(history, recorded.stacks) if leaks is None else leaks.get(history.device),
        )
        for history in recorded.devices
    ]


def _device(
    recording: Snapshot, history: DeviceHistory, name: str, settings: tuple[str, ...], leak: Leak | None
) -> ExplainedDevice:
    from brim.allocator.config import AllocatorConfig
    from brim.recordings.timeline import recorded_run
    from brim.recordings.what_if import best, what_if
    from brim.report.explain import summary
    from brim.report.failure import failure

    run = recorded_run(history, f"{Path(name).name}, device {history.device}", stacks=recording.stacks)
    recorded = run.config
    runs = [what_if(history, AllocatorConfig.parse(text), recorded=recorded) for text in settings if text != BEST]
    untried: tuple[str, ...] = ()
    if BEST in settings or run.replay.ooms > 0:
        search = best(history, recorded=recorded)
        runs, untried = [*runs, *search.replayed], search.untried
    replayed = asdict(run.replay)
    del replayed["device"]
    oom = next((moment for moment in run.moments if moment.what == "oom"), None)
    failed = failure(run.timeline, () if oom is None else _frames(recording, history.stacks, oom.event))
    body: dict[str, Any] = {
        "device": history.device,
        "events": len(history.actions),
        "settings": recorded.describe(),
        "cause": "leak" if leak is not None and oom is not None else _cause(run, oom, runs),
        "phase": "" if failed is None or failed.phase is None else failed.phase,
        "headline": _headline_of_leak(leak, oom) if leak is not None else _headline(run, oom, failed, runs),
        "leak": None if leak is None else asdict(leak),
        "replay": replayed | {"exact": run.replay.exact},
        "failed": None if failed is None else asdict(failed),
        "peak": asdict(summary(run.timeline)) | {"categories": "inferred from stacks"},
        "moments": [_plain(moment, recording) for moment in run.moments],
        "what_if": [asdict(moment) for moment in runs],
        "untried": list(untried),
        "advice": _advice(run, failed, leak, runs, recorded.describe()),
    }
    return ExplainedDevice(body=body, timeline=run.timeline)


def _frames(recording: Snapshot, stacks: Sequence[int], event: int) -> tuple[str, ...]:
    """Return the stack of an event, the innermost frame first; () if not recorded."""
    number = stacks[event] if event < len(stacks) else -1
    return recording.stacks[number] if 0 <= number < len(recording.stacks) else ()


def _plain(moment: Moment, recorded: Snapshot) -> dict[str, Any]:
    """Return a moment with the stacks of the blocks that pin each segment."""
    from brim.recordings.stacks import informative_frames, label_of

    body = asdict(moment) | {"free_bytes": moment.free_bytes}
    for segment in body["segments"]:
        for pin in segment["pins"]:
            frames = recorded.stacks[pin["stack"]] if 0 <= pin["stack"] < len(recorded.stacks) else ()
            pin["stack"] = informative_frames(frames)
            pin["label"] = label_of(frames)
    return body


def _cause(run: RecordedRun, oom: Moment | None, runs: list[WhatIf]) -> str:
    """Return "fragmentation" if the failed request is served under other settings, or would be in one piece.

    Otherwise "exhausted", or "" if nothing failed.
    """
    if oom is None:
        return ""
    fits = oom.allocated_bytes + oom.requested_bytes <= (run.capacity_bytes or 0)
    return "fragmentation" if fits or any(candidate.serves_failure for candidate in runs) else "exhausted"


def _headline_of_leak(leak: Leak, oom: Moment | None) -> str:
    from brim.cli.verdict import of_leak

    failed = "No allocation failed, but" if oom is None else "Out of memory by a leak:"
    grows = of_leak(leak if oom is None else replace(leak, full_step=None))
    return f"{failed} {grows}."


def _headline(run: RecordedRun, oom: Moment | None, failed: Failure | None, runs: list[WhatIf]) -> str:
    from brim.report.failure import IN_PHASE

    peak = next((moment for moment in run.moments if moment.what == "peak"), run.moments[-1])
    unused = peak.free_bytes / peak.reserved_bytes if peak.reserved_bytes else 0.0
    if oom is None:
        return (
            f"No allocation failed. At the peak {format_bytes(peak.reserved_bytes)} were reserved and "
            f"{format_bytes(peak.allocated_bytes)} in use: {unused:.0%} was unused."
        )
    where = "" if failed is None or failed.phase is None else f" {IN_PHASE[failed.phase]}"
    asked, free = format_bytes(oom.requested_bytes), format_bytes(oom.free_bytes)
    serving = next((candidate for candidate in runs if candidate.serves_failure), None)
    if _cause(run, oom, runs) == "exhausted":
        need = oom.allocated_bytes + oom.requested_bytes
        return (
            f"Out of memory{where}: the run needs more than the device has. {format_bytes(oom.allocated_bytes)} were "
            f"in use and {asked} requested, {format_bytes(need)} together; even in one piece it would not have "
            "fitted."
        )
    replayed = (
        f" With {serving.settings or 'default settings'} it is served, {format_bytes(serving.peak_reserved_bytes)} "
        f"reserved until then; {_UNKNOWN}."
        if serving
        else " No setting that was tried serves it."
    )
    return (
        f"Out of memory{where} by fragmentation: {asked} were requested while {free} of the reserved memory were "
        f"free, the largest piece {format_bytes(oom.largest_free_bytes)}.{replayed}"
    )


def _advice(
    run: RecordedRun, failed: Failure | None, leak: Leak | None, runs: list[WhatIf], recorded: str
) -> list[dict[str, Any]]:
    """Return advice, the best first; all settings of the allocator were replayed."""
    from brim.report.failure import advice_for
    from brim.report.phase import NAMED, Advice

    if leak is not None:  # a smaller step or other settings only delay the failure
        return [asdict(NAMED["detach"])]
    settings = _of_settings(run, runs, recorded)
    if failed is None:
        peak = next(moment for moment in run.moments if moment.what == "peak")
        if not runs and peak.free_bytes > MUCH_UNUSED * peak.reserved_bytes:
            text = "Replay the run under other settings: a part of the reserved memory is unused."
            settings.append(Advice(text, "brim explain SNAPSHOT --what-if best"))
        return [asdict(advice) for advice in settings]
    advice = advice_for(failed)
    useless = [item for item in advice if not item.helps]
    if not any(candidate.serves_failure for candidate in runs):
        tried = ", ".join(candidate.settings or "default settings" for candidate in runs)
        text = f"Allocator settings would not help: in a replay, the failed request fails with each of {tried}."
        useless.append(Advice(text, helps=False))
    return [asdict(item) for item in (*settings, *(item for item in advice if item.helps), *useless)]


def _of_settings(run: RecordedRun, runs: list[WhatIf], recorded: str) -> list[Advice]:
    """Return settings that serve the failed request; for a run that did not fail, settings that reserve less."""
    from brim.report.phase import Advice

    measured = run.replay.peak_reserved_measured_bytes
    advice = []
    for candidate in runs:
        serves = candidate.serves_failure
        less = serves is None and candidate.peak_reserved_bytes < measured
        if candidate.settings == recorded or not (serves or less):
            continue
        peak = format_bytes(candidate.peak_reserved_bytes)
        effect = (
            f"the failed request is served, {peak} reserved until then (replayed); {_UNKNOWN}."
            if serves
            else f"{peak} instead of {format_bytes(measured)} at the peak (replayed)."
        )
        paste = (
            f"export PYTORCH_CUDA_ALLOC_CONF={candidate.settings}"
            if candidate.settings
            else "unset PYTORCH_CUDA_ALLOC_CONF"
        )
        text = f"With {candidate.settings or 'default settings'} {effect}"
        advice.append(Advice(text, paste, change=f"{ALLOCATOR}{candidate.settings}"))
    return advice
