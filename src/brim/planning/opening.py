"""Open a model to plan generation, from its files or from its configuration alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.core.options import STORED
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.extrapolation import find_depth
from brim.estimation.hub import hub_model, is_hub_id
from brim.estimation.models import Source, quantized_by, weight_type
from brim.estimation.packed_weights import as_stored, has_equal_layers, method_of
from brim.estimation.quantization import quantize
from brim.estimation.silence import quiet
from brim.estimation.step_memory import Inputs
from brim.estimation.steps import Job as Workshop
from brim.estimation.workload import Workload
from brim.memory.checkpoint_files import Extent, TensorSource
from brim.memory.pool import PAGE_BYTES, round_up
from brim.models.opening import DTYPES, dtype_name, open_model, open_tokenizer, prepare
from brim.models.prequantized import METHODS
from brim.models.quantized import give_quantized_layers
from brim.models.weights import by_parameter, materialize
from brim.planning.factory import is_factory
from brim.planning.file import described_source
from brim.planning.inference.depth import Shallow
from brim.planning.inference.machine import capability
from brim.planning.inference.pass_seconds import is_this_machine
from brim.planning.inference.warm_up import SLACK_BYTES, most_grown, spent, warm_up
from brim.planning.request import Machine, Request
from brim.planning.subject import Subject
from brim.techniques.blocks import tensor_bytes
from brim.techniques.streaming.weight_streaming import Weights

# The assumed bytes of a process beside weights and activations on another machine: the module, tokenizer and
# libraries' scratch memory take 90 to 150 MB for models of 0.1 to 8 B on a processor; a GPU's driver takes as much
# again in host memory.
_IMAGINED_SPENT = {RAM: 256 << 20, VRAM: SLACK_BYTES[VRAM]}
# The bytes beside tensors of the planning process and of the run have differed by up to 2 MiB.
_BETWEEN_RUNS_BYTES = 4 << 20
_PRETENDED = "model.safetensors"
_LEAST_TIMED_BYTES = 64 << 20  # of weights: with smaller ones a run is over before its plans are timed


class Subjects:
    """A cache of opened models by precision, for a request and its nearest ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Subject] = {}

    def open(self, request: Request, machine: Machine, precision: str | None = None) -> Subject:
        """Open as ``open_subject`` does, or return the cached subject."""
        key = (*_key(request), precision)
        if key not in self._known:
            self._known[key] = open_subject(request, machine, precision)
        subject = self._known[key]
        return subject if subject.machine == machine else subject.on(machine)

    def of(self, request: Request) -> list[Subject]:
        """Return the subjects opened for ``request``."""
        return [subject for key, subject in self._known.items() if key[:-1] == _key(request)]


def _key(request: Request) -> tuple[object, ...]:
    """Return the cache key of a subject without its precision."""
    return (str(request.model), request.batch, request.seq, request.new_tokens)


def timed_weights(request: Request, machine: Machine) -> Path | None:
    """Return the folder of the model's weights if the fastest plans are to be timed; else None.

    They are timed on this machine, by weights that are here and not small.
    """
    if request.prefer != "speed" or request.gpu is not None or machine.assumed or is_factory(request.model):
        return None
    path = _weights_path(request.model)
    if path is None:
        return None
    folder = prepare(path) if path.is_file() else path
    weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return folder if weights_bytes >= _LEAST_TIMED_BYTES else None


def _weights_path(model: str | Path) -> Path | None:
    """Return MODEL's .gguf file, there or not, or the folder of its weights: that of a hub id is in the hub's cache.
    None if there are no weights on this machine."""
    path = Path(model).expanduser()
    if not path.exists() and is_hub_id(str(model)):
        with suppress(ModelError):  # it is described by the catalog
            known = hub_model(str(model))
            return known.folder if known.has_weights else None
    return path if path.suffix.lower() == ".gguf" or any(path.glob("*.safetensors")) else None


def open_subject(request: Request, machine: Machine, precision: str | None = None) -> Subject:
    """Open the model of ``request`` in ``precision`` (None: its own).

    A folder or .gguf file in its own precision is opened as ``brim generate`` does. Any other model is built from its
    configuration, with its weights assumed in a single file. Raises UnsupportedError for models that do not generate.
    """
    inputs = Inputs(batch=request.batch, prompt=request.seq, total=request.seq + request.new_tokens)
    path = _weights_path(request.model)
    if path is not None and (
        precision is None or (path.is_dir() and precision == _stated_precision(described_source(path)))
    ):
        opened = _opened(request, machine, inputs)
        if precision in (None, opened.precision):  # the configuration's dtype may be wrong
            return opened
    subject = described_subject(request, machine, inputs, precision)
    if subject.precision == STORED and quantized_by(source := described_source(request.model)) not in METHODS:
        method = method_of(source)[0]
        warnings.warn(f"brim generate does not run weights quantized by {method}: this predicts.", stacklevel=2)
    return subject


def _opened(request: Request, machine: Machine, inputs: Inputs) -> Subject:
    directory = prepare(request.model)
    start_bytes = machine.start_bytes()
    with torch.inference_mode(False):
        opened = open_model(directory)
        _check_generates(opened.module, opened.name, inputs)
        materialize(opened.module, opened)
    weights = Weights(sources=by_parameter(opened))
    precision = STORED if opened.quantization else dtype_name(opened.module)
    subject = Subject(
        name=opened.name,
        module=opened.module,
        precision=precision,
        own_precision=precision,
        weights=weights,
        inputs=inputs,
        machine=machine,
        host_compute=request.host_compute,
    )
    return replace(subject, spent_bytes=_spent(subject, opened, start_bytes))


