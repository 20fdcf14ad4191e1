"""torchao's ``CPUOffloadOptimizer``: states and the step on the CPU, gradients copied there during backward."""

from __future__ import annotations

import torch

from peers.training import LR, Outcome, Setting, looped, open_model, usual_step, values_of

TITLE = "torchao CPUOffloadOptimizer"
PACKAGE = "torchao"
LOSSLESS = True


def run(setting: Setting) -> Outcome:
    if not torch.cuda.is_available():
        raise SystemExit("CPUOffloadOptimizer moves gradients between a CUDA device and the CPU: there is none here.")
    from torchao.optim import CPUOffloadOptimizer

    model = open_model(setting).cuda()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    step = usual_step(model, optimizer)
    return looped(setting, lambda batch: step({k: v.cuda() for k, v in batch.items()}), values_of(model))
