"""A block that takes its batch in pieces computes what it computes from the batch, and moves the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.blocks import find_blocks
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.checkpointing.technique import FULL, SELECTIVE
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import FROM_RAM
from support import streamed_training as streamed
from support import trained

ROWS = 6


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("kind", [FULL, SELECTIVE])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
def test_losses_and_gradients_are_those_of_the_batch(family: str, rows: int, kind: str) -> None:
    plain, other = (without_dropout(trained.make(family)) for _ in range(2))
    checkpointing.apply(other, dict.fromkeys(checkpointing.blocks(other), kind), rows=rows)
    batch = trained.batch(family, 0, ROWS)
    losses = []
    for model in (plain, other):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-7, msg=name)


class Routed(nn.Module):
    """Passes on as many rows of the batch as it has room for, as experts with a capacity do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.room = nn.Linear(width, width), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        kept = torch.arange(len(flat)) < self.room
        return x + (self.inner(flat) * kept[:, None]).view_as(x)


class Stack(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), kind(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class NormOverBatch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class OwnBatchNorm(nn.Module):
    """It mixes rows in training only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + ((y - y.mean(0)) / y.std() if self.training else y)


class BalancedExperts(nn.Module):
    """Its loss is an attribute, as that of many mixtures of experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, width), nn.Linear(width, 4)
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        self.loss = (shares.mean((0, 1)) ** 2).sum()
        return x + self.up(x) * shares.max(-1, keepdim=True).values


class TokensFirst(nn.Module):
    """A layer of PyTorch's encoder as it is by default; its residual stream has large values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(100 * x)


def test_comparing_rows_seeds_no_device_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.manual_seed`` seeds all devices, also those whose random state nobody saved."""
    model = Stack(lambda width: nn.Dropout(0.5))
    checkpointing.apply(model, {"layers.0": FULL, "layers.1": FULL}, rows=2)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeded"))
    loss = model(torch.ones(ROWS, 5, 8))
    torch.set_rng_state(before)
    assert torch.equal(loss, model(torch.ones(ROWS, 5, 8)))  # which compares no more


@pytest.mark.parametrize("kind", [Routed, NormOverBatch, OwnBatchNorm, BalancedExperts, TokensFirst])
def test_a_block_whose_rows_depend_on_each_other_takes_the_batch_as_a_whole(kind: type[nn.Module]) -> None:
    plain, other = Stack(kind), Stack(kind)
    checkpointing.apply(other, {"layers.0": FULL, "layers.1": FULL}, rows=2)
    x = torch.randn(ROWS, 5, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="Sequential takes its batch as a whole"):
        loss = other(x)
    want = plain(x)
    assert torch.equal(loss, want)
    for one in (loss, want):
        one.backward()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    for one, two in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)


def test_rows_that_cannot_be_told_from_tokens_stay_together() -> None:
    model = Stack(Routed)
    seen: list[Any] = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    checkpointing.apply(model, {"layers.0": FULL}, rows=2)
    model.train()(torch.randn(5, 5, 8)).backward()
    assert seen == [(5, 5, 8)]


def copied_bytes(rows: int, early: bool) -> list[tuple[int, int]]:
    """The bytes up and down in three steps of a streamed net, which trains as a plain one."""
    net, twin = streamed.Net(), streamed.Net()
    optimizer, plain = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    checkpointing.apply(net, dict.fromkeys(checkpointing.blocks(net), FULL), rows=rows)
    partition, memory = find_blocks(net), streamed.memory_for("ram")
    plan = streamed.plan_of(partition, FROM_RAM, 2)
    weights = weight_streaming.apply(net, partition, plan, memory, weight_streaming.Weights(), training=True)
    offload = optimizer_offload.apply(net, optimizer, memory, states=RAM, streaming=weights)
    copied = []
    for _ in range(3):
        loss, want = streamed.loss_of(net), streamed.loss_of(twin)
        with offload.final() if early else torch.enable_grad():
            loss.backward()
        want.backward()
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        for its in (optimizer, plain):
            its.step()
            its.zero_grad()
        streamed.finish_copies(memory)
        copied.append((memory.recorder.copied_bytes[RAM, VRAM], memory.recorder.copied_bytes[VRAM, RAM]))
    offload.remove()
    weights.remove()
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
    return copied


@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_pieces_move_no_more_bytes_than_one_pass(early: bool) -> None:
    assert copied_bytes(1, early) == copied_bytes(0, early)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_inputs_of_checkpointed_blocks_are_offloaded(rows: int) -> None:
    net, twin = streamed.Net(), streamed.Net()
    memory, names = streamed.memory_for("ram"), checkpointing.blocks(net)
    checkpointing.apply(net, dict.fromkeys(names, FULL), rows=rows)
    handle = activation_offload.apply(net, names, memory, smallest_bytes=2 * 4096, window_bytes=4 * 4096)
    ids = torch.arange(96).view(3, 32) % streamed.WORDS
    for _ in range(2):
        for one in (net, twin):
            one.zero_grad()
            one(ids).square().mean().backward()
        boundary_bytes = 3 * 32 * streamed.WIDTH * 4
        streamed.finish_copies(memory)
    # Of each step, all inputs but those of the last blocks, which the window still has when backward begins.
    moved = memory.recorder.copied_bytes[VRAM, RAM]
    assert 2 * (len(names) - 3) * boundary_bytes <= moved <= 2 * len(names) * boundary_bytes
    handle.remove()
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-8, msg=name)


def test_a_block_that_changes_its_input_takes_the_batch_as_a_whole() -> None:
    """Autograd lets no part of a split tensor be changed in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    x = torch.randn(ROWS, 5, 8)
    want = model(x)
    checkpointing.apply(model, {"1": FULL}, rows=2)
    with pytest.warns(UserWarning, match="Sequential takes its batch as a whole"):
        assert torch.equal(model(x), want)


@pytest.mark.parametrize("family", ["bloom", "t5"])
def test_blocks_that_cannot_take_some_rows_take_all(family: str) -> None:
    """Bloom's positions have a row for each head of each sequence, and T5's blocks return positions for all rows."""
    torch.manual_seed(0)
    config = {
        "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=100, hidden_dropout=0.0),
        "t5": transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100, dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    }[family]  # fmt: skip
    kind = {"bloom": transformers.BloomForCausalLM, "t5": transformers.T5ForConditionalGeneration}[family]
    model = kind(config).train()
    ids = torch.randint(0, 100, (8, 12))
    want = model(input_ids=ids, labels=ids, use_cache=False).loss
    checkpointing.apply(model, dict.fromkeys(checkpointing.blocks(model), FULL), rows=2)
    with pytest.warns(UserWarning, match="takes its batch as a whole"):
        assert torch.equal(model(input_ids=ids, labels=ids, use_cache=False).loss, want)


@pytest.mark.filterwarnings("ignore:use_cache is ignored")
def test_the_users_cache_is_left_alone() -> None:
    model = without_dropout(trained.make("llama"))
    batch = trained.batch("llama", 0, ROWS)
    want = model(**batch).loss
    checkpointing.apply(model, dict.fromkeys(checkpointing.blocks(model), FULL), rows=2)
    loss = model(**{**batch, "use_cache": True}).loss
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    loss.backward()
