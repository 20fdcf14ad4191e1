"""``brim.load`` on a GPU: damaged weights are found wherever they rest, and all lie as PyTorch aligns them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import brim
from brim import device
from brim.errors import ModelError, UnsupportedError
from brim.memory.checksums import checksum, write_manifest
from brim.memory.layout import WEIGHT_ALIGNMENT_BYTES
from brim.planning.inference.machine import machine
from brim.planning.inference.warm_up import warm_up
from support.generating import save_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20
IDS = torch.arange(24).view(2, 12)
BUDGETS = {"resident": ("1GiB", "2GiB"), "ram": ("100MiB", "2GiB"), "disk": ("100MiB", "60MiB")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with checksums whose norms are no multiple of 256 bytes."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=528, intermediate_size=1400, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=66, bos_token_id=0, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    values = load_file(folder / "model.safetensors")
    write_manifest(folder, {name: checksum(v.reshape(-1).view(torch.uint8)) for name, v in values.items()})
    return folder


@torch.no_grad()
def choices_after_a_call(folder: Path, rests: str) -> set[str]:
    vram, ram = BUDGETS[rests]
    model = brim.load(folder, vram=vram, ram=ram, device="cuda", host_compute=False)
    seen: set[int] = set()

    def look(layer: torch.nn.Module, args: object) -> None:
        seen.update(parameter.data_ptr() % WEIGHT_ALIGNMENT_BYTES for parameter in layer.parameters())

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(look)
    try:
        model(input_ids=IDS.cuda())
        assert seen == {0}
        return set(model.brim.plan.choices("weight_streaming").values())
    finally:
        model.brim.remove()


@pytest.mark.parametrize(
    ("rests", "choice"), [("resident", "resident"), ("ram", "stream:ram"), ("disk", "stream:disk")]
)
def test_damaged_weights_are_found_wherever_they_rest(saved: Path, tmp_path: Path, rests: str, choice: str) -> None:
    assert choice in choices_after_a_call(saved, rests)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    path = damaged / "model.safetensors"
    raw = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + header_bytes]).items():
        if name.endswith("mlp.up_proj.weight"):
            raw[8 + header_bytes + entry["data_offsets"][0] + 100] ^= 2
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"up_proj(.|\n)*checksum differs"):
        choices_after_a_call(damaged, rests)


@torch.no_grad()
def test_kernels_of_a_pass_are_loaded_before_memory_is_measured() -> None:
    """CUDA loads a kernel's code when it is first launched: what that takes is to be in what a program was seen to
    take."""
    try:
        rehearsed = device.loaded()
    except UnsupportedError:
        pytest.skip("only the rehearsal device tells which kernels were launched")
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=None, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
    launched = []
    for run in (lambda: warm_up(model, machine("cuda"), IDS.numel(), "cuda"), lambda: model(input_ids=IDS.cuda())):
        rehearsed.reset()
        run()
        launched.append(set(rehearsed.kernels()))
    assert launched[1] <= launched[0]
