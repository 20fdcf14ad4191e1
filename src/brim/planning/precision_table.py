"""Compare precisions (int8 or 16 bits?) by the seconds of moving and computing each kind of block.

A streamed block takes the longer of its move and its computation, so fewer bytes are faster until dequantization
takes longer than they save. A resident block takes only its computation. Seconds are measured on this machine, and
follow from rates for another one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from brim.core.hardware import RAM
from brim.planning.inference.choose import search_generation
from brim.planning.request import Form, Machine, Row
from brim.planning.solver.passes import BlockCost, move_s, ways_of
from brim.planning.subject import Subject
from brim.techniques.streaming.placement import FROM_DISK, FROM_RAM
from brim.units import format_bytes, format_seconds

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def rows_of(subjects: Sequence[Subject]) -> list[Row]:
    """Return the rows of a model opened in several precisions, for a machine."""
    machine = subjects[0].machine
    costs = {subject.precision: _costs(subject) for subject in subjects}
    rows = []
    for kind, blocks in next(iter(costs.values())).items():
        forms = {name: _form(blocks_of[kind][0], machine) for name, blocks_of in costs.items() if kind in blocks_of}
        rows.append(Row(kind=kind, count=len(blocks), forms=forms))
    return rows


def _costs(subject: Subject) -> dict[str, list[BlockCost]]:
    """Return the coarsest partition's blocks by kind, named by the path without numbers."""
    endless = dict.fromkeys(subject.machine.budget_bytes, 1 << 60)
    case = replace(subject.case, budget_bytes=endless)
    strategy = search_generation(case)
    costs: dict[str, list[BlockCost]] = {}
    for block in case.job(next(iter(strategy.cuts)), strategy.need).blocks:
        if block.uses:
            costs.setdefault(_NUMBER.sub(".*", block.name), []).append(block)
    return costs


def _form(block: BlockCost, machine: Machine) -> Form:
    hardware = machine.hardware
    choice = FROM_DISK if hardware.compute == RAM else FROM_RAM
    slowest_s = max(move_s(block, hardware, *way) for way in ways_of(choice, hardware.compute))
    return Form(bytes=block.bytes, move_s=slowest_s, compute_s=block.compute_s + block.overhead_s)


def shown(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.forms))
    table = Table(title=f"{' or '.join(names)}?", title_justify="left")
    table.add_column("block")
    table.add_column("count", justify="right")
    for name in names:
        table.add_column(f"{name}:\nbytes", justify="right")
        table.add_column("move", justify="right")
        table.add_column("compute", justify="right")
    table.add_column("better when\nstreamed")
    table.add_column("better when\nresident")
    for row in rows:
        cells = [row.kind, str(row.count)]
        for name in names:
            form = row.forms.get(name)
            told = (form.bytes, form.move_s, form.compute_s) if form else None
            cells += [format_bytes(told[0]), *map(format_seconds, told[1:])] if told else ["-"] * 3
        table.add_row(*cells, row.streamed, row.resident)
    return table
