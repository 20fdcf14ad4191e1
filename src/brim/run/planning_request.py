"""What a user asks of ``brim plan``, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from brim import catalog
from brim.core import Hardware, Link, Plan, Tier
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UsageError
from brim.measure.probe import probe
from brim.run.fitting import budgets
from brim.run.trainee import Method
from brim.techniques.optimizers import OPTIMIZERS
from brim.techniques.precision import PRECISIONS
from brim.units import format_bytes, parse_bytes

TASKS = ("generate", "train")

# A host that nobody measured. One socket with two channels of DDR4-3200 reads at 51.2 GB/s at most (JEDEC JESD79-4);
# four fifths of it are usual. A drive on four lanes of PCIe 3 has 3.9 GB/s at most (PCI-SIG).
_HOST_BYTES_PER_S = 40e9
_DRIVE_BYTES_PER_S = 3.2e9
_RAM_BYTES, _DISK_BYTES = 64 << 30, 1 << 40
_FREE_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question. Amounts are bytes or such as ``"8GiB"``; ``gpu`` is a name of the catalog, None is this machine.

    ``seq`` are tokens of a training sequence, or of the prompt; ``lossless`` keeps to the precision asked for.
    """

    model: str | Path
    task: str = "generate"
    gpu: str | None = None
    vram: str | int | None = None
    ram: str | int | None = None
    disk: str | int | None = None
    batch: int = 1
    seq: int = 1024
    new_tokens: int = 128
    precision: str | None = None
    optimizer: str = "adamw"
    method: Method = "full"
    top: int = 5

    def check(self) -> None:
        """Raise UsageError for what cannot be meant."""
        for option, value, known in (
            ("--task", self.task, TASKS),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--method", self.method, ("full", "lora")),
            ("--precision", self.precision or "fp32", PRECISIONS),
        ):
            if value not in known:
                raise UsageError(f"{option} {value} was given.", f"Known are {', '.join(known)}.")
        for option, number in (("--batch", self.batch), ("--seq", self.seq), ("--top", self.top)):
            if number < 1:
                raise UsageError(f"{option} {number} was given.", "It must be 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is planned for. ``assumed`` says which of its figures nobody measured."""

    hardware: Hardware
    budget_bytes: Mapping[str, int]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One technique in a plan: what it does, the bytes that it saves per tier (negative: takes), and its seconds."""

    technique: str
    what: str
    saves_bytes: Mapping[str, int] = field(default_factory=dict)
    costs_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan that was proved: the step was traced with it in force. ``gap`` is how far from the best it may be."""

    plan: Plan
    step_s: float
    limited_by: str
    techniques: Sequence[Effect]
    command: str
    gap: float = 0.0
    proved: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": dict(self.plan.promise.peak_bytes),
            "step_s": self.step_s,
            "limited_by": self.limited_by,
            "techniques": [
                {
                    "technique": e.technique,
                    "what": e.what,
                    "saves_bytes": dict(e.saves_bytes),
                    "costs_s": e.costs_s,
                }
                for e in self.techniques
            ],
            "command": self.command,
            "gap": self.gap,
            "proved": self.proved,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A change under which it fits, and the command that has it."""

    change: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Ranked proposals; where nothing fits, ``needs_bytes`` per tier and the ``nearest`` requests that do."""

    request: Request
    machine: Machine
    proposals: Sequence[Proposal]
    needs_bytes: Mapping[str, int] = field(default_factory=dict)
    nearest: Sequence[Nearest] = ()

    def to_json(self) -> dict[str, Any]:
        infeasible = None
        if not self.proposals:
            found = [{"change": n.change, "command": n.command} for n in self.nearest]
            infeasible = {"needs_bytes": dict(self.needs_bytes), "nearest": found}
        return {
            "model": str(self.request.model),
            "task": self.request.task,
            "hardware": self.machine.hardware.name,
            "budget_bytes": dict(self.machine.budget_bytes),
            "assumed": list(self.machine.assumed),
            "plans": [proposal.to_json() for proposal in self.proposals],
            "infeasible": infeasible,
        }


def machine_of(request: Request) -> Machine:
    """The machine that is meant, with a budget for every tier.

    Without a GPU's name it is this one. Where this one has no CUDA and VRAM was given, the smallest GPU of the
    catalog that has as much stands for the one that is meant.
    """
    if request.gpu is None and request.vram is None:
        return _this(request)
    if request.gpu is None:
        here = probe()
        if here.compute == VRAM:
            return _this(request)
    return _imagined(request, _card(request))


def _this(request: Request) -> Machine:
    hardware = probe()
    budget = budgets(hardware, request.vram, request.ram)
    if request.disk is not None:
        budget[DISK] = parse_bytes(request.disk)
    return Machine(hardware=hardware, budget_bytes=budget)


def _card(request: Request) -> catalog.Gpu:
    if request.gpu is not None:
        return catalog.gpu(request.gpu)
    assert request.vram is not None
    wanted = parse_bytes(request.vram)
    cards = [catalog.gpu(name) for name in catalog.gpu_names()]
    fitting = [card for card in cards if card.capacity_bytes >= wanted * 0.97 and card.pcie_bytes_per_s]
    if not fitting:
        raise UsageError(f"{format_bytes(wanted)} of VRAM were given.", "No GPU of the catalog has as much.")
    return min(fitting, key=lambda card: (card.capacity_bytes, card.name))


def _imagined(request: Request, card: catalog.Gpu) -> Machine:
    ram = _RAM_BYTES if request.ram is None else parse_bytes(request.ram)
    disk = _DISK_BYTES if request.disk is None else parse_bytes(request.disk)
    if not card.pcie_bytes_per_s:
        raise UsageError(f"A plan for {card.name} was asked for.", "The rate of its link to the host is not known.")
    base = card.hardware(ram_bytes=ram, ram_bytes_per_s=_HOST_BYTES_PER_S)
    links = tuple(Link(source=a, target=b, bytes_per_s=_DRIVE_BYTES_PER_S) for a, b in ((DISK, RAM), (RAM, DISK)))
    hardware = replace(base, tiers=(*base.tiers, Tier(name=DISK, capacity_bytes=disk)), links=(*base.links, *links))
    free = card.capacity_bytes - card.context().bytes
    vram = free if request.vram is None else min(free, parse_bytes(request.vram))
    assumed = [
        f"RAM moves {_HOST_BYTES_PER_S / 1e9:.0f} GB/s, the drive {_DRIVE_BYTES_PER_S / 1e9:.1f} GB/s",
        *([] if request.gpu is not None else [f"the GPU is as fast as {card.name}"]),
        *([] if request.ram is not None else [f"{format_bytes(_RAM_BYTES)} of RAM"]),
        *([] if request.disk is not None else [f"{format_bytes(_DISK_BYTES)} of disk"]),
    ]
    budget = {VRAM: vram, RAM: int(ram * _FREE_SHARE), DISK: disk}
    return Machine(hardware=hardware, budget_bytes=budget, assumed=tuple(assumed))
