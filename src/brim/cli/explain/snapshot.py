"""What ``brim explain`` tells about a memory snapshot: plain values, one dictionary per device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.units import format_bytes

if TYPE_CHECKING:
    from brim.core.timeline import Timeline
    from brim.recordings.occupancy import Moment
    from brim.recordings.snapshot import DeviceHistory, Snapshot
    from brim.recordings.timeline import RecordedRun
    from brim.recordings.what_if import WhatIf

BEST = "best"
MUCH_UNUSED = 0.05  # of what is reserved at the peak


@dataclass(frozen=True, kw_only=True)
class ExplainedDevice:
    """One device: what to print or write as JSON, and its Timeline."""

    body: dict[str, Any]
    timeline: Timeline


def explain_snapshot(path: Path, name: str, settings: tuple[str, ...]) -> list[ExplainedDevice]:
    """Every device of the snapshot in ``path``, replayed, and under ``settings`` ("best": a search).

    A run that failed is replayed under other settings even if none were asked for.
    Raises FormatError for what is no snapshot, UsageError for settings that do not exist.
    """
    from brim.allocator.config import AllocatorConfig
    from brim.recordings import snapshot

    for text in settings:
        if text != BEST:
            AllocatorConfig.parse(text)  # before anything is read: a wrong setting is told at once
    recorded = snapshot.read(path)
    return [_device(recorded, history, name, settings) for history in recorded.devices]


def _device(recording: Snapshot, history: DeviceHistory, name: str, settings: tuple[str, ...]) -> ExplainedDevice:
    from brim.allocator.config import AllocatorConfig
    from brim.recordings.timeline import recorded_run
    from brim.recordings.what_if import best, what_if
    from brim.report.explain import summary

    run = recorded_run(history, f"{Path(name).name}, device {history.device}", stacks=recording.stacks)
    recorded = run.config
    runs = [what_if(history, AllocatorConfig.parse(text), recorded=recorded) for text in settings if text != BEST]
    untried: tuple[str, ...] = ()
    if BEST in settings or run.replay.ooms > 0:
        search = best(history, recorded=recorded)
        runs, untried = [*runs, *search.found], search.untried
    replayed = asdict(run.replay)
    del replayed["device"]
    oom = next((moment for moment in run.moments if moment.what == "oom"), None)
    body: dict[str, Any] = {
        "device": history.device,
        "events": len(history.actions),
        "settings": recorded.describe(),
        "cause": _cause(run, oom, runs),
        "headline": _headline(run, oom, runs),
        "replay": replayed | {"exact": run.replay.exact},
        "peak": asdict(summary(run.timeline)) | {"categories": "inferred from stacks"},
        "moments": [_plain(moment, recording) for moment in run.moments],
        "what_if": [asdict(moment) for moment in runs],
        "untried": list(untried),
        "advice": _advice(run, oom, runs, recorded.describe()),
    }
    return ExplainedDevice(body=body, timeline=run.timeline)


def _plain(moment: Moment, recorded: Snapshot) -> dict[str, Any]:
    """A moment with the stacks of what pins each segment."""
    from brim.recordings.labels import label_of, telling_frames

    body = asdict(moment) | {"free_bytes": moment.free_bytes}
    for segment in body["segments"]:
        for pin in segment["pins"]:
            frames = recorded.stacks[pin["stack"]] if 0 <= pin["stack"] < len(recorded.stacks) else ()
            pin["stack"] = telling_frames(frames)
            pin["label"] = label_of(frames)
    return body


def _cause(run: RecordedRun, oom: Moment | None, runs: list[WhatIf]) -> str:
    """``fragmentation``: it would have fitted under other settings, or in one piece. "" if nothing failed."""
    if oom is None:
        return ""
    if any(candidate.would_fit for candidate in runs):
        return "fragmentation"
    return "fragmentation" if _would_fit_in_one_piece(run, oom) else "exhausted"


def _would_fit_in_one_piece(run: RecordedRun, oom: Moment) -> bool:
    return oom.allocated_bytes + oom.requested_bytes <= (run.capacity_bytes or 0)


def _headline(run: RecordedRun, oom: Moment | None, runs: list[WhatIf]) -> str:
    peak = next((moment for moment in run.moments if moment.what == "peak"), run.moments[-1])
    unused = peak.free_bytes / peak.reserved_bytes if peak.reserved_bytes else 0.0
    if oom is None:
        return (
            f"Nothing failed. At the peak {format_bytes(peak.reserved_bytes)} were reserved and "
            f"{format_bytes(peak.allocated_bytes)} in use: {unused:.0%} was unused."
        )
    asked, free = format_bytes(oom.requested_bytes), format_bytes(oom.free_bytes)
    fitting = next((candidate for candidate in runs if candidate.would_fit), None)
    if _cause(run, oom, runs) == "exhausted":
        need = oom.allocated_bytes + oom.requested_bytes
        return (
            f"Out of memory: the run needs more than the device has. {format_bytes(oom.allocated_bytes)} were in use "
            f"and {asked} requested, {format_bytes(need)} together; even in one piece it would not have fitted."
        )
    proof = (
        f" With {fitting.settings or 'default settings'} it would have fitted: "
        f"{format_bytes(fitting.peak_reserved_bytes)}."
        if fitting
        else " No setting that was tried prevents it."
    )
    return (
        f"Out of memory by fragmentation: {asked} were requested while {free} of the reserved memory were free, the "
        f"largest piece {format_bytes(oom.largest_free_bytes)}.{proof}"
    )


def _advice(run: RecordedRun, oom: Moment | None, runs: list[WhatIf], recorded: str) -> list[dict[str, Any]]:
    """What to do, each proven by a replay where it is a setting, the best first."""
    measured = run.replay.peak_reserved_measured_bytes
    advice = []
    for candidate in runs:
        if candidate.settings == recorded or candidate.would_fit is False:
            continue
        peak = format_bytes(candidate.peak_reserved_bytes)
        fits = f"it would have fitted: {peak} at the peak"
        less = f"{peak} instead of {format_bytes(measured)} at the peak"
        if candidate.would_fit or candidate.peak_reserved_bytes < measured:
            setting = candidate.settings or "default settings"
            paste = (
                f"export PYTORCH_CUDA_ALLOC_CONF={candidate.settings}"
                if candidate.settings
                else "unset PYTORCH_CUDA_ALLOC_CONF"
            )
            advice.append(_told(f"With {setting} {fits if candidate.would_fit else less} (replayed).", paste))
    if oom is not None and not any(candidate.would_fit for candidate in runs):
        text = "Make the step smaller: batch size first, then sequence length; or recompute activations."
        advice.insert(0, _told(text, "model.gradient_checkpointing_enable()"))
        tried = ", ".join(candidate.settings or "default settings" for candidate in runs)
        advice.append(_told(f"Allocator settings would not help: replayed, and none fits: {tried}.", helps=False))
    peak_moment = next(candidate for candidate in run.moments if candidate.what == "peak")
    if not runs and peak_moment.free_bytes > MUCH_UNUSED * peak_moment.reserved_bytes:
        text = "Replay the run under other settings: part of what is reserved lies unused."
        advice.append(_told(text, "brim explain SNAPSHOT --what-if best"))
    return advice


def _told(text: str, paste: str = "", *, helps: bool = True) -> dict[str, Any]:
    return {"text": text, "paste": paste, "helps": helps}
