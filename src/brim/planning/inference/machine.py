"""Prepare the machine, budgets and memory pools for fitting a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast, get_args

import torch
from torch import nn

from brim import accelerator, catalog
from brim.core import Hardware, Link, Plan, Tier, Timeline
from brim.core.hardware import RAM, VRAM
from brim.core.options import Device as Device
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.measure.capacity import FREE_SHARE, check_room, device_free_bytes, free_bytes, ram_room_bytes
from brim.measure.probe import probe
from brim.memory.mapped import has_storage
from brim.memory.tiers import Memory, cpu_memory, device_memory, emulated_memory, fake_memory
from brim.techniques.blocks import Partition
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from brim.techniques.weights import place_weights
from brim.units import format_bytes, parse_bytes


@contextlib.contextmanager
def on(device: str, model: nn.Module | None = None) -> Iterator[Device]:
    """Make the accelerator ``device`` (``"cuda:1"``), or else the one that ``model`` is on, the current device while
    the context is open, for measuring, planning and allocating. Yields the device without its number.

    Raises UsageError for an unknown device, and for a model on several devices; UnsupportedError for an accelerator
    that is not present, or has no streams to move weights on.
    """
    kind, colon, number = device.partition(":")
    kinds = accelerator.kinds()
    if kind not in (*kinds, *get_args(Device)) or (colon and (kind not in kinds or not number.isdecimal())):
        names = ", ".join(dict.fromkeys((*get_args(Device), *kinds)))
        raise UsageError(
            f"There is no device {device!r}.", f"Devices are {names}, and cuda:NUMBER for one of several."
        )
    index = int(number) if colon else None
    if index is None and kind in ("auto", *kinds) and model is not None:
        devices = {p.device for p in model.parameters() if p.device.type in ((kind,) if kind != "auto" else kinds)}
        if len(devices) > 1:
            raise UsageError(
                f"Cannot fit {type(model).__name__}.",
                f"It is on several devices: {', '.join(sorted(map(str, devices)))}.",
                "Move it to one of them, or to the CPU, first.",
            )
        for where in devices:
            kind, index = where.type, where.index
    here = computing(kind)
    if here is None or index is None:
        yield cast(Device, kind)
        return
    if index >= here.count():
        count, name = here.count(), accelerator.NAMES.get(kind, kind)
        raise UsageError(f"Cannot use device {device!r}.", f"PyTorch sees {count} {name} devices.")
    with accelerator.of(torch.device(kind, index)).current():
        yield cast(Device, kind)


def computing(device: str) -> accelerator.Accelerator | None:
    """The accelerator for ``device`` (without a number); None if the processor computes.

    Raises UnsupportedError if it is not present, or has a single queue for all its work (MPS): brim moves weights
    while it computes. "cuda" without CUDA is left to the probe, which reports what is missing.
    """
    if device in ("cpu", "emulated"):
        return None
    kind = accelerator.CUDA if device == "auto" else device
    here = accelerator.available(kind)
    if kind == accelerator.CUDA:
        return here
    name = accelerator.NAMES.get(kind, kind)
    if here is None:
        raise UnsupportedError(
            f"Cannot use device {device!r}.",
            f"PyTorch {torch.__version__} sees no {name} on this machine.",
            f"Use device auto or cpu, or install a build of PyTorch for {name}.",
        )
    if not here.has_streams:
        raise UnsupportedError(
            f"Cannot use device {device!r}.",
            f"brim copies data while the device computes, and PyTorch's backend for {name} has a single queue for "
            f"both. brim can only measure its memory and rates (brim.probe(device={kind!r})).",
            "Use device cpu.",
        )
    probed = torch.empty(0, device=here.device)
    if not torch._has_compatible_shallow_copy_type(torch.empty(0), probed):
        raise UnsupportedError(
            f"Cannot use device {device!r}.",
            f"brim places the data of parameters on the device while they are used, and PyTorch's backend for {name} "
            f"does not allow that for parameters that were created on the CPU.",
            "Use device cpu.",
        )
    return here


def machine(device: Device) -> Hardware:
    """The hardware of ``device``, measured now or earlier."""
    if device != "emulated":
        return probe(device=device)
    return emulated_hardware(probe(device="cpu"))


def capability(hardware: Hardware) -> tuple[int, int]:
    """Compute capability of the GPU: the driver's if the GPU is present, else the catalog's; 8.0 without a GPU."""
    # Imported late, for GPUs that are not present: a command that generates starts sooner without the predictor.
    from brim.estimation.simulation import capability_of, place_of

    if torch.cuda.is_available() and torch.cuda.get_device_name() == hardware.name:
        return torch.cuda.get_device_capability()
    return capability_of(place_of(hardware if hardware.compute == VRAM else None))


def has_cuda(hardware: Hardware) -> bool:
    """Return whether ``hardware`` is a GPU with CUDA or ROCm: the one present, or one of the catalog."""
    if hardware.compute == VRAM and hardware.name in catalog.gpu_names():
        return catalog.gpu(hardware.name).vendor in ("nvidia", "amd")
    return hardware.compute == VRAM and torch.cuda.is_available() and torch.cuda.get_device_name() == hardware.name


def emulated_hardware(measured: Hardware) -> Hardware:
    """This machine with a part of its RAM as VRAM."""
    ram = measured.tier(RAM)
    copy = measured.link(RAM, RAM)
    return replace(
        measured,
        name=f"{measured.name}, VRAM emulated",
        compute=VRAM,
        tiers=(Tier(name=VRAM, capacity_bytes=ram.capacity_bytes, bytes_per_s=ram.bytes_per_s), *measured.tiers),
        links=(
            *measured.links,
            Link(source=RAM, target=VRAM, bytes_per_s=copy.bytes_per_s),
            Link(source=VRAM, target=RAM, bytes_per_s=copy.bytes_per_s),
        ),
    )


_LEAST_STATE_BYTES = 128  # of a token: a layer of width 64 with two bytes per number


def refuse_batch(batch: int, seq: int, ram_bytes: int, *, labels: bool = True) -> None:
    """Raise BudgetError if the tokens of a step (and their ``labels``), or the least states of a sequence in any
    model, exceed RAM: opening or predicting such a step would run out of memory, or not end."""
    bytes = max((1 + labels) * torch.int64.itemsize * batch, _LEAST_STATE_BYTES) * seq
    if bytes > ram_bytes:
        raise BudgetError(
            f"--batch {batch} --seq {seq} were given, with {format_bytes(ram_bytes)} of RAM.",
            f"A step's tokens{' and labels' * labels}, or one sequence's hidden states in a layer, take at least "
            f"{format_bytes(bytes)}.",
            "Give a larger --ram, or a smaller --batch or --seq.",
            smallest_bytes={RAM: bytes},
        )


def budgets(
    hardware: Hardware,
    vram: str | int | None,
    ram: str | int | None,
    device: str = "auto",
    owners: Sequence[nn.Module | torch.optim.Optimizer] = (),
) -> dict[str, int]:
    """The budget of every tier that compute or weights use: as given, else nine tenths of the free memory.

    A budget covers everything of its ``owners``, so what they hold already counts as free. ``"80%"`` is a share of
    the tier's capacity, used or not: the same budget at every start.
    If RAM is the compute tier, ``vram`` is a budget for it too: the smaller of the two holds.
    """
    given = {RAM: ram, VRAM: vram}
    if hardware.compute == RAM:
        capacity_bytes = hardware.tier(RAM).capacity_bytes
        amounts = [parse_bytes(value, capacity_bytes) for value in (vram, ram) if value is not None]
        budget = {RAM: min(amounts) if amounts else int(free_bytes(RAM) * FREE_SHARE)}
    else:
        on = computing(device)
        free = {RAM: free_bytes(RAM)}
        held_bytes = 0 if on is None else _held_bytes(owners, torch.device(on.type, on.index))
        free[VRAM] = held_bytes + (free[RAM] if on is None else device_free_bytes(on))
        if on is not None and on.shares_ram():
            capacity_bytes = hardware.tier(VRAM).capacity_bytes
            on_gpu = int(free[VRAM] * (1 - catalog.HOST_SHARE)) if vram is None else parse_bytes(vram, capacity_bytes)
            host_bytes = max(free[VRAM] - on_gpu, 0) if ram is None else parse_bytes(ram, capacity_bytes)
            free = {RAM: min(free[RAM], host_bytes), VRAM: max(free[VRAM] - host_bytes, 0)}
        budget = {
            tier: int(free[tier] * FREE_SHARE)
            if value is None
            else parse_bytes(value, hardware.tier(tier).capacity_bytes)
            for tier, value in given.items()
        }
    for tier, amount in budget.items():
        if amount > hardware.tier(tier).capacity_bytes:
            raise UsageError(
                f"A budget of {format_bytes(amount)} of {tier.upper()} was given.",
                f"This machine has only {format_bytes(hardware.tier(tier).capacity_bytes)}.",
                "Give that or less.",
            )
    check_room(budget[RAM], _held_bytes(owners, torch.device("cpu")))
    return budget


def within_room(budget_bytes: Mapping[str, int], *, given: bool) -> dict[str, int]:
    """The budget at the start of a run, after libraries were loaded: checked if it was ``given``, else limited to the
    free memory. Raises UsageError as ``check_room``."""
    if given:
        check_room(budget_bytes.get(RAM, 0))
        return dict(budget_bytes)
    most_bytes = int(ram_room_bytes() * FREE_SHARE)
    return {tier: min(count, most_bytes) if tier == RAM else count for tier, count in budget_bytes.items()}


def held_to(budget_bytes: Mapping[str, int], device: str) -> Callable[[], AbstractContextManager[None]]:
    """A context that limits what PyTorch's allocator adds on ``device`` from now on to the budget of VRAM.

    The limit covers tensors, workspaces and unused blocks of the allocator. It is for runs that own the process:
    allocations of other code would be limited as well.
    """
    here = computing(device)
    if here is None or VRAM not in budget_bytes:
        return contextlib.nullcontext
    return functools.partial(here.limited, here.allocated_bytes() + budget_bytes[VRAM])


def _held_bytes(owners: Iterable[nn.Module | torch.optim.Optimizer], device: torch.device) -> int:
    """Bytes that models, their gradients and optimizers' states hold on ``device`` now."""
    tensors: list[torch.Tensor] = []
    for owner in owners:
        if isinstance(owner, nn.Module):
            tensors += [*owner.parameters(), *owner.buffers()]
            tensors += [p.grad for p in owner.parameters() if p.grad is not None]
        else:
            tensors += [v for state in owner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    on_device = [t.untyped_storage() for t in tensors if t.device == device and has_storage(t)]
    return sum({storage._cdata: storage.nbytes() for storage in on_device}.values())


def put_in_force(
    model: nn.Module,
    partition: Partition,
    plan: Plan,
    hardware: Hardware,
    weights: Weights,
    device: str,
    *,
    training: bool = False,
) -> WeightStreaming:
    """Apply ``plan`` with real memory."""
    timeline = Timeline(f"{plan.model} {plan.task}", measured=True)
    memory = make_memory(plan, hardware, device, timeline)
    return place_weights(model, partition, plan, memory, weights, training=training)


def make_memory(plan: Plan, hardware: Hardware, device: str, timeline: Timeline) -> Memory:
    """Empty pools for ``plan``."""
    budget = plan.budget_bytes
    if hardware.compute == RAM:
        return cpu_memory(timeline, ram_bytes=budget[RAM])
    if device == "emulated":
        return emulated_memory(timeline, vram_bytes=budget[VRAM], ram_bytes=budget[RAM])
    on = computing(device)
    assert on is not None, "the plan computes in VRAM"
    current = torch.device(on.type, on.index)
    return device_memory(timeline, vram_bytes=budget[VRAM], ram_bytes=budget[RAM], device=current)


def predict(
    model: nn.Module,
    partition: Partition,
    plan: Plan,
    hardware: Hardware,
    weights: Weights,
    *,
    training: bool = False,
) -> WeightStreaming:
    """Apply ``plan`` with fake memory: the handle's timeline is the prediction of a run. Call the model to
    continue."""
    timeline = Timeline(f"{plan.model} {plan.task}", measured=False)
    memory = fake_memory(
        timeline,
        compute_tier=hardware.compute,
        compute_bytes=plan.budget_bytes[hardware.compute],
        ram_bytes=plan.budget_bytes[RAM],
    )
    return place_weights(model, partition, plan, memory, weights, training=training)
