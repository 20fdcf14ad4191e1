"""A model opened for training: its weights still in their files, its adapters made, its optimizer known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core.options import STORED, Method
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.models import quantization_of
from brim.models.architecture import read_config
from brim.models.opening import OpenedModel, open_model
from brim.models.prequantized import joined
from brim.models.weights import by_parameter, materialize, verifier
from brim.techniques import optimizers
from brim.techniques.lora import add_lora
from brim.techniques.streaming.weight_streaming import Weights

_RANK = 8


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """``module`` in train mode; parameters with a source in ``weights`` hold nothing until they are placed."""

    module: nn.Module
    weights: Weights
    opened: OpenedModel
    method: Method

    @property
    def base(self) -> str:
        """The base model's name that an adapter's files give."""
        return str(self.opened.path)

    @property
    def trained(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    @property
    def stay(self) -> frozenset[str]:
        """Parameters that no file has: created here, and not streamed."""
        return frozenset(n for n, _ in self.module.named_parameters() if n not in self.weights.sources)


def open_training_model(
    folder: Path, *, method: Method, precision: str, seed: int, trust_remote_code: bool = False
) -> TrainingModel:
    """Open the model in ``folder`` for training by ``method``; adapters are initialised from ``seed``.

    Weights have the type of ``weights_dtype``. A quantized base stays as it is stored; if bitsandbytes quantized it,
    its other tensors are in float32, except in pure ``bf16``, as PEFT's ``prepare_model_for_kbit_training`` has them.
    Raises ModelError for what ``open_model`` refuses or a model without a loss of its own, UnsupportedError where
    peft cannot add adapters, and for full training of quantized weights.
    """
    stored = read_config(folder, trust_remote_code=trust_remote_code).to_dict()
    dtype, quantizer, adapts = weights_dtype(method, precision), quantization_of(stored)[0], method == "lora"
    if adapts and quantizer:
        dtype = torch.float32 if quantizer == "bitsandbytes" and dtype is not torch.bfloat16 else None
    opened = open_model(
        folder, dtype=dtype, trust_remote_code=trust_remote_code, convert=dtype is not None, quantized=adapts
    )
    if not opened.module.can_generate():  # type: ignore[operator]  # a transformers model
        raise ModelError(
            f"Cannot train {opened.name} on text.",
            f"{type(opened.module).__name__} is not a language model that computes its own loss.",
            "Give a causal language model, or use brim.fit in your own loop.",
        )
    schemes = (getattr(part, "quantization_scheme", None) for part in opened.module.modules())
    if any(getattr(scheme, "input_activations", None) is not None for scheme in schemes):
        raise UnsupportedError(
            f"Cannot train adapters on {opened.name}.",
            f"Its layers round their inputs too ({opened.quantization}), and have no backward pass.",
            "Give a checkpoint of which only the weights are quantized.",
        )
    sources = by_parameter(opened)
    verify = verifier(opened)
    materialize(opened.module, opened)
    config: Any = opened.module.config
    config.use_cache = False
    if method == "full":
        weights = Weights(sources=sources, verify=verify)
        return TrainingModel(module=opened.module.train(), weights=weights, opened=opened, method=method)
    first = {id(parameter): name for name, parameter in opened.module.named_parameters()}
    module = with_adapters(opened.module, seed)
    renamed = {name: first[id(p)] for name, p in module.named_parameters() if first.get(id(p)) in sources}
    weights = Weights(
        sources={name: replace(sources[old], name=name) for name, old in renamed.items()},
        verify=None if verify is None else lambda name, value: verify(renamed[name], value),
    )
    return TrainingModel(module=module.train(), weights=weights, opened=opened, method=method)


def weights_dtype(method: Method, precision: str) -> torch.dtype | None:
    """The type of the weights, trained or not, in ``precision``; None: as stored.

    Raises UsageError for a full training in ``"stored"``.
    """
    if "bf16" in precision and "mixed" not in precision:
        return torch.bfloat16
    if (method, precision) == ("full", STORED):
        raise UsageError(
            "Cannot train all weights with --precision stored.", "It is for weights that adapters leave as they are.",
            "Add --method lora, or give another precision.",
        )  # fmt: skip
    return torch.float32 if method == "full" or precision in ("fp32", "tf32") else None


def with_adapters(module: nn.Module, seed: int) -> Any:
    """``module`` with LoRA adapters of rank 8, initialised from ``seed``."""
    config: Any = module.config
    torch.manual_seed(seed)
    with joined(module):
        return add_lora(module, type(module).__name__, model_type=config.model_type, r=_RANK, task_type="CAUSAL_LM")


def make_optimizer(name: str, module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters, by PyTorch's fused kernels, which allocate nothing."""
    options = {"fused": True} if name in optimizers.FUSED else {}
    return optimizers.make(name, [p for p in module.parameters() if p.requires_grad], lr, **options)
