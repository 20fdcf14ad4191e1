"""What a checkpoint holds beside weights: first version of the signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from brim.memory.checkpoint_writing import Layout
from brim.run.checkpoint import Tensors


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy (legacy), torch and each CUDA device, as JSON values."""
    raise NotImplementedError


def restore_rng(state: Mapping[str, Any]) -> None:
    raise NotImplementedError


def optimizer_numbers(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """Class, param_groups and the states that are no tensors, as JSON. ``names``: parameter -> name."""
    raise NotImplementedError


def optimizer_layout(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[Layout]:
    """Every state tensor, named ``PARAMETER.KEY`` (``model.norm.weight.exp_avg``)."""
    raise NotImplementedError


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    raise NotImplementedError


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    numbers: Mapping[str, Any],
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Bit for bit what was saved. Raises ModelError for another optimizer, naming the first difference."""
    raise NotImplementedError


def model_files(module: torch.nn.Module, source: Path | None) -> dict[str, bytes | Path]:
    """config.json, generation_config.json of ``module`` as it is now, and the tokenizer's files beside ``source``."""
    raise NotImplementedError


def adapter_tensors(module: torch.nn.Module, adapter: str = "default") -> tuple[Tensors, dict[str, bytes | Path]]:
    """``adapter_model.safetensors`` and adapter_config.json as peft's save_pretrained would write them."""
    raise NotImplementedError
