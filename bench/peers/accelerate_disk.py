"""``accelerate.disk_offload``: a weight is a memory-mapped file, read at each use (accelerate/big_modeling.py)."""

from __future__ import annotations

import torch
from accelerate import disk_offload

from peers import Loaded, Setting, empty_model

TITLE = "accelerate.disk_offload"
PACKAGE = "accelerate"
LIMITED = True
CONVERTS_IN_LOAD = False


def prepare(setting: Setting) -> None:
    """Its folder of one ``.dat`` file per weight; found there, it is used again."""
    from accelerate.utils.offload import offload_weight, save_offload_index
    from safetensors import safe_open

    if (setting.scratch / "index.json").exists():
        return
    setting.scratch.mkdir(parents=True, exist_ok=True)
    index: dict[str, object] = {}
    for file in sorted(setting.checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                offload_weight(shard.get_tensor(name), name, str(setting.scratch), index)
    save_offload_index(index, str(setting.scratch))


def load(setting: Setting) -> Loaded:
    model = empty_model(setting.checkpoint)
    disk_offload(model, str(setting.scratch), execution_device=torch.device("cpu"))
    return Loaded(forward=lambda ids: model(input_ids=ids).logits, generate=model.generate)
