"""Blocks that the CPU computes, beside a real CUDA device: the same tokens, and faster than either alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from brim.core.hardware import RAM, VRAM
from brim.model_cache import cache_input
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.streaming.placement import computable
from brim.techniques.streaming.weight_streaming import COMPUTE_RAM, FROM_RAM, Weights
from support.hybrid import compute_some_in_ram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BENCH = Path(__file__).parents[4] / "bench" / "hybrid_gpu.py"


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def fit(model, share):
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = {VRAM: size // 2, RAM: 2 * size}
    partition, plan = make_plan(model, machine("cuda"), budget, Need(step_bytes=0), Weights(), task="forward")
    plan = compute_some_in_ram(plan, partition, share)
    return put_in_force(model, partition, plan, machine("cuda"), Weights(), "cuda")


@pytest.mark.parametrize("share", [0.5, 1.0])
@torch.no_grad()
def test_logits_are_those_of_the_device_within_rounding(share):
    model, ids = llama(), torch.arange(20)[None].cuda()
    wanted = llama().cuda()(ids).logits
    handle = fit(model, share)
    able = computable(handle.partition)  # of a table only rows are looked up
    choices = {choice for block, choice in handle.plan.choices("weight_streaming").items() if block in able}
    assert COMPUTE_RAM in choices
    assert (FROM_RAM in choices) == (share < 1)
    for _ in range(3):
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-3, atol=1e-3)
    assert handle.timeline().copied_bytes(VRAM, RAM) > 0
    handle.remove()
    assert {p.device.type for p in model.parameters()} == {b.device.type for b in model.buffers()} == {"cpu"}


@torch.no_grad()
def test_a_cache_has_each_layers_part_where_the_layer_is_computed():
    model, ids = llama(), torch.arange(20)[None].cuda()
    cache = DynamicCache()
    wanted = llama().cuda()(ids, **cache_input(model, cache)).logits  # filled on the device
    handle = fit(model, 0.5)
    whole = llama().cuda()
    twin = DynamicCache()
    whole(ids, **cache_input(model, twin))
    for token in (5, 6, 7):
        step = torch.tensor([[token]]).cuda()
        mine, theirs = model(step, **cache_input(model, cache)).logits, whole(step, **cache_input(model, twin)).logits
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    computed = {name for name, choice in handle.plan.choices("weight_streaming").items() if choice == COMPUTE_RAM}
    for index, layer in enumerate(cache.layers):
        assert layer.keys.device.type == ("cpu" if f"model.layers.{index}" in computed else "cuda")
    assert wanted.isfinite().all()
    handle.remove()


@torch.no_grad()
def test_generation_gives_the_same_tokens():
    model, ids = llama(), torch.arange(20)[None].cuda()
    wanted = llama().cuda().generate(ids, max_new_tokens=8, do_sample=False)
    handle = fit(model, 0.5)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), wanted)
    handle.remove()


@pytest.mark.seconds
@pytest.mark.timeout(900)
def test_both_at_once_are_faster_than_either(tmp_path):
    """Where the CPU reads RAM at least half as fast as the link: else there is not so much to win."""
    output = tmp_path / "hybrid.jsonl"
    subprocess.run([sys.executable, str(BENCH), "--rounds", "3", "--output", str(output)], check=True)
    found = json.loads(output.read_text())
    if found["host_bytes_per_s"] < found["link_bytes_per_s"] / 2:
        pytest.skip(f"the CPU reads {found['host_bytes_per_s'] / 1e9:.0f} GB/s: too little beside the link")
    assert found["over_streaming"] >= 1.5
    assert found["over_cpu"] >= 1.2
