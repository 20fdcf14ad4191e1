"""RamTorch ``OffloadModel``: chunks stream from RAM through a window of two; activations are kept, as it is fastest.

On the CPU, which it supports for tests, streaming is a copy within RAM.
"""

from __future__ import annotations

from typing import Any

import torch
from ramtorch import OffloadModel
from torch import nn

from peers.ramtorch_nvme import _Block, _Embed, _Head
from peers.training import Batch, Outcome, Setting, looped, make_optimizer, open_model

TITLE = "RamTorch OffloadModel"
PACKAGE = "ramtorch"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    model = open_model(setting)
    parameters = dict(model.named_parameters())
    chunks: list[nn.Module] = [
        _Embed(model.model),
        *map(_Block, model.model.layers),
        _Head(model.model, model.lm_head),
    ]
    runner = OffloadModel(chunks, device="cpu", window=2, keep_activations=True)
    optimizer = make_optimizer(runner)

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return model.loss_function(logits, labels, vocab_size=model.config.vocab_size)

    def step(batch: Batch) -> torch.Tensor:
        result = runner.step(batch["input_ids"], targets=batch["labels"], loss_fn=loss_fn)
        runner.flush_grads()
        optimizer.step()
        optimizer.zero_grad()
        loss: torch.Tensor = result.loss.detach()
        return loss

    def value(name: str) -> torch.Tensor:
        found: torch.Tensor = parameters[name].detach()
        return found

    return looped(setting, step, value, facts={"stats": runner.stats}, close=runner.close)