def _spent(subject: Subject, opened: Any, start_bytes: int) -> Mapping[str, int]:
    """Measure a run's growth per tier before its first step, by doing the same here; assumed for other machines."""
    if not subject.is_here:
        return _IMAGINED_SPENT
    try:
        tokenizer = open_tokenizer(opened)
    except ModelError:  # ``brim generate`` will say so; ``brim.load`` needs none
        tokenizer = None
    tokens = subject.inputs.prompt * subject.inputs.batch
    warm_up(subject.module, subject.machine.hardware, tokens)
    assert subject.shape is None or subject.shape.layers  # the access leaves memory behind, which is measured too
    spent_bytes = spent(start_bytes)
    del tokenizer
    grown = most_grown("generate", subject.module, tokens, spent_bytes[RAM], subject.machine.left_bytes)
    return {**spent_bytes, RAM: grown + _BETWEEN_RUNS_BYTES}


def described_subject(request: Request, machine: Machine, inputs: Inputs, precision: str | None) -> Subject:
    """Build the model from its configuration alone."""
    source = described_source(request.model)
    stated = _stated_precision(source)
    own = STORED if quantized_by(source) else stated
    meant = precision or own
    wide = meant if meant in DTYPES else stated
    workload = Workload(
        task="generate",
        batch=inputs.batch,
        seq=inputs.prompt,
        new_tokens=inputs.total - inputs.prompt,
        precision="bf16" if wide == "fp16" else wide,
    )
    shaped = partial(
        _shaped, workload=workload, meant=meant, wide=wide, runs=is_this_machine(machine.hardware),
        capability=capability(machine.hardware),
    )  # fmt: skip
    module = shaped(source)
    _check_generates(module, source.name, inputs)
    return Subject(
        name=source.name,
        module=module,
        precision=meant,
        own_precision=own,
        weights=Weights(sources=pretended_sources(module)),
        inputs=inputs,
        machine=machine,
        host_compute=request.host_compute,
        spent_bytes=_IMAGINED_SPENT,
        shallow=_shallow(source, shaped, module),
        measures=meant != STORED,
    )


def _stated_precision(source: Source) -> str:
    stated = weight_type(source).dtype
    return next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{stated}"), "fp32")


def _shaped(
    source: Source, *, workload: Workload, meant: str, wide: str, runs: bool, capability: tuple[int, int]
) -> nn.Module:
    """Build the module in precision ``meant``, with unquantized parts in ``wide``; its parameters hold no memory.

    ``runs``: it can be called. Else, and in ``STORED``, quantized layers are those of an estimate, which need no
    package.
    """
    with quiet(), torch.device("meta"):
        module = Workshop(source, workload).module().to(DTYPES[wide]).eval().requires_grad_(False)
    if meant == STORED:
        with torch.device("meta"):
            as_stored(module, source, capability, by_brim=True)
    elif meant not in DTYPES and runs:
        give_quantized_layers(module, source.name, meant)
    elif meant not in DTYPES:
        with torch.device("meta"):
            quantize(module, meant, training=False)
    _give_shapes(module)
    return module


def _shallow(source: Source, shaped: Callable[[Source], nn.Module], module: nn.Module) -> Shallow | None:
    depth = find_depth(source, module)
    if depth is None or not has_equal_layers(source, range(depth.special, depth.layers)):
        return None
    few, more = (shaped(replace(source, config={**source.config, depth.field: depth.fewest + add})) for add in (0, 1))
    return Shallow(stack=depth, few=few, more=more)


def _give_shapes(module: nn.Module) -> None:
    """Replace meta parameters by CPU parameters without memory, as in a model before loading."""
    parameters: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                hollow = parameters.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
                owner._parameters[name] = hollow
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.zeros_like(buffer, device="cpu")


def pretended_sources(module: nn.Module) -> dict[str, TensorSource]:
    """Return the extents of weights in an assumed safetensors file, so that moves are planned as in a run."""
    sources, offset = {}, PAGE_BYTES
    for name, parameter in module.named_parameters():
        extent = Extent(path=_PRETENDED, offset=offset, bytes=tensor_bytes(parameter))
        shape = tuple(parameter.shape)
        sources[name] = TensorSource(name=name, dtype=parameter.dtype, shape=shape, extents=(extent,))
        offset = round_up(offset + extent.bytes, 64)
    return sources


def _check_generates(module: Any, name: str, inputs: Inputs) -> None:
    if not (hasattr(module, "can_generate") and module.can_generate()):
        raise UnsupportedError(
            f"Cannot plan generation with {name}.",
            f"{type(module).__name__} does not generate.",
            "Give a model that does (a causal or an encoder-decoder one).",
        )
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and inputs.total > limit:
        raise UsageError(
            f"Cannot plan {inputs.prompt} prompt tokens and {inputs.total - inputs.prompt} new ones with {name}.",
            f"It takes at most {limit} tokens.",
            "Give a smaller --seq or --new-tokens.",
        )
