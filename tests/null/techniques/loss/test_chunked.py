"""A loss in chunks is the loss of the whole logits: value, gradients, and all that a program does around it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import brim
from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.loss.lazy_logits import LazyLogits

CLASSES = 31
BOUND = 1e-6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 12)
        self.middle = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(ids)).tanh())


@pytest.fixture
def twins() -> tuple[Tiny, Tiny]:
    torch.manual_seed(0)
    model = Tiny().double()
    return model, copy.deepcopy(model)


IDS = torch.randint(0, CLASSES, (3, 11), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(33).view(3, 11) % 4 == 0, -100, IDS.roll(1, 1))


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def of_answers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="sum")


WEIGHT = torch.linspace(0.2, 2, CLASSES, dtype=torch.float64)
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda logits, labels: F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)),
    "flatten": lambda logits, labels: nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten()),
    "flatten to -2": lambda logits, labels: F.cross_entropy(logits.flatten(end_dim=-2), labels.flatten()),
    "shifted": shifted,
    "of answers": of_answers,
    "transposed": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
    "permuted": lambda logits, labels: F.cross_entropy(logits.permute(0, 2, 1), labels, reduction="sum"),
    "none": lambda logits, labels: F.cross_entropy(logits.transpose(-1, -2), labels, reduction="none").pow(2).sum(),
    "reshaped": lambda logits, labels: F.cross_entropy(logits.reshape((-1, CLASSES)), labels.reshape(-1)),
    "smoothed": lambda logits, labels: (
        F.cross_entropy(logits.mT, labels, label_smoothing=0.2)
        + F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.2)
    ),
    "weighted": lambda logits, labels: F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), weight=WEIGHT),
    "weighted and smoothed": lambda logits, labels: F.cross_entropy(
        logits.view(-1, CLASSES), labels.view(-1), weight=WEIGHT, label_smoothing=0.1
    ),
    "another ignored": lambda logits, labels: F.cross_entropy(
        logits.view(-1, CLASSES), labels.clamp(min=7).view(-1), ignore_index=7
    ),
    "probabilities": lambda logits, labels: F.cross_entropy(
        logits.view(-1, CLASSES), WEIGHT.softmax(0).expand(33, CLASSES)
    ),
    "scaled and capped": lambda logits, labels: F.cross_entropy(
        (torch.tanh(logits / 3.0) * 3).view(-1, CLASSES), labels.view(-1)
    ),
    "in float32": lambda logits, labels: F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1)).double(),
    "one position": lambda logits, labels: F.cross_entropy(logits[:, 4], IDS[:, 4]),
    "two losses": lambda logits, labels: shifted(logits, labels) + of_answers(logits, labels),
    "by hand": lambda logits, labels: -logits.log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).mean(),
    "with a z-loss": lambda logits, labels: shifted(logits, labels) + 1e-2 * logits.logsumexp(-1).pow(2).mean(),
}


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("chunk", [1, 5, 32])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradients(twins: tuple[Tiny, Tiny], name: str, chunk: int) -> None:
    plain, chunked = twins
    chunked_loss.apply(chunked, chunk)
    wanted, found = LOSSES[name](plain(IDS), LABELS), LOSSES[name](chunked(IDS), LABELS)
    bound = 1e-5 if name == "in float32" else BOUND
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    for one, other in zip(gradients(chunked, found), gradients(plain, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


CHUNKABLE = set(LOSSES) - {"by hand", "with a z-loss", "smoothed"}


@pytest.mark.parametrize("name", sorted(CHUNKABLE))
def test_the_head_never_makes_more_rows_than_a_chunk(twins: tuple[Tiny, Tiny], name: str) -> None:
    model, rows = twins[0], []
    chunked_loss.apply(model, 5)
    model.head.register_forward_hook(lambda module, args, made: rows.append(made.numel() // CLASSES))
    gradients(model, LOSSES[name](model(IDS), LABELS))
    assert max(rows) == min(5, max(rows))
    assert sum(rows) > 3  # the hook did fire


def test_a_models_own_loss_of_transformers(twins: tuple[Tiny, Tiny]) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).double()
    chunked = copy.deepcopy(plain)
    handle = chunked_loss.apply(chunked, 8)
    assert handle.head == "lm_head"
    ids = torch.randint(0, 64, (2, 21))
    labels = ids.masked_fill(torch.rand(2, 21) < 0.3, -100)
    for extra in ({}, {"num_items_in_batch": 17}):
        wanted, found = (
            model(input_ids=ids, labels=labels, use_cache=False, **extra).loss for model in (plain, chunked)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # the loss is in float32
        for one, other in zip(gradients(chunked, found), gradients(plain, wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["around the model", "around all"])
def test_autocast_is_that_of_the_heads_call(twins: tuple[Tiny, Tiny], where: str) -> None:
    plain, chunked = (model.float() for model in twins)
    chunked_loss.apply(chunked, 8)

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(IDS)
            assert logits.dtype is torch.bfloat16
            if where == "around all":
                return shifted(logits, LABELS)
        return shifted(logits.float(), LABELS)

    wanted, found = loss_of(plain), loss_of(chunked)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    for one, other in zip(gradients(chunked, found), gradients(plain, wanted), strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999


def test_without_gradients(twins: tuple[Tiny, Tiny]) -> None:
    plain, chunked = twins
    chunked_loss.apply(chunked, 5)
    with torch.no_grad():
        wanted, found = plain(IDS), chunked(IDS)
        torch.testing.assert_close(shifted(found, LABELS), shifted(wanted, LABELS))
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
        assert torch.allclose(found.softmax(-1), wanted.softmax(-1))
    logits = chunked(IDS)
    with torch.no_grad():
        assert not shifted(logits, LABELS).requires_grad
    assert shifted(logits, LABELS).requires_grad


def test_logits_answer_questions_without_being_made(twins: tuple[Tiny, Tiny]) -> None:
    chunked_loss.apply(twins[0], 5)
    logits, wanted = twins[0](IDS), twins[1](IDS)
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.device) == (wanted.shape, wanted.dtype, wanted.device)
    assert (logits.size(-1), logits.dim(), logits.numel(), len(logits)) == (CLASSES, 3, wanted.numel(), 3)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.view_.call.full is None
    assert torch.allclose(logits + 0, wanted)


def test_writing_to_logits_is_seen_by_all_views(twins: tuple[Tiny, Tiny]) -> None:
    """As with plain logits: a view that was taken before sees the change."""
    losses = []
    for model in twins:
        if model is twins[0]:
            chunked_loss.apply(model, 5)
        logits = model(IDS)
        flat = logits.view(-1, CLASSES)
        with torch.no_grad():
            logits[..., 3] = -1e9
        losses.append(F.cross_entropy(flat, LABELS.view(-1), reduction="sum"))
    torch.testing.assert_close(losses[0], losses[1])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def test_gradients_pass_through_a_function_of_the_users(twins: tuple[Tiny, Tiny]) -> None:
    plain, chunked = twins
    chunked_loss.apply(chunked, 5)
    wanted, found = Square.apply(plain(IDS).view(-1, CLASSES)), Square.apply(chunked(IDS).view(-1, CLASSES))
    torch.testing.assert_close(found, wanted)
    for one, other in zip(gradients(chunked, found), gradients(plain, wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_a_users_hook_on_the_head_changes_the_logits_once(twins: tuple[Tiny, Tiny]) -> None:
    losses = []
    for model in twins:
        model.head.register_forward_hook(lambda module, args, made: made * 2 + 1)
        if model is twins[0]:
            chunked_loss.apply(model, 5)
        losses.append(shifted(model(IDS), LABELS))
    torch.testing.assert_close(losses[0], losses[1])


def test_few_rows_are_left_alone(twins: tuple[Tiny, Tiny]) -> None:
    chunked_loss.apply(twins[0], 33)
    assert type(twins[0](IDS)) is torch.Tensor
    assert torch.equal(twins[0](IDS), twins[1](IDS))


def test_no_label_counts(twins: tuple[Tiny, Tiny]) -> None:
    chunked_loss.apply(twins[0], 5)
    none = torch.full_like(LABELS, -100)
    assert shifted(twins[0](IDS), none).isnan()
    assert shifted(twins[1](IDS), none).isnan()


def test_it_can_be_copied_and_removed(twins: tuple[Tiny, Tiny]) -> None:
    model, before = twins[0], dict(vars(twins[0].head))
    handle = chunked_loss.apply(model, 5)
    copied = copy.deepcopy(model)
    handle.remove()
    handle.remove()
    assert vars(model.head) == before
    assert type(model(IDS)) is torch.Tensor
    assert isinstance(copied(IDS), LazyLogits)
    with torch.no_grad():
        copied.head.weight.zero_()
        assert not copied(IDS).sum().allclose(model(IDS).sum())  # each has its own head


class Late(nn.Module):
    """Its head is defined first, and followed by a layer that makes no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, CLASSES)
        self.embed = nn.Embedding(CLASSES, 12)
        self.gate = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(ids)
        return self.out(hidden), self.gate(hidden)


