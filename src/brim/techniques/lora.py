"""LoRA adapters (Hu et al., arXiv 2106.09685), as PEFT makes them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from brim.errors import UnsupportedError


def add_lora(
    module: nn.Module,
    name: str,
    *,
    model_type: str,
    targets: str | list[str] | None = None,
    layers: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    **settings: Any,
) -> Any:
    """Add adapters to the layers of ``module`` that PEFT names for ``model_type``, else to every linear layer.

    Args:
        module: The model; its parameters no longer train afterwards.
        name: The model's name in errors.
        model_type: As in the model's configuration.
        targets: Other layers: last parts of their names, or ``"all-linear"``.
        layers: PEFT's kind of layer for kinds that it does not know.
        settings: Other settings of PEFT's ``LoraConfig``.

    Raises:
        UnsupportedError: PEFT cannot add adapters to it.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    if targets is None and model_type not in KNOWN:
        targets = "all-linear"
    config = LoraConfig(target_modules=targets, **settings)
    if layers:
        config._register_custom_module(dict(layers))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            return get_peft_model(module, config)
    except ValueError as error:
        raise UnsupportedError(
            f"Cannot add LoRA to {name}.", f"PEFT refuses: {' '.join(str(error).split())}"
        ) from error
