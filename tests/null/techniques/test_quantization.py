"""Linear layers in 8 and 4 bits: how far from what they were, what is left alone, and that removal is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import brim
from brim.core import Hardware
from brim.core.hardware import DISK, RAM
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.techniques.blocks import find_blocks
from brim.techniques.quantization import (
    NAME,
    SCHEMES,
    Quantization,
    QuantizedLinear,
    apply,
    chosen,
    expand,
    options,
    quantize,
    quantize_meta,
    stored_bytes,
)
from brim.techniques.quantized_linear import form

SIDES = [(64, 128), (96, 64), (160, 192), (48, 40), (33, 17), (1, 64)]
ROWS = [1, 3, 16, 17, 70]
CASES = [
    (scheme, out, inside)
    for scheme, (out, inside) in itertools.product(SCHEMES, SIDES)
    if form(Quantization(scheme=scheme), out, inside) is not None
]
TOLERANCE = 2**-8  # half of it for an input that is rounded to bfloat16, half for such an output


def weight_of(out: int, inside: int) -> torch.Tensor:
    return torch.randn(out, inside, generator=torch.Generator().manual_seed(out * inside)) / inside**0.5


def linear_of(out: int, inside: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inside, out, bias=bias, dtype=dtype)
    made.weight.data = weight_of(out, inside).to(dtype)
    return made


def llama(*, tied: bool = False, **values: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "tie_word_embeddings": tied,
    }
    return LlamaForCausalLM(LlamaConfig(**{**shape, **values})).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96)).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    return T5ForConditionalGeneration(config).eval()


IDS = torch.arange(1, 9).view(1, 8)


def logits(model: nn.Module) -> torch.Tensor:
    given = {"decoder_input_ids": IDS[:, :3]} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, **given).logits
    return found


# -- numerics


@pytest.mark.parametrize("out, inside", [case[1:] for case in CASES if case[0] == "int8"])
def test_int8_is_off_by_half_a_step_at_most(out: int, inside: int) -> None:
    weight = weight_of(out, inside)
    codes, scale = quantize(Quantization(scheme="int8"), weight)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    error = (expand(codes, scale, torch.float32) - weight).abs()
    assert (error <= scale[:, None] * 0.5001).all()
    assert (codes.abs().amax(1) == 127).all()  # all of the range is used


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_off_by_half_a_step_but_far_out_and_better_than_from_least_to_largest(group: int) -> None:
    weight = weight_of(96, 256)
    codes, scale = quantize(Quantization(scheme="int4", group=group), weight)
    assert tuple(scale.shape) == (256 // group, 96, 2)
    found = expand(codes, scale, torch.float32)
    error, step = (found - weight).view(96, -1, group), scale[..., 0].float().t()[..., None]
    assert (error.abs() <= step * 0.501).float().mean() > 0.95
    groups = weight.view(96, -1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    plain = low + ((groups - low) / (high - low) * 15).round() * (high - low) / 15
    assert error.square().mean() < 0.92 * (plain - groups).square().mean()


def test_int4_keeps_what_lies_on_a_grid() -> None:
    codes = torch.randint(0, 16, (64, 128), generator=torch.Generator().manual_seed(0))
    codes[:, 0::64], codes[:, 1::64] = 0, 15  # each group has both ends
    weight = codes * 0.25 - 1.5
    found = expand(*quantize(Quantization(scheme="int4"), weight), torch.float32)
    assert torch.allclose(found, weight, atol=0.25 * 8 * 2**-8)


def test_fp8_keeps_four_bits_of_each_weight() -> None:
    weight = weight_of(96, 256)
    codes, scale = quantize(Quantization(scheme="fp8"), weight)
    found = expand(codes, scale, torch.float32)
    large = weight.abs() > scale.item() * 2**-6  # normal numbers
    assert large.float().mean() > 0.99
    assert ((found - weight).abs()[large] <= weight.abs()[large] * 2**-4 * 1.0001).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [0.0, -0.3])
def test_rows_of_one_value_come_back(scheme: str, value: float) -> None:
    weight = torch.full((64, 64), value)
    found = expand(*quantize(Quantization(scheme=scheme), weight), torch.float32)
    assert torch.allclose(found, weight, rtol=2**-8, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_quantized_in_pieces_is_the_same(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, asked = weight_of(320, 64), Quantization(scheme=scheme)
    whole = quantize(asked, weight)
    monkeypatch.setattr("brim.techniques.quantized_linear._PIECE_BYTES", 1)
    parts = quantize(asked, weight)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, parts, strict=True))


def test_the_numerics_are_torchaos() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives", reason="torchao is not installed")
    weight = weight_of(96, 256)
    codes, scale = quantize(Quantization(scheme="int8"), weight)
    limits = {"quant_min": -127, "quant_max": 127}
    theirs = primitives.choose_qparams_affine(
        weight, primitives.MappingType.SYMMETRIC, (1, 256), torch.int8, **limits, eps=1e-30
    )
    assert torch.equal(theirs[0].reshape(-1), scale)
    assert torch.equal(primitives.quantize_affine(weight, (1, 256), *theirs, torch.int8, **limits), codes)
    wide = primitives.dequantize_affine(codes, (1, 256), *theirs, torch.int8, **limits)
    assert torch.equal(wide, expand(codes, scale, torch.float32))


@pytest.mark.parametrize("out", [32, 64, 128])
def test_four_bits_lie_as_the_kernel_of_this_cpu_wants_them(out: int) -> None:
    block = {"AVX2": 32, "AVX512": 64}.get(torch.backends.cpu.get_cpu_capability())
    if block is None or out % block:
        pytest.skip("PyTorch's kernel for this CPU reads another arrangement, and is not used")
    asked, values = Quantization(scheme="int4"), torch.arange(out * 64).view(out, 64) % 16
    codes, _ = quantize(asked, values.float())
    theirs = torch._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    assert torch.equal(codes.view(out, -1), theirs)


# -- the layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme, out, inside", CASES)
def test_a_product_is_that_with_the_wide_weight(scheme: str, out: int, inside: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(linear_of(out, inside, dtype), nn.Identity())
    apply(model, scheme)
    layer: Any = model[0]
    assert isinstance(layer, QuantizedLinear)
    for rows in ROWS:
        x = torch.randn(rows, inside, generator=torch.Generator().manual_seed(rows)).to(dtype)
        with torch.no_grad():
            wanted = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
            found = model(x)
        assert (found.dtype, found.shape) == (dtype, (rows, out))
        size = x.double().norm(dim=1, keepdim=True) * layer.weight.double().norm(dim=1) + layer.bias.double().abs()
        assert ((found - wanted).abs() <= TOLERANCE * size).all()


@pytest.mark.parametrize("wide_bytes", [1, 20_000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_that_is_made_wide_in_parts_gives_the_same(
    scheme: str, wide_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU without fast kernels does, and a GPU."""
    monkeypatch.setattr("brim.techniques.quantized_linear._fused_block", lambda: 0)
    model = nn.Sequential(linear_of(160, 192))
    apply(model, scheme)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    layer: Any = model[0]
    monkeypatch.setattr("brim.techniques.quantized_linear._WIDE_CPU_BYTES", wide_bytes)
    with torch.no_grad():
        wanted = nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.allclose(model(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_leading_dimensions_and_no_rows_at_all(scheme: str) -> None:
    model = nn.Sequential(linear_of(64, 128, bias=False))
    apply(model, scheme)
    with torch.no_grad():
        x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model(x).reshape(6, 64), model(x.reshape(6, 128)))
        assert torch.equal(model(x[:, 1]), model(x[:, 1].contiguous()))
        assert model(torch.zeros(0, 128)).shape == (0, 64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_that_lie_anywhere_in_memory_give_the_same(scheme: str) -> None:
    model = nn.Sequential(linear_of(64, 128))
    apply(model, scheme)
    layer: Any = model[0]
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(x)
        apart = torch.empty(layer.codes.nbytes + 1, dtype=torch.uint8)[1:]
        layer.codes.data = (
            apart.copy_(layer.codes.data.view(torch.uint8).reshape(-1))
            .view(layer.codes.dtype)
            .view(layer.codes.shape)
        )
        assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_reach_the_input_and_no_code(scheme: str) -> None:
    model = nn.Sequential(linear_of(64, 128))
    apply(model, scheme)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model(x).sum().backward()
    layer: Any = model[0]
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(2, 128), atol=1e-5)
    assert layer.codes.grad is None
    assert layer.scale.grad is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fake_call_says_what_a_real_one_gives(scheme: str) -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as flops, torch.no_grad():
        model = nn.Sequential(nn.Linear(128, 64))
        quantize_meta(model, scheme)
        found = model(torch.zeros(2, 5, 128))
    assert (tuple(found.shape), found.dtype) == ((2, 5, 64), torch.float32)
    assert flops.get_total_flops() == 2 * 10 * 128 * 64


# -- models


@pytest.mark.parametrize("make", [llama, gpt2, t5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_gives_almost_the_same_and_after_removal_the_very_same(
    make: Callable[[], nn.Module], scheme: str
) -> None:
    model = make()
    before, names = logits(model), {name: id(value) for name, value in model.named_parameters()}
    handle = apply(model, scheme)
    assert handle.report.stored_bytes < handle.report.wide_bytes / 3
    quantized = logits(model)
    assert not torch.equal(quantized, before)
    relative = ((quantized - before).norm() / before.norm()).item()
    assert relative < {"int8": 0.02, "fp8": 0.1, "int4": 0.25}[scheme]
    handle.remove()
    handle.remove()
    assert torch.equal(logits(model), before)
    assert {name: id(value) for name, value in model.named_parameters()} == names
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    apply(model, scheme).remove()  # again


def test_a_users_hook_stays() -> None:
    model, seen = llama(), []
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.register_forward_hook(lambda *_: seen.append(1))
    handle = apply(model, "int8")
    logits(model)
    assert len(seen) == 1
    handle.remove()
    logits(model)
    assert len(seen) == 2


@pytest.mark.parametrize("make", [llama, gpt2, lambda: llama(tied=True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_without_values_gets_the_parameters_of_a_real_one(make: Callable[[], nn.Module], scheme: str) -> None:
    real = make()
    apply(real, scheme)
    with torch.device("meta"):
        planned = make()
    report = quantize_meta(planned, scheme)

    def shapes(model: nn.Module) -> dict[str, Any]:
        return {name: (p.dtype, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}

    assert shapes(planned) == shapes(real)
    assert all(p.is_meta for p in planned.parameters())
    layers = [module for module in planned.modules() if isinstance(module, QuantizedLinear)]
    assert report.stored_bytes == sum(layer.codes.nbytes + layer.scale.nbytes for layer in layers)
    assert report.layers == len(layers)


def test_the_head_is_left_unless_it_is_asked_for() -> None:
    assert "lm_head" not in chosen(llama(), "int8")
    assert len(chosen(llama(), "int8")) == 14
    assert "lm_head" in chosen(llama(), Quantization(scheme="int8", head=True))


def test_a_head_that_is_tied_to_the_embeddings_becomes_a_layer_of_its_own() -> None:
    model = llama(tied=True)
    before, table = logits(model), model.get_input_embeddings().weight
    assert "lm_head" not in chosen(model, "int8")
    handle = apply(model, Quantization(scheme="int8", head=True))
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.get_input_embeddings().weight is table
    assert ((logits(model) - before).norm() / before.norm()).item() < 0.02
    handle.remove()
    assert model.lm_head.weight is table


def test_a_weight_that_two_layers_share_is_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    assert list(chosen(model, "int8")) == ["2"]


def test_sides_that_a_scheme_cannot_hold_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 64), nn.Linear(96, 64), nn.Linear(100, 32))
    assert list(chosen(model, "int8")) == ["0", "1", "2", "3"]
    assert list(chosen(model, "int4")) == ["2"]  # in groups of 32, the largest that divides 96
    assert list(chosen(model, "fp8")) == ["2"]
    assert stored_bytes(Quantization(scheme="int4"), 64, 96) == 64 * 96 // 2 + 4 * 64 * 3


def test_experts_in_one_tensor_are_left_and_the_rest_is_not() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=96,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    before = logits(model)
    handle = apply(model, "int8")
    assert handle.report.layers == 8
    assert "8 linear layers with" in str(handle.report)
    assert ((logits(model) - before).norm() / before.norm()).item() < 0.05


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="0 linear layers were found"):
        apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "int8")
    with pytest.raises(UnsupportedError, match="1 linear layers were found in it, and none that can"):
        quantize_meta(nn.Sequential(nn.Linear(5, 7)), "int4")


def test_a_second_application_is_refused_and_so_is_a_fitted_model() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    handle = apply(model, "int8")
    with pytest.raises(UsageError, match=r"already \(int8\)"):
        apply(model, "int4")
    handle.remove()
    fitted = brim.fit(model, ram=10 * 64 * 65, activations=0)
    with pytest.raises(UsageError, match="fitted already"):
        apply(model, "int8")
    fitted.remove()
    apply(model, "int8").remove()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_are_refused_and_nothing_changes(scheme: str) -> None:
    model = llama()
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
    weight.data[3, 5] = float("nan")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight was to be quantized"):
        apply(model, scheme)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    weight.data[3, 5] = 0
    apply(model, scheme).remove()


def test_unknown_schemes_and_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="Known are int8, int4, fp8"):
        apply(nn.Linear(64, 64), "int5")
    with pytest.raises(UsageError, match="Groups of 48 weights"):
        Quantization(scheme="int4", group=48)


def test_no_option_is_lossless_and_each_says_what_it_saves(known_machine: Hardware) -> None:
    model = llama(num_hidden_layers=4)
    made = options(model, find_blocks(model), known_machine)
    assert {option.choice for option in made} == set(SCHEMES)
    assert {option.technique for option in made} == {NAME}
    assert not any(option.lossless for option in made)
    saved = sum(option.saves_bytes[RAM] for option in made if option.choice == "int4")
    report = apply(model, "int4").report
    assert saved == report.wide_bytes - report.stored_bytes
    assert all(option.moves_bytes[DISK, RAM] == -option.saves_bytes[RAM] for option in made)
