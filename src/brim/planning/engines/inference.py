"""Settings of engines that run models: accelerate, llama.cpp, vLLM, diffusers."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from brim import catalog
from brim.core.hardware import DISK, RAM, VRAM
from brim.core.options import STORED
from brim.errors import UnsupportedError, UsageError
from brim.estimation.estimate import Study
from brim.estimation.models import find_model, parts_of_file, quantized_by
from brim.estimation.ranks.estimate import locked_bytes
from brim.estimation.silence import quiet
from brim.estimation.simulation import place_of
from brim.estimation.step_memory import Inputs
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.models.gguf import open_gguf
from brim.models.opening import DTYPES
from brim.planning.engines.answer import EnginePlan, check, copied, published
from brim.planning.file import described_source
from brim.planning.inference.memory import Sizes, scores_bytes
from brim.planning.opening import described_subject
from brim.planning.request import Machine
from brim.planning.subject import Subject
from brim.requests.plan import MeshRequest
from brim.techniques.blocks import tensor_bytes
from brim.techniques.experts.technique import find_experts
from brim.units import GIB, MIB, format_bytes, format_seconds

_Bytes = dict[str, dict[str, int]]  # by tier and use
_PROCESS = "{:,} B of RAM for the process and {:,} B of VRAM for its libraries, as in brim's own plans"


def _subject(request: MeshRequest, machine: Machine, engine: str) -> Subject:
    """Return the described model. Raises UsageError for files and precisions that the engine does not load."""
    asked = f"Cannot plan {request.model} for {engine}."
    if Path(request.model).suffix.lower() == ".gguf":
        raise UsageError(asked, "A .gguf file is llama.cpp's.", "Give --for llama.cpp.")
    if request.precision not in (None, *DTYPES):
        raise UsageError(asked, f"{request.precision} is brim's own.", f"Give --precision {' or '.join(DTYPES)}.")
    inputs = Inputs(batch=request.batch, prompt=request.seq, total=request.seq + request.new_tokens)
    subject = described_subject(request, machine, inputs, request.precision)
    mxfp4 = quantized_by(described_source(request.model)) == "mxfp4"
    if subject.precision == STORED and engine != "vllm" and not (engine == "llama.cpp" and mxfp4):
        raise UnsupportedError(
            asked,
            f"brim does not know how {engine} stores its packed weights.",
            "Give --for vllm, or --precision bf16.",
        )
    return subject


def _dtype(precision: str | None) -> str:
    return str(DTYPES.get(precision or "", "auto")).removeprefix("torch.")


# -- accelerate ------------------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """An entry of a device map; a call of one of its modules needs ``in_use_bytes`` at once."""

    path: str
    bytes: int
    in_use_bytes: int
    is_layer: bool


def accelerate(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield device maps, the fastest first: layers leave the GPU from the last on, to RAM and then to disk."""
    machine = check(request, machine, "accelerate", "generate", several=False, cpu=True)
    subject = _subject(request, machine, "accelerate")
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
    sizes = Sizes(
        batch=request.batch, prompt=request.seq, total=request.seq + request.new_tokens, chunk=request.seq,
        padded=request.batch > 1,
    )  # fmt: skip
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
    used[main] |= beside | ({"weights_in_use": in_use, "libraries": spent[VRAM]} if main == VRAM else {})
    names: dict[str, int | str] = {VRAM: 0, RAM: "cpu", DISK: "disk"}
    most = {tier: machine.budget_bytes[tier] - sum(used[tier].values()) + weights[tier] for tier in (main, RAM)}
    folder = ', offload_folder="offload"' if weights[DISK] else ""
    waits = [
        f"accelerate cannot copy while it computes: each pass waits for {copied(machine, tier, to, weights[tier])}."
        for tier, to in ((RAM, VRAM), (DISK, RAM))
        if weights[tier] and tier != main
    ]
    return EnginePlan(
        engine="accelerate", model=subject.name, machine=machine, bytes=used,
        settings={"max_memory": {names[tier]: count for tier, count in most.items()}},
        command=f'{type(subject.module).__name__}.from_pretrained({published(request.model)!r}, '
        f'dtype="{_dtype(request.precision)}", device_map=json.load(open("device_map.json")){folder})',
        file=json.dumps({path: names[tier] for path, tier in places.items()}, indent=2), file_name="device_map.json",
        cannot=(*waits, "accelerate cannot put a part of the KV cache into another memory than the activations."),
        assumed=(*machine.assumed, _PROCESS.format(spent[RAM], spent[VRAM])),
    )  # fmt: skip


