"""``brim estimate train.py``: a rehearsal, reported as an estimate."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.cli import verdict
from brim.errors import ModelError, UsageError
from brim.processes import temporary_folder

if TYPE_CHECKING:
    from brim.core.timeline import Timeline
    from brim.device.environment import Environment
    from brim.estimation.estimate import Estimate
    from brim.estimation.simulation import Place
    from brim.rehearsal.rehearse import Rehearsal, Request

_MOST_ADVICE = 3
_ENDLESS_BYTES = 1 << 42  # enough to measure a program that does not fit
_REHEARSED = (
    "rehearsed: the unchanged program ran with PyTorch's CUDA build on a simulated GPU until it ended or memory "
    "stopped growing"
)
_CATEGORIES = "categories and modules are inferred from the stacks of allocations"


def environment_for(place: Place) -> Environment:
    """Return the CUDA build to rehearse with.

    Raises UsageError where no card of the catalog is named, or the build is not there and may not be fetched, and
    UnsupportedError where there is none for this machine.
    """
    from brim import catalog
    from brim.cli.loading import confirmed
    from brim.device.environment import prepare
    from brim.device.settings import DeviceSettings

    if place.name not in catalog.gpu_names():
        raise UsageError(
            "Cannot estimate a program.",
            "brim rehearses programs on a GPU of the catalog, and none is given.",
            "Name one with --gpu.",
        )
    DeviceSettings.of(place.name, memory_bytes=place.total_bytes)  # refuses cards before anything is downloaded
    return prepare(confirm=confirmed)


def rehearsed(
    model: str, arguments: tuple[str, ...], place: Place, alloc_conf: str, environment: Environment
) -> tuple[Estimate, Timeline | None]:
    """The rehearsed program's estimate, and its timeline on this GPU (None: it makes its own recording).

    If the program does not fit, the estimate is for a GPU with unlimited memory.
    Raises ModelError where the program fails, or does not use CUDA.
    """
    from brim.rehearsal.rehearse import Request

    request = Request(
        target=model, arguments=arguments, gpu=place.name, memory_bytes=place.total_bytes, alloc_conf=alloc_conf
    )
    rehearsal, here = _run(request, environment)
    if rehearsal.ended != "out of memory":
        return _estimate(Path(model).name, rehearsal, here, place), here
    endless, whole = _run(replace(request, memory_bytes=_ENDLESS_BYTES), environment)
    estimate = _estimate(Path(model).name, endless, whole, place)
    notes = (*_what_helps(here), *estimate.notes)
    return replace(estimate, fits=False, out_of_memory=rehearsal.message, leak=rehearsal.leak, notes=notes), here


def _what_helps(timeline: Timeline | None) -> list[str]:
    """The best advice against the failure, not rehearsed."""
    from brim.report.failure import IN_PHASE, advice_for, failure

    failed = None if timeline is None else failure(timeline)
    if failed is None:
        return []
    where = "" if failed.phase is None else f" {IN_PHASE[failed.phase]}"
    helpful = [one for one in advice_for(failed) if one.helps][:_MOST_ADVICE]
    return [f"it runs out{where}; this helps: {one.text} {one.paste}".rstrip() for one in helpful]


def _run(request: Request, environment: Environment) -> tuple[Rehearsal, Timeline | None]:
    from brim.cli.explain.snapshot import explain_snapshot
    from brim.rehearsal.rehearse import FOLDERS, rehearse_program
    from brim.rehearsal.remedies import remedy

    with temporary_folder(FOLDERS) as folder:
        (rehearsal,) = rehearse_program(
            request, environment, folder, output=sys.stderr, on_note=lambda text: click.echo(text, err=True)
        )
        if rehearsal.fits is None:
            raise ModelError(
                f"Cannot estimate {request.target}.",
                f"The program fails: {rehearsal.message}",
                remedy(rehearsal.message) or "Correct the program, or its arguments, which go after its name.",
            )
        if not rehearsal.devices:
            raise ModelError(
                f"Cannot estimate {request.target}.",
                "The program did not use CUDA.",
                "Move its model to the GPU, or name a function that returns model and inputs: train.py:build.",
            )
        if rehearsal.snapshot is None:
            return rehearsal, None
        devices = explain_snapshot(rehearsal.snapshot, request.target, (), leaks=rehearsal.leaks)
    largest = max(rehearsal.devices, key=lambda device: device.process_bytes).device
    return rehearsal, next((device.timeline for device in devices if device.body["device"] == largest), None)


def _estimate(name: str, rehearsal: Rehearsal, timeline: Timeline | None, place: Place) -> Estimate:
    from brim.core import Category
    from brim.estimation.bounds import context_margin
    from brim.estimation.breakdown import NAMES
    from brim.estimation.estimate import Estimate, PeakBytes
    from brim.estimation.workload import Workload
    from brim.report.explain import summary

    most = max(rehearsal.devices, key=lambda group: group.process_bytes)
    peak = PeakBytes(allocated=most.allocated_bytes, reserved=most.reserved_bytes, process=most.process_bytes)
    categories = dict.fromkeys(NAMES.values(), 0)
    modules: dict[str, int] = {}
    if timeline is not None:
        peak_summary = summary(timeline, most=None)
        for group in peak_summary.by_category:
            category = NAMES[Category(group.name)] if group.name in list(Category) else "other"
            categories[category] = categories.get(category, 0) + group.bytes
        modules = {group.name: group.bytes for group in peak_summary.by_module}
    added = tuple(margin for margin in [context_margin(place)] if margin.bytes)
    decisions = filter(None, [" ".join(verdict.decisions_of(rehearsal))])
    context = f"CUDA context of {rehearsal.context_bytes:,} B: {rehearsal.context_source}"
    return Estimate(
        model=name,
        workload=Workload(),
        gpu=place.name,
        total_bytes=place.total_bytes,
        peak_bytes=peak,
        upper_bound_bytes=peak.process + sum(margin.bytes for margin in added),
        margins=added,
        at_peak_bytes=categories | {"context": rehearsal.context_bytes},
        per_module=modules,
        rounding_bytes=peak.allocated - sum(categories.values()),
        step_s=None,
        flops=None,
        not_modelled=(),
        fits=rehearsal.fits,
        leak=rehearsal.leak,
        notes=(f"program: {_REHEARSED}", _CATEGORIES, *verdict.notes_of(rehearsal), *decisions, context),
        is_program=True,
        by="rehearsal",
    )
