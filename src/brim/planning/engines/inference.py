"""Settings of engines that run models: accelerate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.estimation.step_memory import Inputs
from brim.estimation.workload import STORED
from brim.models.opening import DTYPES
from brim.planning.engines.answer import EnginePlan, check, copied, published
from brim.planning.inference.memory import Sizes
from brim.planning.opening import described_subject
from brim.planning.request import Machine
from brim.planning.subject import Subject
from brim.requests.plan import MeshRequest
from brim.techniques.blocks import tensor_bytes

_PROCESS = "{:,} B of RAM for the process and {:,} B of VRAM for its libraries, as in brim's own plans"


def _subject(request: MeshRequest, machine: Machine, engine: str) -> Subject:
    """Return the described model. Raises UsageError for files and precisions that the engine does not load."""
    asked = f"Cannot plan {request.model} for {engine}."
    if Path(request.model).suffix.lower() == ".gguf":
        raise UsageError(asked, "A .gguf file is llama.cpp's.", "Give --for llama.cpp.")
    if request.precision not in (None, *DTYPES):
        raise UsageError(asked, f"{request.precision} is brim's own.", f"Give --precision {' or '.join(DTYPES)}.")
    inputs = Inputs(batch=request.batch, prompt=request.seq, total=request.seq + request.new_tokens)
    return described_subject(request, machine, inputs, request.precision)


# -- accelerate ------------------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """An entry of a device map; a call of one of its modules needs ``in_use_bytes`` at once."""

    path: str
    bytes: int
    in_use_bytes: int
    is_layer: bool


def accelerate(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield device maps, the fastest first: layers leave the GPU from the last on, to RAM and then to disk."""
    check(request, machine, "accelerate", "generate", several=False, cpu=True)
    subject = _subject(request, machine, "accelerate")
    if subject.precision == STORED:
        asked, why = f"Cannot plan {subject.name} for accelerate.", "transformers itself places packed weights."
        raise UnsupportedError(asked, why, "Give --precision bf16 for the unpacked model, or --for vllm.")
    beside, units = _beside(request, subject), _units(subject.module)
    rest, layers = ([unit.path for unit in units if unit.is_layer is is_layer] for is_layer in (False, True))
    for first in range(len(layers), -1, -1):
        yield _mapped(request, subject, beside, units, {*rest, *layers[:first]})
    if machine.hardware.compute == VRAM:
        yield _mapped(request, subject, beside, units, set())


def _units(module: nn.Module) -> list[_Unit]:
    """Return the entries of a device map in the model's order; a layer shares no tensor with another entry."""
    undivided = set(getattr(module, "_no_split_modules", None) or ())

    def walk(path: str, part: nn.Module) -> Iterator[tuple[str, list[list[torch.Tensor]]]]:
        if type(part).__name__ in undivided or not any(True for _ in part.children()):
            yield path, [list(_own(each).values()) for each in part.modules()]
            return
        for name, tensor in _own(part).items():
            yield f"{path}.{name}".removeprefix("."), [[tensor]]
        for name, child in part.named_children():
            yield from walk(f"{path}.{name}".removeprefix("."), child)

    entries = [(path, groups) for path, groups in walk("", module) if any(groups)]
    uses = Counter(key for _, groups in entries for key in {id(tensor) for group in groups for tensor in group})
    units, seen = [], set[int]()
    for path, groups in entries:
        tensors = {id(tensor): tensor for group in groups for tensor in group}
        is_numbered = any(part.isdecimal() for part in path.split("."))
        units.append(_Unit(
            path=path, bytes=sum(tensor_bytes(tensors[key]) for key in tensors.keys() - seen),
            in_use_bytes=max(sum(map(tensor_bytes, group)) for group in groups),
            is_layer=is_numbered and all(uses[key] == 1 for key in tensors),
        ))  # fmt: skip
        seen |= tensors.keys()
    return units


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _beside(request: MeshRequest, subject: Subject) -> dict[str, int]:
    """Return the bytes beside weights of a generation by transformers, whose cache grows by copies of a layer's."""
    total, padded = request.seq + request.new_tokens, request.batch > 1
    sizes = Sizes(batch=request.batch, prompt=request.seq, total=total, chunk=request.seq, padded=padded)
    activations, shape, cached = subject.watch(sizes).step_bytes, subject.shape, sizes.cached * request.batch
    joined = max((layer.joined_bytes for _, layer in shape.planned), default=0) if shape else 0
    kv_cache = shape.token_bytes * cached if shape else 0  # without a shape it is among the activations
    return {"kv_cache": kv_cache, "activations": activations + joined * cached}


def _mapped(
    request: MeshRequest, subject: Subject, beside: dict[str, int], units: Sequence[_Unit], resident: Collection[str]
) -> EnginePlan:
    """Return the plan that has ``resident`` where the model computes, and the others in RAM while they fit."""
    machine, spent, main = subject.machine, subject.spent_bytes, subject.machine.hardware.compute
    in_use = max((unit.in_use_bytes for unit in units if unit.path not in resident), default=0)
    room, places = machine.budget_bytes[RAM] - spent[RAM] - in_use if main == VRAM else 0, {}
    weights = dict.fromkeys((main, RAM, DISK), 0)
    for unit in units:
        room -= 0 if unit.path in resident else unit.bytes
        places[unit.path] = main if unit.path in resident else RAM if room >= 0 else DISK
        weights[places[unit.path]] += unit.bytes
    used = {tier: {"weights": count} for tier, count in weights.items()}
    used[RAM] |= {"process": spent[RAM], "weights_in_use": in_use if weights[DISK] else 0}
    used[main] |= beside
    if main == VRAM:
        used[VRAM] |= {"weights_in_use": in_use, "libraries": spent[VRAM]}
    names: dict[str, int | str] = {VRAM: 0, RAM: "cpu", DISK: "disk"}
    most = {tier: machine.budget_bytes[tier] - sum(used[tier].values()) + weights[tier] for tier in (main, RAM)}
    dtype = "auto" if request.precision is None else str(DTYPES[request.precision]).removeprefix("torch.")
    folder = ', offload_folder="offload"' if weights[DISK] else ""
    waits = [
        f"accelerate cannot copy while it computes: each pass waits for {copied(machine, tier, to, weights[tier])}."
        for tier, to in ((RAM, VRAM), (DISK, RAM))
        if weights[tier] and tier != main
    ]
    return EnginePlan(
        engine="accelerate", model=subject.name, machine=machine, bytes=used,
        settings={"max_memory": {names[tier]: count for tier, count in most.items()}},
        command=f'{type(subject.module).__name__}.from_pretrained("{published(request.model)}", dtype="{dtype}", '
        f'device_map=json.load(open("device_map.json")){folder})',
        file=json.dumps({path: names[tier] for path, tier in places.items()}, indent=2), file_name="device_map.json",
        cannot=(*waits, "accelerate cannot put a part of the KV cache into another memory than the activations."),
        assumed=(*machine.assumed, _PROCESS.format(spent[RAM], spent[VRAM])),
    )  # fmt: skip
