"""The request and the answer of ``brim plan``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brim import catalog
from brim.core import Hardware, Link, Plan, Tier, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.core.options import STORED
from brim.errors import UsageError
from brim.measure.capacity import FREE_SHARE, amount_bytes, free_bytes
from brim.measure.probe import probe
from brim.memory import heap
from brim.memory.scratch import scratch_folder
from brim.planning.inference.machine import budgets
from brim.planning.seconds.drives import reading_from
from brim.planning.strategy.effects import Effect
from brim.printable import Readable
from brim.requests.plan import LOSSY as LOSSY
from brim.requests.plan import PRECISIONS_OF as PRECISIONS_OF
from brim.requests.plan import Request as Request
from brim.units import format_bytes, parse_bytes

PLAN_FILE = "plan.json"  # the file's name in proposed commands
# A drive on four lanes of PCIe 3 has 3.9 GB/s at most (PCI-SIG).
_DRIVE_BYTES_PER_S = 3.2e9
_DISK_BYTES = 1 << 40
# Measured seconds of a step as shares of predicted ones: of 59 plans on a processor nine tenths were between these
# (measurements/planner_cpu.jsonl); of 44 programs on an H200 the slowest took 2.1 times (docs/accuracy.md).
_MEASURED_BLOCKS, _BY_RATES = (0.88, 1.19), (0.9, 2.1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine to plan for.

    Attributes:
        hardware: Its tiers, links and rates.
        budget_bytes: The bytes that plans may use of each tier (``"vram"``, ``"ram"``, ``"disk"``).
        assumed: The figures that were not measured, a sentence each.
        left_bytes: The bytes that measuring it has just left in this process.
    """

    hardware: Hardware
    budget_bytes: Mapping[str, int]
    assumed: tuple[str, ...] = ()
    left_bytes: int = field(default=0, compare=False)

    def start_bytes(self) -> int:
        """Return the bytes of this process without those left by measuring the machine.

        A run finds the machine measured, so its growth is counted from there.
        """
        return heap.used_resident_bytes() - self.left_bytes


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan that fits.

    Attributes:
        plan: Decisions and promise; ``brim generate --plan`` and ``brim train --plan`` run exactly this.
        step_s: Seconds of a step; when generating, of a token of each sequence.
        limited_by: The busiest resource: ``"compute"``, ``"link"``, ``"disk"`` or ``"RAM"``.
        techniques: The savings and costs of each technique.
        command: A command line that runs it.
        gap: The largest possible distance to the fastest plan, as a share of its seconds.
        proved: True if the step was traced with the plan in force.
        timed: True if ``step_s`` was measured in a short run of the plan on this machine.
        hardware: The part of the machine that it uses, if not all of it: its processor alone.
        precision: The precision, if it is not the model's own.
        frees: Further techniques that would save bytes of a tier, and their costs.
        timeline: The simulated schedule, for reports.
    """

    plan: Plan
    step_s: float
    limited_by: str
    techniques: Sequence[Effect]
    command: str
    gap: float = 0.0
    proved: bool = True
    timed: bool = False
    hardware: Hardware | None = None
    precision: str | None = None
    frees: Sequence[Effect] = ()
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": dict(self.plan.promise.peak_bytes),
            "step_s": self.step_s,
            "limited_by": self.limited_by,
            "techniques": [effect.to_json() for effect in self.techniques],
            "frees": [effect.to_json() for effect in self.frees],
            "command": self.command,
            "gap": self.gap,
            "proved": self.proved,
            "timed": self.timed,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kind of block in a precision, per token's pass."""

    bytes: int
    move_s: float
    compute_s: float

    @property
    def streamed_s(self) -> float:
        """Seconds in the steady state, where moves overlap with computation."""
        return max(self.move_s, self.compute_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``count`` blocks of a ``kind`` in each precision; ``streamed`` and ``resident`` name the faster one."""

    kind: str
    count: int
    forms: Mapping[str, Form]

    @property
    def streamed(self) -> str:
        return min(self.forms, key=lambda name: self.forms[name].streamed_s)

    @property
    def resident(self) -> str:
        return min(self.forms, key=lambda name: self.forms[name].compute_s)

    def to_json(self) -> dict[str, Any]:
        forms = {name: vars(form) for name, form in self.forms.items()}
        return {**vars(self), "forms": forms, "streamed": self.streamed, "resident": self.resident}


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A change under which the request fits.

    Attributes:
        change: The change in words.
        command: The changed command line.
    """

    change: str
    command: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer(Readable):
    """The answer of ``brim.plan``.

    Attributes:
        request: The request.
        machine: The machine to plan for.
        precision: The precision of plans that name no other, and its origin.
        proposals: The plans that fit, the best first; empty if none does.
        needs_bytes: If nothing fits: the least bytes of each tier that would.
        nearest: If nothing fits: changes under which something would.
        refusal: If nothing fits: the reason in words.
        took_s: Seconds that the answer took.
        precisions: Each kind of block in several precisions, if fewer bits were considered or requested.
    """

    request: Request
    machine: Machine
    proposals: Sequence[Proposal]
    needs_bytes: Mapping[str, int] = field(default_factory=dict)
    nearest: Sequence[Nearest] = ()
    refusal: str = ""
    took_s: float = 0.0
    precisions: Sequence[Row] = ()
    precision: tuple[str, str] = ("", "")

    _PRINTER = "brim.cli.plan.command:print_answer"

    @property
    def title(self) -> str:
        """The model, the task and the machine."""
        return f"{self.request.model}: {self.request.task} on {self.machine.hardware.name}"

    def tokens_per_s(self, proposal: Proposal) -> float:
        """Return the tokens per second of ``proposal`` (a step generates one for each sequence)."""
        request = self.request
        tokens = request.batch * (request.seq if request.task == "train" else 1)
        return tokens / proposal.step_s if proposal.step_s else 0.0

    def interval_s(self, proposal: Proposal) -> tuple[float, float]:
        """Return the least and the most seconds of a step of ``proposal``: equal where its plan was timed."""
        is_here = self.request.gpu is None and not self.machine.assumed and self.machine.hardware.compute == RAM
        blocks_timed = is_here and (self.request.task == "generate" or self.precision[0] in ("fp32", STORED))
        low, high = (1.0, 1.0) if proposal.timed else _MEASURED_BLOCKS if blocks_timed else _BY_RATES
        return low * proposal.step_s, high * proposal.step_s

    def to_json(self) -> dict[str, Any]:
        """Return the answer as ``brim plan --json`` prints it."""
        infeasible = None
        if not self.proposals:
            nearest = [{"change": n.change, "command": n.command} for n in self.nearest]
            infeasible = {"why": self.refusal, "needs_bytes": dict(self.needs_bytes), "nearest": nearest}
        return {
            "model": str(self.request.model),
            "task": self.request.task,
            "hardware": self.machine.hardware.name,
            "budget_bytes": dict(self.machine.budget_bytes),
            "precision": self.precision[0],
            "precision_origin": self.precision[1],
            "assumed": list(self.machine.assumed),
            "plans": [
                p.to_json() | {"tokens_per_s": self.tokens_per_s(p), "interval_s": [*self.interval_s(p)]}
                for p in self.proposals
            ],
            "infeasible": infeasible,
            "precisions": [row.to_json() for row in self.precisions],
            "took_s": self.took_s,
        }


def machine_of(request: Request) -> Machine:
    """Return the machine to plan for, with a budget for every tier.

    Without a GPU's name it is this one. Where this one has no CUDA and VRAM was given, the smallest GPU of the
    catalog with as much is assumed.
    """
    if request.gpu is None and request.vram is None:
        return _this(request)
    if request.gpu is None:
        here = probe()
        if here.compute == VRAM:
            return _this(request)
    return _imagined(request, _card(request))


def ram_option(machine: Machine, budget_bytes: int) -> int:
    """Return the value of ``--ram`` for a budget: the budget itself on this machine, all RAM of another one."""
    return math.ceil(budget_bytes / FREE_SHARE) if machine.assumed else budget_bytes


def _this(request: Request) -> Machine:
    before_bytes = heap.used_resident_bytes()
    hardware = probe()
    if request.task == "generate":  # a training streams from files that it writes itself
        hardware = reading_from(hardware, Path(request.model))
    left_bytes = max(0, heap.used_resident_bytes() - before_bytes)
    budget = budgets(hardware, request.vram, request.ram)
    if request.disk is not None:
        budget[DISK] = amount_bytes(request.disk, DISK, directory=scratch_folder())
    elif request.task == "train":  # for states on disk
        budget[DISK] = int(free_bytes(DISK, directory=scratch_folder()) * FREE_SHARE)
    return Machine(hardware=hardware, budget_bytes=budget, left_bytes=left_bytes)


def _card(request: Request) -> catalog.Gpu:
    if request.gpu is not None:
        return catalog.gpu(request.gpu)
    assert request.vram is not None
    vram_bytes = parse_bytes(request.vram)
    cards = [catalog.gpu(name) for name in catalog.gpu_names()]
    fitting = [card for card in cards if card.capacity_bytes >= vram_bytes * 0.97 and card.pcie_bytes_per_s]
    if not fitting:
        raise UsageError(f"{format_bytes(vram_bytes)} of VRAM were given.", "No GPU of the catalog has that much.")
    return min(fitting, key=lambda card: (card.capacity_bytes, "Laptop" in card.name, card.name))


def host_assumed(host: catalog.Host, gpus: int, *, ram: str | int | None, ram_gb_per_s: float | None) -> list[str]:
    """Return a sentence on the assumed figures of RAM beside ``gpus`` GPUs and their origin, if there are any."""
    parts = [] if ram is not None else [f"{format_bytes(host.ram_of(gpus))} of RAM"]
    parts += [] if ram_gb_per_s is not None else [f"a RAM rate of {host.rate_of(gpus) / 1e9:.0f} GB/s"]
    if not parts:
        return []
    machine = "a typical desktop" if host.gpus is None else f"{gpus} of the {host.gpus} GPUs of {host.name}"
    if host.gpus == 1:
        machine = host.name
    options = " and ".join(
        name for name, given in (("--ram", ram), ("--ram-gb-per-s", ram_gb_per_s)) if given is None
    )
    return [f"{' and '.join(parts)}, as for {machine} (change with {options})"]


def _imagined(request: Request, card: catalog.Gpu) -> Machine:
    host = catalog.host_of(card)
    ram = host.ram_of(1) if request.ram is None else parse_bytes(request.ram)
    rate = host.rate_of(1) if request.ram_gb_per_s is None else request.ram_gb_per_s * 1e9
    disk = _DISK_BYTES if request.disk is None else parse_bytes(request.disk)
    if not host.link_bytes_per_s:
        raise UsageError(f"Cannot plan for {card.name}.", "The rate of its link to the host is not known.")
    base = card.hardware(ram_bytes=ram, ram_bytes_per_s=rate, link_bytes_per_s=host.link_bytes_per_s)
    links = tuple(Link(source=a, target=b, bytes_per_s=_DRIVE_BYTES_PER_S) for a, b in ((DISK, RAM), (RAM, DISK)))
    hardware = replace(base, tiers=(*base.tiers, Tier(name=DISK, capacity_bytes=disk)), links=(*base.links, *links))
    free = card.capacity_bytes - card.context().bytes - (ram if card.shares_ram else 0)
    if free <= 0:
        raise UsageError(
            f"{format_bytes(ram)} of RAM were given.",
            f"{card.name} computes in the same memory, of {format_bytes(card.capacity_bytes)}.",
            "Give less.",
        )
    vram = free if request.vram is None else min(free, parse_bytes(request.vram, card.capacity_bytes))
    assumed = [
        *([] if request.gpu is not None else [f"the GPU is as fast as {card.name}"]),
        *[f"all free VRAM, {format_bytes(free)}: --vram is not less"] * (request.vram is not None and vram == free),
        *host_assumed(host, 1, ram=request.ram, ram_gb_per_s=request.ram_gb_per_s),
        f"the drive moves {_DRIVE_BYTES_PER_S / 1e9:.1f} GB/s",
        *([] if request.disk is not None else [f"{format_bytes(_DISK_BYTES)} of disk"]),
    ]
    budget = {VRAM: vram, RAM: int(ram * FREE_SHARE), DISK: disk}
    return Machine(hardware=hardware, budget_bytes=budget, assumed=tuple(assumed))
