"""transformers ``device_map="auto"``: what fits the CPU's share stays, the rest is read at each use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peers import Loaded, Setting

TITLE = 'transformers device_map="auto"'
PACKAGE = "transformers"
LIMITED = True
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    pass


def load(setting: Setting) -> Loaded:
    # It keeps room for its largest offloaded layer within ``max_memory`` by itself.
    model: Any = AutoModelForCausalLM.from_pretrained(
        setting.checkpoint,
        dtype=torch.float32,
        device_map="auto",
        max_memory={"cpu": setting.budget_bytes},
        offload_folder=str(setting.scratch),
    )
    model.eval()
    return Loaded(forward=lambda ids: model(input_ids=ids).logits, generate=model.generate)