def test_the_head_is_found_by_a_call_or_given() -> None:
    assert chunked_loss.find_head(Late(), (IDS,)) == "out"
    assert chunked_loss.find_head(Late()) == "gate"
    assert chunked_loss.apply(Late(), 4, head="out").head == "out"
    with pytest.raises(UnsupportedError, match="head="):
        chunked_loss.find_head(nn.Conv2d(3, 3, 3))


def test_misuse(twins: tuple[Tiny, Tiny]) -> None:
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(UsageError):
            chunked_loss.apply(twins[0], wrong)
    with pytest.raises(UsageError, match="nowhere"):
        chunked_loss.apply(twins[0], 4, head="nowhere")
    chunked_loss.apply(twins[0], 4)
    with pytest.raises(UsageError, match="already"):
        chunked_loss.apply(twins[0], 4)


def test_smaller_chunks_save_more(known_machine) -> None:
    of_4096, of_256 = (
        chunked_loss.option(8192, 50000, 512, known_machine, chunk=chunk, dtype=torch.bfloat16)
        for chunk in (4096, 256)
    )
    assert of_256.saves_bytes > of_4096.saves_bytes == 4096 * 50000 * 14
    assert of_256.compute_s == of_4096.compute_s > 0


@pytest.mark.parametrize("precision_of", [torch.float32, torch.bfloat16])
def test_a_trace_for_a_gpu_has_no_whole_logits(precision_of: torch.dtype) -> None:
    def build(chunk: int) -> Callable[[], None]:
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).cuda().train()
        if chunk:
            chunked_loss.apply(model, chunk)
        ids = torch.zeros(2, 64, dtype=torch.long).cuda()

        def step() -> None:
            with torch.autocast("cuda", precision_of, enabled=precision_of is torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad()

        return step

    def largest(chunk: int) -> int:
        made = brim.trace(lambda: build(chunk), target="cuda", steps=1)
        made_in_step = [s for s in made.storages if s.born >= made.step_starts[0]]
        return max(s.bytes for s in made_in_step if s.category is not Category.WORKSPACE)

    assert largest(0) == 128 * 4096 * 4
    assert largest(16) == 16 * 4096 * 4  # a chunk's logits; the weight's gradient is as large
