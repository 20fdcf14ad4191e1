"""peft as it was for the recorded runs (0.19, July 2026), and without values where these take no memory.

Each replacement names what differs; everything else is the installed peft.

* OSF multiplied a layer's weight together from its decomposition in every pass and kept both halves of that; since
  then it adds a product of narrow matrices to the layer's result.
* UniLoRA scales by how often each index was drawn, and WaveFT leaves out positions beyond a matrix's edge, of which
  there are none: a trace has no values, and which they are changes no size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from peft.tuners.osf.layer import Linear as OSFLinear
from peft.tuners.osf.layer import OSFLayer
from peft.tuners.unilora.model import UniLoraModel
from peft.tuners.waveft.layer import WaveFTLayer
from torch.nn import functional

_osf_update = OSFLayer.update_layer
_waveft_update = WaveFTLayer.update_layer


@contextmanager
def peft_0_19() -> Iterator[None]:
    with mock.patch.object(OSFLayer, "update_layer", _decomposed), \
         mock.patch.object(OSFLinear, "forward", _multiplied), \
         mock.patch.object(UniLoraModel, "_assign_unilora_indices_and_scales", _scaled), \
         mock.patch.object(WaveFTLayer, "update_layer", _placed):  # fmt: skip
        yield


def _decomposed(layer: Any, adapter: str, effective_rank: int, **options: Any) -> None:
    _osf_update(layer, adapter, effective_rank, **options)
    weight = layer.get_base_layer().weight
    for kept in (layer._osf_U_low_init, layer._osf_S_low_init, layer._osf_V_low_init):
        del kept[adapter]
    layer._osf_U_high[adapter] = weight.new_empty(layer.out_features, effective_rank)
    layer._osf_V_high[adapter] = weight.new_empty(effective_rank, layer.in_features)
    layer._osf_S_high = weight.new_empty(effective_rank)


def _multiplied(layer: Any, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    (adapter,) = layer.active_adapters
    low = layer.osf_svd_params[adapter]
    high_part = (layer._osf_U_high[adapter] * layer._osf_S_high.unsqueeze(0)) @ layer._osf_V_high[adapter]
    low_part = (low["U_low"] * low["S_low"].unsqueeze(0)) @ low["V_low"]
    return functional.linear(source, high_part + low_part, layer.get_base_layer().bias)


def _scaled(model: Any, adapter: str) -> None:
    for layer in model._iter_unilora_layers():
        shapes = (indices[adapter].shape for indices in (layer.unilora_indices_A, layer.unilora_indices_B))
        layer.update_scaling(adapter, *(torch.empty(shape) for shape in shapes))


def _placed(layer: Any, adapter: str, n_frequency: int, **options: Any) -> None:
    _waveft_update(layer, adapter, n_frequency, **options)
    places = torch.arange(n_frequency)
    layer.waveft_indices[adapter] = torch.stack([places % layer.out_features, places % layer.in_features])