# -- llama.cpp -------------------------------------------------------------------------------------------------------

_BUFFERS = (
    "llama.cpp's compute buffer has, of -ub tokens in float32, logits and a hidden state or a layer's intermediate "
    "results, and the largest tensor that a prompt copies from RAM; cuBLAS takes 64 MiB and operands in 16 bits. The "
    "output is the first of -ngl's layers, as in newer builds"
)
_NO_DISK = "llama.cpp cannot read from disk inside a budget: without --no-mmap the kernel decides what stays in RAM."
_CONVERTED = "the .gguf has 16 bits, or MXFP4 where the checkpoint has it, as llama.cpp's converter writes it"
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")  # LLM_FFN_EXPS_REGEX, which --n-cpu-moe uses
_INPUT, _OUTPUT, _PAGE = "token_embd.weight", "output.weight", 256  # a cache has a multiple of 256 tokens


class _Gguf(NamedTuple):
    """A model as llama.cpp loads it: bytes of tensors by name, and of a token in each layer's 16-bit cache; ``inner``
    is the widest result of a feed-forward part."""

    tensors: dict[str, int]
    cache: list[int]
    hidden: int
    inner: int
    vocabulary: int


def _of_file(path: Path) -> _Gguf:
    readers = [open_gguf(part) for part in parts_of_file(path)]
    stated = [item for reader in readers for item in reader.fields.items()]
    fields = {name.partition(".")[2]: f.contents() for name, f in stated if name[:9] != "tokenizer"}
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    if fields.get("count", 1) > len(readers):
        raise UnsupportedError(
            f"Cannot plan {path} for llama.cpp.",
            "It is one of several files, and its name does not say which, as in 00001-of-00002.gguf.",
            "Give the files their own names again.",
        )
    needed = {"embedding_length", "block_count", "feed_forward_length", "attention.head_count"}
    if not needed <= fields.keys() or _INPUT not in tensors or any(n.startswith(("ssm.", "wkv.")) for n in fields):
        raise UnsupportedError(
            f"Cannot plan {path} for llama.cpp.", "It is not a language model of attention layers."
        )
    hidden, heads = fields["embedding_length"], fields["attention.head_count"]
    width = fields.get("attention.key_length", hidden // int(np.max(heads)))
    token = 2 * (width + fields.get("attention.value_length", width))
    counts = np.broadcast_to(fields.get("attention.head_count_kv", heads), fields["block_count"])
    of_experts = fields.get("expert_used_count", 0) * fields.get("expert_feed_forward_length", 0)
    return _Gguf(
        {name: int(tensor.n_bytes) for name, tensor in tensors.items()},
        [int(token * count) for count in counts],
        hidden,
        max(of_experts, int(np.max(fields["feed_forward_length"]))),
        int(tensors[_INPUT].shape[1]),
    )


def _as_file(subject: Subject) -> _Gguf:
    """Return the model as llama.cpp's converter stores it: matrices in 16 bits, vectors and routers in float32."""
    module: Any = subject.module
    config, shape = module.config.get_text_config(), subject.shape
    numbers = {name: re.match(r"(.*?)\.(\d+)\.(.*)", name) for name, _ in module.named_parameters()}
    stacks = {match[1] for match in numbers.values() if match}
    if len(stacks) != 1 or shape is None or not (shape.only_attention and shape.planned):
        raise UnsupportedError(
            f"Cannot plan {subject.name} for llama.cpp.",
            "brim does not know how llama.cpp stores several stacks of layers, or states that are no cache.",
            "Give its .gguf file.",
        )
    experts = {name for layer in find_experts(module) for name in layer.tensors}
    ends = {id(module.get_output_embeddings().weight): _OUTPUT, id(module.get_input_embeddings().weight): _INPUT}
    tensors: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        match, is_float = numbers[name], parameter.dim() < 2 or re.search(r"\.(gate|router)\.weight$", name)
        is_packed = "_packed_" in name  # experts in MXFP4, of which each element is a byte
        group = "ffn_up_exps." if is_packed or name in experts else ""
        stored = f"blk.{match[2]}.{group}{match[3]}" if match else name
        element_bytes = 1 if is_packed else 4 if is_float else 2
        tensors[ends.get(id(parameter), stored)] = parameter.numel() * element_bytes
    most = max(layer.heads * (layer.key_dim + layer.value_dim) for _, layer in shape.planned)
    of_experts = getattr(config, "num_experts_per_tok", 0) * getattr(config, "moe_intermediate_size", 0)
    inner = max(of_experts, getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return _Gguf(tensors, [2 * most] * len(shape.layers), config.hidden_size, inner, config.vocab_size)


def llama_cpp(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield flags, the fastest first: experts leave the GPU before layers, and the cache is rounded last."""
    machine = check(request, machine, "llama.cpp", "generate", several=False, cpu=True)
    path = parts_of_file(Path(request.model).expanduser())[0]
    is_file = path.suffix.lower() == ".gguf"
    model = _of_file(path) if is_file else _as_file(_subject(request, machine, "llama.cpp"))
    every, name = len(model.cache), str(path) if is_file else f"{path.name}-16bit.gguf"
    moe = every if any(map(_EXPERTS.search, model.tensors)) else 0  # layers whose experts may be in RAM
    steps = [(every + 1, count) for count in range(moe + 1)] + [(count, moe) for count in range(every, -1, -1)]
    steps *= machine.hardware.compute == VRAM
    tokens = -(-(request.seq + request.new_tokens) // _PAGE) * _PAGE
    for kind, (layers, on_cpu) in product(("f16", "q8_0")[: 2 - request.lossless], [*steps, (0, -1)]):
        used = _sizes(model, request.batch * tokens, tokens, layers, on_cpu, 34 / 64 if kind == "q8_0" else 1.0)
        away = used[RAM]["weights"] - model.tensors[_INPUT]
        seconds = format_seconds(away / (machine.hardware.tier(RAM).bytes_per_s or math.inf))
        slow = f"the processor computes with {format_bytes(away)}, in {seconds}, or a token's share of the experts"
        yield EnginePlan(
            engine="llama.cpp", model=path.name, machine=machine, bytes=used,
            command=f"llama-server -m {shlex.quote(name)} -ngl {layers} -c {tokens * request.batch} "
            f"-np {request.batch} -b 2048 -ub 512 -fa on -ctk {kind} -ctv {kind} --no-mmap"
            + (f" --n-cpu-moe {on_cpu}" if on_cpu > 0 else " -dev none" if on_cpu < 0 else ""),
            cannot=(f"llama.cpp cannot copy weights to the GPU for each token: {slow}.", _NO_DISK)[not away :],
            assumed=(*machine.assumed, *(() if is_file else (_CONVERTED,)), _BUFFERS),
        )  # fmt: skip


def _sizes(model: _Gguf, cells: int, tokens: int, layers: int, on_cpu: int, rounding: float) -> _Bytes:
    """Return the bytes with ``layers``, the output as the last, on the GPU; ``on_cpu`` as --n-cpu-moe, -1: no GPU."""
    tensors, first, micro = model.tensors, len(model.cache) + 1 - layers, min(512, cells)
    resident = {_OUTPUT: tensors.get(_OUTPUT, tensors[_INPUT])} if layers else {}  # a copy of the input, if tied
    for name, count in tensors.items():
        number = int(match[1]) if (match := re.match(r"blk\.(\d+)\.", name)) else -1
        is_expert = number < on_cpu and _EXPERTS.search(name)
        if (number >= first and not is_expert) if match else layers and name != _INPUT:
            resident[name] = count
    away = {name: count for name, count in tensors.items() if name not in resident}
    copies = [count for name, count in away.items() if name != _INPUT or not (layers or _OUTPUT in tensors)]
    mask, operands = 6 * micro * tokens, 2 * micro * (model.vocabulary + model.inner)
    inside = 4 * micro * (6 * model.hidden + 3 * model.inner) + mask
    buffer = max(inside, 4 * micro * (model.vocabulary + model.hidden))
    used = {RAM: {
        "weights": sum(away.values()), "kv_cache": int(rounding * cells * sum(model.cache[:first])),
        "compute_buffer": mask + (buffer if copies else 0), "process": 256 * MIB,
    }}  # fmt: skip
    return used if on_cpu < 0 else used | {VRAM: {
        "weights": sum(resident.values()), "kv_cache": int(rounding * cells * sum(model.cache[first:])),
        "compute_buffer": buffer + max(copies, default=0), "libraries": 64 * MIB + operands,
    }}  # fmt: skip


# -- vLLM ------------------------------------------------------------------------------------------------------------

_GRAPHS = "vLLM's CUDA graphs take 3 GiB, the most by its own message, and its other libraries 150 MiB, its reserve"


def vllm(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield flags, the fastest first: with CUDA graphs, without, with weights in RAM, and with a cache of 8 bits."""
    machine = check(request, machine, "vllm", "generate", several=True)
    subject, room = _subject(request, machine, "vllm"), machine.budget_bytes[VRAM]
    gpus, batch, capacity_bytes = request.gpus or 1, request.batch, machine.hardware.tier(VRAM).capacity_bytes
    module, shape = cast(Any, subject.module), subject.shape
    if shape is None or not (shape.only_attention and shape.planned):
        raise UnsupportedError(
            f"Cannot plan {subject.name} for vllm.",
            "brim knows vLLM's cache of models of attention layers alone.",
            "Give another model.",
        )
    if (heads := module.config.get_text_config().num_attention_heads) % gpus:
        raise UsageError(
            f"Cannot plan {subject.name} for vllm.", f"It has {heads} heads.", "Give a divisor as --gpus."
        )
    tensors = {name: tensor_bytes(parameter) for name, parameter in module.named_parameters()}
    sizes = {name: count // gpus if count >= MIB else count for name, count in tensors.items()}
    layered = [count for name, count in sizes.items() if re.search(r"\.\d+\.", name)]  # of these vLLM moves the first
    length, width = request.seq + request.new_tokens, shape.planned[0][1].dtype.itemsize
    numbers = len(shape.layers) * max(max(1, p.heads // gpus) * (p.key_dim + p.value_dim) for _, p in shape.planned)
    cells, tokens = 16 * (batch * -(-length // 16) + 1), max(batch, min(2048, batch * length))
    one = Sizes(prompt=tokens, total=tokens + 1, chunk=tokens)
    used = {
        "weights": sum(sizes.values()), "kv_cache": cells * numbers * width, "cuda_graphs": 3 * GIB,
        "activations": subject.watch(one).step_bytes + scores_bytes(module, replace(one, batch=batch, drawn=True)),
        "libraries": 150 * MIB + (catalog.nccl_bytes(gpus) if gpus > 1 else 0),
    }  # fmt: skip
    flags = (
        f"vllm serve {shlex.quote(published(request.model))} --dtype {_dtype(subject.precision)} "
        f"--max-model-len {length} --max-num-seqs {batch} --max-num-batched-tokens {tokens} "
        f"--tensor-parallel-size {gpus}"
    )
    eager, small = {"cuda_graphs": 0}, {"cuda_graphs": 0, "kv_cache": cells * numbers}
    for changed, may_move in (({}, 0), (eager, 0), (eager, 1), (small, 1))[: 4 - request.lossless]:
        here: dict[str, int] = used | changed
        excess = min(may_move * max(0, sum(here.values()) - room), sum(layered))
        moved = min(math.ceil(excess * 100 / GIB) / 100, sum(layered) / GIB)
        here["weights"] -= int(moved * GIB)
        # Not the budget: vLLM starts only where as much is free, and the CUDA context may be larger than known.
        share = min(-(-sum(here.values()) * 1000 // capacity_bytes), room * 1000 // capacity_bytes) / 1000
        in_ram = gpus * (int(moved * GIB) + (max(layered) if moved else 0))
        slow = f"vLLM cannot choose what it moves: each pass reads {copied(machine, RAM, VRAM, int(moved * GIB))}."
        yield EnginePlan(
            engine="vllm", model=subject.name, machine=machine, gpus=gpus,
            bytes={VRAM: here, RAM: {"weights": in_ram, "process": gpus * subject.spent_bytes[RAM]}},
            command=f"{flags} --gpu-memory-utilization {share} --kv-cache-memory-bytes {here['kv_cache']}"
            + " --enforce-eager" * bool(changed)
            + f" --cpu-offload-gb {moved}" * bool(moved) + " --kv-cache-dtype fp8" * (changed is small),
            cannot=(slow, "vLLM cannot compute with a KV cache that is partly in RAM.")[not moved :],
            assumed=(*machine.assumed, _GRAPHS, _PROCESS.format(subject.spent_bytes[RAM], 0)),
        )  # fmt: skip


# -- diffusers -------------------------------------------------------------------------------------------------------

_TILING = (
    "pipe.vae.enable_tiling() decodes large images in parts, for fewer activations, which brim does not predict."
)


def diffusers(request: MeshRequest, machine: Machine) -> Iterator[EnginePlan]:
    """Yield calls, the fastest first: all models on the GPU, the one that runs, its running blocks, or its layers."""
    machine = check(request, machine, "diffusers", "generate", several=False)
    source, precision = find_model(request.model), request.precision or "fp32"
    if not source.parts or precision not in DTYPES:
        why = f"{precision} is none of {', '.join(DTYPES)}." if source.parts else "It is one model, not a pipeline."
        raise UsageError(f"Cannot plan {request.model} for diffusers.", why, "Give a pipeline's folder or hub id.")
    workload = Workload(task="generate", batch=request.batch, precision="bf16" if precision == "fp16" else precision)
    seen = Study(source, workload, place_of(machine.hardware), None, "").estimate()
    beside = seen.peak_bytes.reserved - seen.at_peak_bytes["parameters"]
    with quiet(), torch.device("meta"):
        models = [Job(part, workload).module() for part in source.parts.values()]
    sizes = [_bytes_of(model) for model in models]
    layers = [sum(map(tensor_bytes, _own(part).values())) for model in models for part in model.modules()]
    group = (
        'enable_group_offload(onload_device=torch.device("cuda"), offload_type="block_level", num_blocks_per_group='
    )
    ways = [('to("cuda")', sum(sizes)), ("enable_model_cpu_offload()", max(sizes))]
    ways += [(f"{group}1, use_stream=True)", max(_grouped(model, 1, 2) for model in models))]
    ways += [(f"{group}{count})", max(_grouped(model, count, 1) for model in models)) for count in (8, 4, 2, 1)]
    tensors = [tensor for model in models for part in model.modules() for tensor in _own(part).values()]
    locked = sum(locked_bytes(tensor_bytes(tensor)) for tensor in tensors) + max(sizes)  # beside those of a model
    copies = f"an image copies {copied(machine, RAM, VRAM, sum(sizes))} or more."
    waits = f"diffusers cannot leave a part of a model on the GPU: {copies}"
    if not all(getattr(model, "_supports_group_offloading", True) for model in models):
        ways = ways[:2]
    for call, count in [*ways, ("enable_sequential_cpu_offload()", max(layers))]:
        yield EnginePlan(
            engine="diffusers", model=source.name, machine=machine,
            bytes={
                VRAM: {"weights": count, "activations": beside},
                RAM: {"weights": locked if "use_stream" in call else sum(sizes), "process": 256 * MIB},
            },
            command=f'pipe = DiffusionPipeline.from_pretrained({published(request.model)!r}, '
            f"torch_dtype={DTYPES[precision]})\npipe.{call}",
            cannot=(waits, _TILING)[count == sum(sizes) :],
            assumed=(*machine.assumed, f"{256 * MIB:,} B of RAM for the process; {'; '.join(seen.notes)}"),
        )  # fmt: skip


def _bytes_of(module: nn.Module) -> int:
    return sum(tensor_bytes(tensor) for part in module.modules() for tensor in _own(part).values())


def _grouped(model: nn.Module, count: int, groups: int) -> int:
    """Return the bytes of ``groups`` groups of ``count`` blocks, and of what is outside of the model's own lists."""
    names = getattr(model, "_group_offload_block_modules", None) or ()
    opened = [part for name, part in model.named_children() if name in names]
    parts = [part for part in model.children() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    blocks = [[_bytes_of(block) for block in part] for part in parts if part not in opened]
    most = max((sum(each[at : at + count]) for each in blocks for at in range(len(each))), default=0)
    inside = max((_grouped(part, count, groups) for part in opened), default=0)
    rest = _bytes_of(model) - sum(map(sum, blocks)) - sum(map(_bytes_of, opened))
    return rest + max(groups * most, inside)
