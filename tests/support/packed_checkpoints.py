"""Small GPTQ and AWQ checkpoints, packed by gptqmodel without its calibration."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def packed(plain: Path, folder: Path, config: GPTQConfig) -> None:
    """Round each weight to the nearest, and pack it as gptqmodel's torch layers do."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model_dequant import _revert_gptq_v1_qzeros_correction

    model = AutoModelForCausalLM.from_pretrained(plain)
    largest = 2**config.bits - 1
    for name, linear in [*model.model.named_modules(prefix="model")]:
        if not isinstance(linear, torch.nn.Linear):
            continue
        kind = AwqTorchLinear if isinstance(config, AwqConfig) else TorchLinear
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        options = {"bits": config.bits, "group_size": 32, "sym": False, "desc_act": config.desc_act}
        layer = kind(**sizes, **options, bias=linear.bias is not None, register_buffers=True)
        groups = torch.arange(linear.in_features) // 32
        if config.desc_act:
            groups = groups[torch.randperm(len(groups))]
        rows = linear.float().weight.detach()[:, groups.argsort(stable=True)].unflatten(1, (-1, 32))
        least, most = rows.amin(-1), rows.amax(-1)
        scales = (most - least) / largest
        arguments = linear, scales, (-least / scales).round().clamp(1, largest), groups.int()
        if kind is AwqTorchLinear:
            layer.pack(*arguments)
        else:
            layer.pack_original(*arguments)
            if config.format == "gptq":
                layer.qzeros = _revert_gptq_v1_qzeros_correction(layer.qzeros, config.bits)
        model.set_submodule(name, layer)
    model.config.quantization_config = config
    model.save_pretrained(folder)
