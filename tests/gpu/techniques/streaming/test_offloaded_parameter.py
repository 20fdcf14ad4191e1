"""Weights that rest beside a GPU: whoever uses them outside of their block gets what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import brim
from brim.errors import BudgetError, UnsupportedError
from brim.techniques.streaming.offloaded_parameter import OffloadedParameter
from support import families
from support.placed import place_least

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

_WORDS = 8192  # the table is a large part of the model, so that it is streamed
_GEMMA = {
    "vocab_size": _WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BART = {
    "vocab_size": _WORDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 4096,
    "scale_embedding": True,
}
_OPT = {
    "vocab_size": _WORDS,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
# Embeddings with a forward of their own: scaled rows, positions with an offset, positions made of lengths.
SUBCLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**_GEMMA, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", {**_GEMMA, "tie_word_embeddings": False}),
    "opt": ("OPT", "OPTForCausalLM", {**_OPT, "tie_word_embeddings": False}),
    "bart": ("Bart", "BartForConditionalGeneration", _BART),
    "mbart": ("MBart", "MBartForConditionalGeneration", _BART),
    "m2m-100": ("M2M100", "M2M100ForConditionalGeneration", {**_BART, "tie_word_embeddings": False}),
    "marian": (
        "Marian",
        "MarianMTModel",
        {**_BART, "pad_token_id": 0, "decoder_start_token_id": 0, "max_position_embeddings": 64},
    ),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration", {**_BART, "max_position_embeddings": 64}),
    "xglm": (
        "XGLM",
        "XGLMForCausalLM",
        {
            "vocab_size": _WORDS,
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "attention_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
}


def _make(name: str) -> nn.Module:
    torch.manual_seed(0)
    prefix, model, values = SUBCLASSES[name]
    return getattr(transformers, model)(getattr(transformers, f"{prefix}Config")(**values)).eval()


def _inputs(name: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(14).view(2, 7) * 37 % _WORDS
    made = {"input_ids": ids.cuda()}
    if "Conditional" in SUBCLASSES[name][1] or "MT" in SUBCLASSES[name][1]:
        made["decoder_input_ids"] = ids[:, :3].cuda()
    return made


def _streamed(model: nn.Module, optimizer: Any = None, **more: Any) -> Any:
    """As much as can be is streamed: the smallest budget that fits."""
    if optimizer is None:
        return place_least(model, **more)
    with pytest.raises(BudgetError) as refused:
        brim.fit(model, optimizer, vram=1, device="cuda", **more)
    return brim.fit(model, optimizer, vram=refused.value.smallest_bytes["vram"], device="cuda", **more)


def _same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", SUBCLASSES)
@torch.no_grad()
def test_embeddings_with_a_forward_of_their_own_give_what_they_give_in_place(name):
    expected = _make(name).cuda()(**_inputs(name)).logits
    model = _make(name)
    handle = _streamed(model)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    assert any(type(table) is OffloadedParameter for table in tables)
    torch.testing.assert_close(model(**_inputs(name)).logits, expected, rtol=1e-5, atol=1e-5)
    handle.remove()


@pytest.mark.parametrize("name", families.FAMILIES)
@torch.no_grad()
def test_every_family_gives_what_it_gives_in_place(name):
    inputs = {key: value.cuda() for key, value in families.inputs(name).items()}
    expected = families.make(name).cuda()(**inputs).logits
    model = families.make(name)
    handle = _streamed(model)
    assert any(type(p) is OffloadedParameter for p in model.parameters())
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    handle.remove()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4096, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(12)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum(-1)


IDS = torch.tensor([[1, 5, 9], [4095, 0, 5]])


@pytest.fixture
def fitted() -> Any:
    model = Net()
    return model, _streamed(model)


@torch.no_grad()
def test_reads_of_a_weight_at_rest_are_true(fitted):
    model, handle = fitted
    plain = dict(Net().cuda().named_parameters())
    average = {name: torch.zeros_like(value) for name, value in plain.items()}
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cuda" and isinstance(parameter, nn.Parameter)
        _same(parameter * 1, plain[name])
        _same(parameter.data + 0, plain[name])
        torch.testing.assert_close(parameter.norm(), plain[name].norm())
        _same(parameter.cpu(), plain[name].cpu())
        average[name].lerp_(parameter, 0.5)
        _same(average[name], plain[name] * 0.5)
        _same(copy.deepcopy(parameter), plain[name])
        assert not torch.isnan(parameter).any()
        assert parameter.tolist()[0] == plain[name].tolist()[0]
    x = torch.ones(1, 64, device="cuda")
    _same(nn.functional.linear(x, model.layers[3].weight), nn.functional.linear(x, plain["layers.3.weight"]))
    handle.remove()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


@torch.no_grad()
def test_what_is_written_to_a_weight_at_rest_arrives(fitted):
    model, handle = fitted
    twin = Net().cuda()
    for changed in (model, twin):
        changed.layers[5].weight.mul_(2).add_(0.25)
        changed.table.weight.fill_(0.5)
        changed.layers[6].weight.copy_(twin.layers[1].weight)
        changed.layers[7].weight.data.mul_(3)
        changed.layers[8].weight.data = twin.layers[2].weight.clone()
        nn.init.constant_(changed.layers[9].weight, 0.125)
    _same(model(IDS.cuda()), twin(IDS.cuda()))
    handle.remove()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        _same(mine.cuda(), theirs)


@torch.no_grad()
def test_views_whose_changes_would_be_lost_are_refused(fitted):
    model, handle = fitted
    for view in (lambda p: p.view(-1), lambda p: p.T, lambda p: p[0], lambda p: p.data[0].zero_()):
        with pytest.raises(UnsupportedError, match="weight"):
            view(model.layers[5].weight)
    handle.remove()


def test_a_penalty_on_weights_at_rest_has_gradients():
    def penalty(model: nn.Module) -> torch.Tensor:
        return sum((p.pow(2).sum() + p.view(-1)[3:9].sum() for p in model.parameters()), torch.zeros(()).cuda())

    model, twin = Net(), Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    handle = _streamed(model, optimizer, example={"ids": IDS})
    for _ in range(2):
        for net, chosen in ((model, optimizer), (twin, other)):
            (net(IDS.cuda()).pow(2).mean() + 1e-2 * penalty(net)).backward()
            chosen.step()
            chosen.zero_grad()
    handle.remove()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.cuda(), theirs, rtol=1e-5, atol=1e-7, msg=name)


def test_a_module_that_came_from_the_device_goes_back_to_it():
    model = Net().cuda()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = _streamed(model)
    assert any(type(p) is OffloadedParameter for p in model.parameters())
    handle.remove()
    for name, parameter in model.named_parameters():
        _same(parameter.detach(), expected[name])
