"""Models and text that trainings over ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

from support.rank_checks import save_mixtral
from support.splitting import BATCH, LR, SEQ, STEPS
from support.tiny_model import save_llama, save_tokenizer
from support.trainings import plain, write_text


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=64, positions=128)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output layer is its embedding."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=4, n_positions=128, vocab_size=300, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtral(tmp_path_factory.mktemp("mixtral"), 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def alone(llama: Path, text: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch in one process."""
    return plain(llama, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
