"""Small models to be trained over ranks, and what must be the same as on one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from brim.estimation.models import find_model
from brim.estimation.ranks import torch_engine
from brim.estimation.ranks.estimate import _job, ram_peak
from brim.estimation.ranks.split import Split
from brim.estimation.simulation import place_of, simulate
from brim.estimation.workload import Workload
from brim.models.training_model import with_adapters
from brim.run.data.dataset import Batches, open_data
from support.splitting import BATCH, LR, SEQ, STEPS, trained
from support.tiny_model import save_tokenizer
from support.trainings import weights

SP = {"sequence_parallel": True}
OFFLOADED = {"zero": 3, "offload_shards": True, "micro_batch": 3}
TABLE = "transformer.wte.weight"


def save_mixtral(folder: Path, chosen: int) -> Path:
    """Four experts, ``chosen`` of which each token goes to."""
    torch.manual_seed(5)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=128, num_local_experts=4, num_experts_per_tok=chosen,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


# Four layers of several kinds each, but for granite, which scales its embeddings.
MIXED: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 4,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    },
    "granite": {"embedding_multiplier": 3.0},
}  # fmt: skip

# A norm of each head, experts, heads that a layer counts, experts with one for all tokens, tables of positions.
TENSORS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "gptj": {
        "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, "n_positions": 128, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "llama4_text": {
        "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
}  # fmt: skip


def save_family(folder: Path, family: str) -> Path:
    """All tokens go to all experts."""
    torch.manual_seed(6)
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "bos_token_id": 0,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(family, **{**sizes, **(MIXED | TENSORS)[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def split_of(ranks: int, given: dict[str, Any]) -> Split:
    names = ("zero", "tp", "pp", "interleave", "sequence_parallel", "stage_layers")
    names += ("offload_shards", "ep", "cp")
    shape = {name: given[name] for name in names if name in given}
    return Split(gpus=ranks, gpus_per_node=ranks, global_batch=BATCH, micro_batch=given["micro_batch"], **shape)


def check(made: list[Any], output: Path, alone: Any, *splits: dict[str, Any]) -> None:
    """Every split, the first of ``made``, has the losses and the weights of one process."""
    losses, last = alone
    assert len(made) >= len(splits)
    for number, (split, found) in enumerate(zip(splits, made, strict=False)):
        assert found["losses"] == pytest.approx(losses, abs=1e-5), split
        for name, value in weights(output / str(number)).items():
            assert torch.allclose(value, last[name], atol=1e-5), (split, name)


def check_losses(found: dict[str, Any], output: Path, alone: Any) -> None:
    """A course is that of one process, and so are the weights that it ends with."""
    losses, last = alone
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    for name, value in weights(output).items():
        assert torch.allclose(value, last[name], atol=1e-5), name


def cpu_bytes(
    model: str | Path, split: Split, *, seq: int, optimizer: str = "adamw", checkpointing: str | None = None,
    in_ram: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """The peak of tensors on each rank of a training step on CPUs, by PyTorch's own engine.

    Offloaded shards are left out; ``in_ram``: of these alone. Raises as ``estimate_ranks``.
    """
    workload = Workload(
        task="train", batch=split.micro_batch, seq=seq, precision="fp32", optimizer=optimizer,
        checkpointing=checkpointing,
    )  # fmt: skip
    job = replace(_job(find_model(model), workload, split, place_of(None)), target="cpu")
    of_stage = [
        ram_peak(facts.ram).allocated if in_ram else simulate(facts.trace).peak_bytes.allocated
        for facts in torch_engine.stages(job)[0]
    ]
    return tuple(of_stage[split.coordinates(rank)["pp"]] for rank in range(split.gpus))


def check_memory(ranks: int, llama: Path, made: list[Any], *splits: dict[str, Any]) -> None:
    """Measured bytes of every rank are the predicted ones within 2 %."""
    for split, found in zip(splits, made, strict=True):
        measured = [rank["allocated_bytes"] for rank in found["ranks"]]
        recompute = split.get("checkpointing")
        predicted = cpu_bytes(
            llama, split_of(ranks, split), seq=SEQ, checkpointing=recompute, optimizer=split.get("optimizer", "adamw")
        )  # fmt: skip
        assert measured == pytest.approx(predicted, rel=0.02), split
        if split.get("offload_shards"):
            in_ram = [rank["ram_bytes"] for rank in found["ranks"]]
            expected = cpu_bytes(llama, split_of(ranks, split), seq=SEQ, checkpointing=recompute, in_ram=True)
            assert in_ram == pytest.approx(expected, rel=0.02), split


def check_trained(ranks: int, llama: Path, text: Path, output: Path, alone: Any, *splits: dict[str, Any]) -> None:
    """Every split has the losses and the weights of one process, in the bytes that are predicted."""
    made = trained(ranks, llama, text, output, *splits)
    check(made, output, alone, *splits)
    check_memory(ranks, llama, made, *splits)


def check_adapter(losses: list[float], output: Path, one: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """The course of one process, and its adapter in peft's own file."""
    assert losses == pytest.approx(one[0], abs=1e-5)
    found = weights(output)
    assert found.keys() == one[1].keys()
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in one[1].items())
    assert json.loads((output / "adapter_config.json").read_text())["r"] == 8


def adapted(model: Path, data: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters of plain PyTorch and peft in one process."""
    batches = Batches(open_data(data, AutoTokenizer.from_pretrained(model), SEQ), BATCH, seed=0, pad_to=SEQ)
    module = with_adapters(AutoModelForCausalLM.from_pretrained(model), 0).train()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LR)
    losses = []
    for _ in range(STEPS):
        loss = module(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in get_peft_model_state_dict(module).items()}
