"""Tensors and files that make a checkpoint a model for transformers and peft."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from brim.run.checkpoint.reading import layout_of
from brim.run.checkpoint.saver import ADAPTER, MODEL, Tensors

SHARD_BYTES = 5 * 10**9
# Files of a tokenizer; none of the patterns matches weights or code.
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


def model_tensors(
    module: torch.nn.Module,
    *,
    value: Callable[[str], torch.Tensor] | None = None,
    shard_bytes: int | None = SHARD_BYTES,
) -> Tensors:
    """All parameters and persistent buffers of ``module`` by name, tied ones once.

    value: returns a tensor by name, for modules whose weights rest elsewhere; None reads each submodule's own
    ``state_dict``, one at a time.
    """
    tensors = dict(module.named_parameters()) | dict(_persistent_buffers(module))
    layout = layout_of(tensors)
    read = value or (lambda name: _own_value(module, name))
    return Tensors(stem=MODEL, layout=layout, values=((n, read(n)) for n, _, _ in layout), shard_bytes=shard_bytes)


def model_files(module: torch.nn.Module, source: Path | None = None) -> dict[str, bytes | Path]:
    """config.json and generation_config.json of ``module`` (a transformers model) in its present state, and the
    tokenizer's files from the folder ``source``."""
    model: Any = module
    config = copy.deepcopy(model.config)
    config.architectures = [type(module).__name__]
    config.dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    files: dict[str, bytes | Path] = {"config.json": config.to_json_string(use_diff=True).encode()}
    if getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = model.generation_config.to_json_string(use_diff=True).encode()
    return files | tokenizer_files(source)


def tokenizer_files(source: Path | None) -> dict[str, bytes | Path]:
    """The tokenizer's files in the folder ``source``."""
    if source is None:
        return {}
    paths = {path for pattern in _TOKENIZER_PATTERNS for path in source.glob(pattern) if path.is_file()}
    return {path.name: path.absolute() for path in sorted(paths)}


def adapter_tensors(module: torch.nn.Module) -> Tensors:
    """The trained tensors of a peft model under their names in peft's adapter_model.safetensors.

    The values of ``adapter_tensors(module)`` are the module's own tensors: resuming reads into them.
    """
    from peft import get_peft_model_state_dict

    trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    tensors = get_peft_model_state_dict(module, state_dict=trained, save_embedding_layers=False)
    return Tensors(stem=ADAPTER, layout=layout_of(tensors), values=list(tensors.items()))


def adapter_files(module: torch.nn.Module, base: str, source: Path | None = None) -> dict[str, bytes | Path]:
    """adapter_config.json as peft writes it for an adapter of the model ``base``, and the tokenizer's files."""
    model: Any = module
    config = {key: _listed(value) for key, value in model.peft_config["default"].to_dict().items()}
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True)
    return {"adapter_config.json": text.encode()} | tokenizer_files(source)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _own_value(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Read through the part's ``state_dict``: under weight streaming a parameter may hold no value."""
    path, _, own = name.rpartition(".")
    value: torch.Tensor = module.get_submodule(path).state_dict()[own]
    return value


def _listed(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
