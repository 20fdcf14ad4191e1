"""``brim estimate train.py``: by a rehearsal where a CUDA build of PyTorch is at hand, else by a trace."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.processes import temporary_folder

if TYPE_CHECKING:
    from brim.core.timeline import Timeline
    from brim.estimation.estimate import Estimate
    from brim.estimation.simulation import Place
    from brim.rehearsal.environment import Environment
    from brim.rehearsal.rehearse import Rehearsal, Request

REHEARSAL, TRACE = "rehearsal", "trace"
_ENDLESS_BYTES = 1 << 42  # to tell what a program takes that does not fit
_REHEARSED = (
    "rehearsed: run as it is by PyTorch's CUDA build on a GPU that is not there, until memory grew no more; what "
    "comes later is not in it"
)
_CATEGORIES = "categories and modules are inferred from the stacks of allocations"


def environment_for(by: str | None, place: Place) -> tuple[Environment | None, str]:
    """The CUDA build to rehearse with, ready to use; None and the reason where the program is to be traced.

    ``by``: ``rehearsal``, ``trace`` or None, whichever can be. Raises UsageError and UnsupportedError where a
    rehearsal was asked for and cannot be.
    """
    if by == TRACE:
        return None, "--by trace was given"
    try:
        return _environment(place), ""
    except (UnsupportedError, UsageError) as error:
        if by == REHEARSAL:
            raise
        return None, error.found.rstrip(".")


def _environment(place: Place) -> Environment:
    from brim import catalog
    from brim.rehearsal import values_library
    from brim.rehearsal.environment import find
    from brim.rehearsal.settings import DeviceSettings

    if place.name not in catalog.gpu_names():
        raise UsageError("A rehearsal was asked for.", "No GPU of the catalog is named.", "Name one with --gpu.")
    settings = DeviceSettings.of(place.name, memory_bytes=place.total_bytes)
    found = find()
    if found is None:
        raise UsageError(
            "A rehearsal was asked for.",
            "There is no CUDA build of PyTorch.",
            f"`brim rehearse --gpu {place.name!r} ...` fetches one.",
        )
    if not values_library.is_built(found.site_packages):
        click.echo("Building the device for this PyTorch, once: half a minute.", err=True)
    values_library.built(found.site_packages)
    found.variables(settings)
    return found


def rehearsed(
    model: str, arguments: tuple[str, ...], place: Place, alloc_conf: str, environment: Environment
) -> tuple[Estimate, Timeline | None]:
    """What the program takes, rehearsed, and what memory did on this GPU (None: the program did not use it).

    Of a program that does not fit, the estimate is of a GPU with memory without end, as a trace's is.
    Raises ModelError where the program fails.
    """
    from brim.rehearsal.rehearse import Request

    request = Request(
        target=model, arguments=arguments, gpu=place.name, memory_bytes=place.total_bytes, alloc_conf=alloc_conf
    )
    found, here = _run(request, environment)
    if found.fits:
        return _estimate(Path(model).name, found, here, place), here
    endless, whole = _run(replace(request, memory_bytes=_ENDLESS_BYTES), environment)
    made = _estimate(Path(model).name, endless, whole, place)
    return replace(made, fits=False, out_of_memory=found.message), here


def _run(request: Request, environment: Environment) -> tuple[Rehearsal, Timeline | None]:
    from brim.cli.explain.snapshot import explain_snapshot
    from brim.rehearsal.rehearse import FOLDERS, rehearse_program

    with temporary_folder(FOLDERS) as folder:
        (found,) = rehearse_program(request, environment, folder, output=sys.stderr)
        if found.fits is None:
            raise ModelError(
                f"{request.target} was rehearsed as python runs it.",
                f"It fails: {found.message}",
                "Correct the program, or its arguments, which go after --; or estimate it with --by trace.",
            )
        if found.snapshot is None or not found.devices:
            return found, None
        devices = explain_snapshot(found.snapshot, request.target, ())
    largest = max(found.devices, key=lambda one: one.process_bytes).device
    return found, next((one.timeline for one in devices if one.body["device"] == largest), None)


def _estimate(name: str, found: Rehearsal, timeline: Timeline | None, place: Place) -> Estimate:
    from brim.cli.rehearse import notes_of
    from brim.core import Category
    from brim.estimation.bounds import context_margin
    from brim.estimation.breakdown import NAMES
    from brim.estimation.estimate import Estimate, PeakBytes
    from brim.estimation.workload import Workload
    from brim.report.explain import summary

    largest = max(found.devices, key=lambda one: one.process_bytes, default=None)
    peak = PeakBytes(allocated=0, reserved=0, process=found.context_bytes)
    categories = dict.fromkeys(NAMES.values(), 0)
    modules: dict[str, int] = {}
    if largest is not None:
        peak = PeakBytes(
            allocated=largest.allocated_bytes, reserved=largest.reserved_bytes, process=largest.process_bytes
        )
    if timeline is not None:
        held = summary(timeline, most=None)
        for one in held.by_category:
            name = NAMES[Category(one.name)] if one.name in list(Category) else "other"
            categories[name] = categories.get(name, 0) + one.bytes
        modules = {one.name: one.bytes for one in held.by_module}
    added = tuple(margin for margin in [context_margin(place)] if margin.bytes)
    context = f"CUDA context of {found.context_bytes:,} B: {found.context_source}"
    return Estimate(
        model=name,
        workload=Workload(),
        gpu=place.name,
        peak_bytes=peak,
        upper_bound_bytes=peak.process + sum(margin.bytes for margin in added),
        margins=added,
        at_peak_bytes=categories | {"context": found.context_bytes},
        per_module=modules,
        rounding_bytes=peak.allocated - sum(categories.values()),
        step_s=None,
        flops=None,
        not_modelled=(),
        fits=True,
        notes=(f"program: {_REHEARSED}", _CATEGORIES, *notes_of(found), context),
        is_program=True,
        by=REHEARSAL,
    )
