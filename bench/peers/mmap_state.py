"""A state dict mapped from the checkpoint and assigned: the kernel pages weights in and out."""

from __future__ import annotations

from safetensors.torch import load_file

from peers import Loaded, Setting, empty_model

TITLE = "mmapped state dict"
PACKAGE = "safetensors"
LIMITED = True
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    pass


def load(setting: Setting) -> Loaded:
    model = empty_model(setting.checkpoint)
    for file in sorted(setting.checkpoint.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False, assign=True)
    return Loaded(forward=lambda ids: model(input_ids=ids).logits, generate=model.generate)
