"""A Llama-shaped checkpoint of many gigabytes in bfloat16, at the speed that the disk takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import _gpu_model as models
from _checkpoint import Shape, write_tokenizer

_SHARD_BYTES = 10**9
_INDEX = "model.safetensors.index.json"


def write_bf16(folder: Path, shape: Shape) -> int:
    """Write it where it is not there yet, a shard in memory at a time; returns its weights' bytes."""
    index = folder / _INDEX
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        model = models.empty_model(shape)
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
        write_tokenizer(folder)
        _write_shards(folder, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    pattern = models.make_pattern()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number:05d}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in names}
        for name, tensor in tensors.items():
            models.fill(name, tensor, pattern)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(document))  # last: its presence says that all is there


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if names and held + size > _SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names
