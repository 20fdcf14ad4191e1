"""Predict the bytes that PyTorch reserves on a GPU in calls of a fitted model, and plan within the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from brim.core import EventKind, Hardware, Timeline, Trace
from brim.core.hardware import VRAM
from brim.errors import UnsupportedError, first_line
from brim.estimation.simulation import simulate
from brim.estimation.step_memory import watch_example
from brim.memory.tiers import fake_memory
from brim.model_inputs import map_tensors
from brim.planning.inference.choosing import InferenceCase, Need, Placed, within_reserved
from brim.planning.inference.example_shapes import on_host, without_values
from brim.planning.inference.machine import capability
from brim.planning.proof import ENDLESS_BYTES
from brim.predict.tracer import trace
from brim.techniques.blocks import tensor_bytes
from brim.techniques.dry_run import call_with
from brim.techniques.meta_copy import meta_copy
from brim.techniques.streaming.weight_streaming import Weights
from brim.techniques.weights import place_weights
from brim.units import parse_bytes

_CUDA = torch.device("cuda")


def forward_need(
    model: nn.Module,
    budget: Mapping[str, int],
    hardware: Hardware,
    example: Mapping[str, Any] | Sequence[Any] | None,
    activations: str | int | None,
) -> Need:
    """Return a forward pass's need on ``example``; without it, ``activations``, or an eighth of the budget."""
    seen = None if example is None else watch_example(model, example)
    if activations is not None:
        step_bytes = parse_bytes(activations)
    else:
        step_bytes = budget[hardware.compute] // 8 if seen is None else seen.step_bytes
    return Need(step_bytes=step_bytes, observation=seen, tokens=1 if example is None else _tokens(example))


def search_forward(
    model: nn.Module, hardware: Hardware, budget: Mapping[str, int], need: Need, inputs: Any, device: str
) -> Placed:
    """Return the fastest placement of ``model`` whose call stays within ``budget``.

    On a GPU the budget covers all bytes that PyTorch reserves, cuBLAS's workspace and unused parts of segments
    included. So the plan is applied to a copy without values, too, which is called with ``inputs`` (None: a step
    takes the bytes of ``need``). Raises BudgetError with the smallest budget.
    """
    case = InferenceCase(
        name=type(model).__name__, module=model, weights=Weights(), hardware=hardware, budget_bytes=budget
    )
    cuts = case.cuts(need)
    if not _is_reserved(hardware, device):
        return case.place(need, cuts)

    def reserved(placed: Placed, _: int) -> int:
        def put_in_force(copy: nn.Module) -> nn.Module:
            memory = fake_memory(
                Timeline(case.name, measured=False), compute_tier=VRAM, compute_bytes=ENDLESS_BYTES,
                ram_bytes=ENDLESS_BYTES, device=_CUDA,
            )  # fmt: skip
            return place_weights(copy, placed.partition, placed.plan, memory, Weights()).model

        return _reserved_bytes(model, put_in_force, hardware, need.step_bytes, inputs)

    return within_reserved(
        case, lambda tight: replace(case, budget_bytes=tight).place(need, cuts), reserved, exact=True
    )


def _is_reserved(hardware: Hardware, device: str) -> bool:
    """True if PyTorch's CUDA allocator manages the compute tier."""
    return hardware.compute == VRAM and device != "emulated"


def untouched_bytes(model: nn.Module, hardware: Hardware, step_bytes: int, inputs: Any, device: str) -> int:
    """Bytes of the compute tier that the unplanned model takes, with all of its weights there."""
    if not _is_reserved(hardware, device):
        return step_bytes + sum(tensor_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    return _reserved_bytes(model, lambda copy: copy.to(_CUDA), hardware, step_bytes, inputs)


def _reserved_bytes(
    model: nn.Module, prepare: Callable[[nn.Module], nn.Module], hardware: Hardware, step_bytes: int, inputs: Any
) -> int:
    """Return the peak of the bytes that PyTorch's allocator reserves while a prepared copy of ``model`` runs.

    Bytes that ``model`` itself has there before are freed first, and not counted. Raises UnsupportedError for a model
    that cannot be copied.
    """
    example = on_host(inputs)

    def build() -> Callable[[], None]:
        prepared = prepare(_copy_of(model))
        hollow = None if example is None else without_values(example)
        on_gpu = map_tensors(hollow, lambda tensor: tensor.to(_CUDA))
        last: list[Any] = []

        def step() -> None:  # as ``out = model(x)`` in a loop: the last output is freed after the next is made
            again = map_tensors(on_gpu, lambda tensor: tensor)  # new containers: a call writes to a cache among them
            last[:] = [_step(prepared, again, step_bytes)]

        return step

    two_steps = trace(build, steps=2, capability=capability(hardware))
    return _peak_bytes(two_steps, simulate(two_steps))


def _copy_of(model: nn.Module) -> nn.Module:
    absent = {name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"}
    try:
        return meta_copy(model, absent=absent, device=_CUDA)
    except (TypeError, RuntimeError) as error:  # raised by deepcopy for locks, handles and tensors with a history
        raise UnsupportedError(
            f"Cannot predict the GPU memory of {type(model).__name__}.",
            f"It cannot be copied: {first_line(error)}",
            "Remove objects that copy.deepcopy cannot copy from the module.",
        ) from error


def _tokens(example: Mapping[str, Any] | Sequence[Any]) -> int:
    """Rows that a step multiplies weights by: positions of the largest integer input, else its batch."""
    values = example.values() if isinstance(example, Mapping) else example
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    integers = [t.numel() for t in tensors if not t.is_floating_point()]
    return max(integers or [t.shape[0] for t in tensors if t.dim()] or [1])


@torch.no_grad()
def _step(model: nn.Module, inputs: Any, step_bytes: int) -> Any:
    if inputs is not None:
        return call_with(model, inputs)
    activations = torch.empty(step_bytes, dtype=torch.uint8, device=_CUDA)
    matrix = torch.ones(1, 1, device=_CUDA)
    matrix @ matrix  # cuBLAS allocates its workspace at the first product
    del activations
    return None


def _peak_bytes(trace: Trace, timeline: Timeline) -> int:
    """The peak of reserved bytes from the first step of ``trace`` on."""
    begins = {storage.id for storage in trace.storages if storage.born >= trace.step_starts[0]}
    reserved = peak = 0
    stepping = False
    for event in timeline:
        if event.kind is EventKind.SEGMENT_ALLOC:
            reserved += event.bytes
        elif event.kind is EventKind.SEGMENT_FREE:
            reserved -= event.bytes
        stepping |= event.kind is EventKind.ALLOC and event.storage in begins
        peak = max(peak, reserved) if stepping else reserved
    return peak
