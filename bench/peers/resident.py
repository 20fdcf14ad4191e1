"""The reference: every weight in memory, no limit. Gives T_compute and the logits that all others must match."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peers import Loaded, Setting

TITLE = "all resident (no limit)"
PACKAGE = "transformers"
LIMITED = False
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    pass


def load(setting: Setting) -> Loaded:
    model: Any = AutoModelForCausalLM.from_pretrained(setting.checkpoint, dtype=torch.float32)
    model.eval()
    for parameter in model.parameters():  # out of any file mapping, into memory of its own
        parameter.data = parameter.data.clone()
    return Loaded(forward=lambda ids: model(input_ids=ids).logits, generate=model.generate)
