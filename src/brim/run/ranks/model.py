"""A rank's part of a model: its stages, cut from the model, filled from the files and sharded, and its optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from brim.core.options import Method
from brim.errors import UnsupportedError
from brim.estimation.ranks.balance import stages_of
from brim.estimation.ranks.split import Split, check_context, check_experts, check_sizes, sizes_of
from brim.memory.checkpoint_files import TensorSource
from brim.models.file_tensor import FileTensor
from brim.models.training_model import TrainingModel, open_training_model
from brim.techniques import optimizers
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.parallel import context_parallel, pipeline, sharding
from brim.techniques.parallel.parallelize import parallelize
from brim.techniques.parallel.tensor_parts import check_parts, has_transposed
from brim.techniques.streaming.weight_streaming import Weights

COMPUTES = {"bf16-mixed": torch.bfloat16}  # compute type of a precision where it differs from the weights'


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A stage of the model on this rank, number ``index`` of ``of``. ``names``: its parameters' names in the
    model."""

    module: pipeline.Stage
    handle: sharding.Sharded
    names: Mapping[str, str]
    index: int
    of: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank's stages and optimizer. ``hidden`` and ``dtype``: width and type of the tensors between stages.
    ``tied_weight``: a weight that another stage has too."""

    chunks: Sequence[Chunk]
    optimizer: torch.optim.Optimizer
    hidden: int
    dtype: torch.dtype
    tied_weight: pipeline.TiedWeight | None = None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the full model, tied ones once."""
        parameters: dict[str, nn.Parameter] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                parameters.setdefault(chunk.names[name], parameter)
        return parameters


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings by which every rank builds its part."""

    folder: Path
    split: Split
    precision: str
    optimizer: str
    lr: float
    sequence: int
    checkpointing: str | None = None
    seed: int = 0
    trust_remote_code: bool = False
    method: Method = "full"


def open_whole(recipe: Recipe) -> TrainingModel:
    """The model with its weights still in their files. Raises as ``open_training_model`` does."""
    return open_training_model(
        recipe.folder, method=recipe.method, precision=recipe.precision, seed=recipe.seed,
        trust_remote_code=recipe.trust_remote_code,
    )  # fmt: skip


def check(training_model: TrainingModel, recipe: Recipe) -> None:
    """Raise UsageError for sizes that do not divide, UnsupportedError for models that cannot be split."""
    if training_model.opened.quantization:
        raise UnsupportedError(
            f"Cannot train {training_model.opened.name} over ranks.",
            f"Its weights are quantized ({training_model.opened.quantization}): that trains on one device.",
        )
    split, config = recipe.split, training_model.module.config
    check_sizes(split, sizes_of(config, recipe.sequence))
    check_experts(split)
    check_context(split)
    layers = (training_model.module.get_submodule(path) for path in checkpointing.blocks(training_model.module))
    check_parts(layers, split.tp, type(training_model.module).__name__)
    if split.tp > 1 and has_transposed(training_model.module):
        raise UnsupportedError(
            f"Cannot use --tp {split.tp} with {type(training_model.module).__name__}.",
            "Queries, keys and values are one matrix, and a rank's part of it cannot be read from a checkpoint.",
            "Split it by --zero or --pp.",
        )


def build(recipe: Recipe, mesh: DeviceMesh, device: torch.device, first: TrainingModel) -> Part:
    """Build this rank's part, filled and sharded over ``mesh`` (axes ``pp``, ``shard`` and ``tp``).

    ``first`` is the full model from ``open_whole``; it is opened again for each further chunk of this rank. Raises
    ModelError for files that are damaged.
    """
    split = recipe.split
    layers = stages_of(
        split, first.module.config, sequence=recipe.sequence, checkpointing=recipe.checkpointing
    )  # fmt: skip
    parts = pipeline.parts(layers)
    stage = mesh["pp"].get_local_rank()
    table = pipeline.tied_table(first.module) if split.pp > 1 else None
    tied = next((name for name, p in first.module.named_parameters() if p is table), None)
    indices = range(stage, len(parts), split.pp)
    context = context_parallel.mesh_of(split.cp, device.type, split.tp)
    chunks = []
    for index in indices:
        training_model = first if index == stage else open_whole(recipe)
        chunk = _chunk(
            training_model, parts[index], recipe, mesh, device, context=context, index=index, of=len(parts)
        )
        chunks.append(chunk)
    trained = [p for chunk in chunks for p in chunk.module.parameters() if p.requires_grad]
    optimizer = optimizers.make(recipe.optimizer, trained, recipe.lr)
    sharding.group_by_mesh(optimizer, offload=split.offload_shards)
    weights = next(parameter.dtype for parameter in trained)
    config: Any = first.module.config
    return Part(
        chunks=chunks, optimizer=optimizer, hidden=int(config.hidden_size),
        dtype=COMPUTES.get(recipe.precision, weights), tied_weight=_tied_weight(chunks, tied, mesh),
    )  # fmt: skip


def _tied_weight(chunks: Sequence[Chunk], tied: str | None, mesh: DeviceMesh) -> pipeline.TiedWeight | None:
    """The copy of a tied table on this rank, if it is the first of its pipeline or the last."""
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            if chunk.names[name] == tied and tied is not None:
                group = mesh.get_group("pp")
                peer = dist.get_global_rank(group, mesh["pp"].size() - 1 if chunk.module.part.embeds else 0)
                return pipeline.TiedWeight(parameter, functools.partial(_exchange, peer=peer, group=group))
    return None


def _exchange(own: torch.Tensor, other: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    transfers = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def _chunk(
    training_model: TrainingModel, part: pipeline.Part, recipe: Recipe, mesh: DeviceMesh, device: torch.device, *,
    context: DeviceMesh | None, index: int, of: int,
) -> Chunk:  # fmt: skip
    names = {id(parameter): name for name, parameter in training_model.module.named_parameters()}
    stage = pipeline.cut(training_model.module, part)
    full_names = {name: names[id(parameter)] for name, parameter in stage.named_parameters(remove_duplicate=False)}
    handle = parallelize(
        stage, mesh, recipe.split, dtype=COMPUTES.get(recipe.precision), checkpointed=recipe.checkpointing,
        context=context, fill=Filler(training_model.weights, names, device),
    )  # fmt: skip
    own_shares(stage)
    move_buffers(stage, device)
    return Chunk(module=stage, handle=handle, names=full_names, index=index, of=of)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


@dataclass(eq=False)
class Filler:
    """Reads the parameters of a part from the files, once each. ``names``: id of a parameter -> name in the model."""

    _weights: Weights
    _names: Mapping[int, str]
    _device: torch.device
    _done: set[int] = field(default_factory=set)

    def __call__(self, part: nn.Module, without: Sequence[nn.Module]) -> None:
        left_out = {id(module) for root in without for module in root.modules()}
        for module in part.modules():
            if id(module) in left_out:
                continue
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in self._done:
                    self._done.add(id(parameter))
                    parameter.data = self._value(self._names[id(parameter)], parameter).to(self._device)

    def _value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        source: TensorSource | None = self._weights.sources.get(name)
        if source is None:
            return parameter.data
        value = FileTensor.open(source).materialize()
        verify: Callable[[str, torch.Tensor], None] | None = self._weights.verify
        if verify is not None:
            verify(name, value)
        return value.to(parameter.dtype)


def own_shares(stage: nn.Module) -> None:
    """Copy local shards that are views, which would keep the full tensors alive."""
    for parameter in stage.parameters():
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        if local.untyped_storage().nbytes() > local.numel() * local.itemsize and isinstance(parameter.data, DTensor):
            parameter.data._local_tensor = local.clone()
