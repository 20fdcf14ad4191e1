"""The weights of an opened model: where each parameter's bytes are, and parameters that hold none yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.errors import ModelError
from brim.memory.checkpoint_files import TensorSource
from brim.memory.checksums import Checksum, read_manifest
from brim.memory.mapped import mapped_tensors
from brim.models.architecture import build_module
from brim.models.file_tensor import FileTensor
from brim.models.opening import OpenedModel

_PIECE_BYTES = 4 << 20  # copied from a device at once, to be verified


def open_mapped(
    directory: Path, name: str, config: Any, stored: dict[str, TensorSource], dtype: torch.dtype | None
) -> OpenedModel:
    """Open the model of ``described_by`` with its weights in memory: the pages of its files, as they are read.

    All tensors of ``stored`` must be mappable. None is a source of the model. Raises as ``open_model``.
    """
    state = mapped_tensors(stored)
    built = build_module(directory, config, stored, dtype=dtype, trust_remote_code=False, state=state)
    files = OpenedModel(
        module=built.module, sources=stored, tied={}, path=directory, name=name,
        checksums=read_manifest(directory) or {}, unexpected=built.unexpected,
    )  # fmt: skip
    if verify := verifier(files):
        for tensor_name, value in state.items():
            verify(tensor_name, value)
    return replace(files, sources={}, checksums={})


def by_parameter(opened: OpenedModel) -> dict[str, TensorSource]:
    """Sources by the name of a tensor in ``named_parameters``, which is its first name."""
    sources = {}
    for name, _ in opened.module.named_parameters():
        source = opened.sources.get(name) or opened.sources.get(opened.tied.get(name, ""))
        if source is not None:
            sources[name] = replace(source, name=name)
    return sources


def verifier(opened: OpenedModel) -> Callable[[str, torch.Tensor], None] | None:
    """A function that compares tensors with the recorded checksums; None without any."""
    known = {name: opened.checksums[opened.tied.get(name, name)] for name in opened.checksums}
    if not known:
        return None

    def verify(name: str, value: torch.Tensor) -> None:
        if name in known and _checksum(value) != known[name]:
            folder = Path(opened.sources[opened.tied.get(name, name)].extents[0].path).parent
            raise ModelError(
                f"Cannot use {name} of {opened.name}.",
                "Its bytes are not those that were written: the checksum differs.",
                f"The files in {folder} are damaged: fetch or convert the model again.",
            )

    return verify


def _checksum(value: torch.Tensor) -> int:
    """Checksum of a tensor's bytes. From a device they come in pieces, as RAM may have no room for all of them."""
    data, checksum = value.reshape(-1).view(torch.uint8), Checksum()
    for piece in data.split(data.numel() if value.device.type == "cpu" else _PIECE_BYTES):
        checksum.update(piece.cpu())
    return checksum.value()


def materialize(module: nn.Module, opened: OpenedModel) -> None:
    """Replace meta parameters by CPU parameters without memory; read buffers from the files."""
    parameters: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                # PyTorch chooses CPU kernels by this flag even under no_grad: another value gives other bits.
                parameters[id(parameter)] = nn.Parameter(_hollow(parameter), requires_grad=parameter.requires_grad)
            owner._parameters[name] = parameters[id(parameter)]
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = _read(opened.sources[_path_of(module, owner, name)])


def _hollow(parameter: torch.Tensor) -> torch.Tensor:
    if not parameter.is_meta:
        return parameter.data
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _path_of(module: nn.Module, owner: nn.Module, name: str) -> str:
    prefix = next(path for path, part in module.named_modules() if part is owner)
    return f"{prefix}.{name}" if prefix else name


def _read(source: TensorSource) -> torch.Tensor:
    tensor = FileTensor.open(source).materialize()
    assert type(tensor) is torch.Tensor
    return tensor
