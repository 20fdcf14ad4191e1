"""Shards in page-locked RAM beside real GPUs: what a CPU plays in tests/null/run/ranks/test_distributed.py."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from brim.estimation.ranks.estimate import estimate_ranks
from brim.estimation.ranks.split import Split
from support.splitting import BATCH, LR, SEQ, STEPS, trained
from support.tiny_model import save_llama
from support.trainings import plain, write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),  # of PyTorch, about its own process groups
]
# One process, in which FSDP2 splits nothing and offloads all the same.
PROGRAM = textwrap.dedent("""
    import json, os, sys
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from brim.techniques.parallel import sharding

    folder, tokens, offload = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "offload"
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(folder).cuda().train()
    handle = sharding.apply(model, sharding.mesh_of(1, 1, "cuda"), sharding.Sharding(zero=3, offload=offload))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharding.group_by_mesh(optimizer, offload=offload)
    batch = torch.randint(0, 100, (2, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        with handle.micro_batch(last=True):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        places = {p.grad.to_local().device.type for p in model.parameters()} if offload else set()
        losses.append(loss.item())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    shards = [p.to_local() for p in model.parameters()] if offload else []
    states = [value for state in optimizer.state.values() for value in state.values()]
    print(json.dumps({
        "losses": losses, "allocated": torch.cuda.max_memory_allocated(), "gradients": sorted(places),
        "locked": all(shard.is_pinned() for shard in shards),
        "states": sorted({value.device.type for value in states if isinstance(value, torch.Tensor)}),
    }))
    dist.destroy_process_group()
""")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=8, hidden=512, positions=256)


def run(llama: Path, where: str) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM, str(llama), "256", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_gpu_has_no_shards_and_the_losses_are_the_same(llama: Path) -> None:
    apart, held = run(llama, "offload"), run(llama, "keep")
    assert apart["losses"] == pytest.approx(held["losses"], rel=1e-4)
    assert apart["locked"] and apart["gradients"] == ["cpu"] and apart["states"] == ["cpu"]
    predicted = estimate_ranks(
        llama, Split(gpus=1, zero=3, offload_shards=True, micro_batch=2), seq=256, precision="fp32",
        gpu=torch.cuda.get_device_name(),
    )  # fmt: skip
    assert apart["allocated"] == pytest.approx(predicted.worst.peak_bytes.allocated, rel=0.1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_from_ram_as_one_process_does(llama: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    alone = plain(llama, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)[0]
    split = {"zero": 3, "offload_shards": True, "micro_batch": 3, "precision": "fp32"}
    free, clipped = trained(2, llama, text, tmp_path, split, {**split, "clip_norm": 0.1})
    assert free["losses"] == pytest.approx(alone, rel=1e-3)
    assert clipped["losses"] != pytest.approx(alone, rel=1e-3)
    predicted = estimate_ranks(
        llama, Split(gpus=2, zero=3, offload_shards=True, micro_batch=3, global_batch=BATCH), seq=SEQ,
        precision="fp32", gpu=torch.cuda.get_device_name(),
    )  # fmt: skip
    for rank, expected in zip(free["ranks"], predicted.ranks, strict=True):
        assert rank["allocated_bytes"] == pytest.approx(expected.peak_bytes.allocated, rel=0.1)
        assert expected.ram is not None
        assert rank["ram_bytes"] == pytest.approx(expected.ram.allocated, rel=0.02)
