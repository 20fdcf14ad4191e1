"""AirLLM: one file per layer, read before the layer runs and let go after it, the next one fetched meanwhile."""

from __future__ import annotations

import torch
from airllm import AutoModel

from peers import Loaded, Setting

TITLE = "AirLLM"
PACKAGE = "airllm"
LIMITED = True
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    load(setting)  # splits the checkpoint into files of its own where they are not there yet


def load(setting: Setting) -> Loaded:
    model = AutoModel.from_pretrained(
        str(setting.checkpoint),
        device="cpu",
        dtype=torch.float32,
        layer_shards_saving_path=str(setting.scratch),
        prefetching=True,
    )
    return Loaded(forward=lambda ids: model(ids).logits, generate=model.generate)
