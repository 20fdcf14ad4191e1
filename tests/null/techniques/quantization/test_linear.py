"""Linear layers in 8 and 4 bits: how far from what they were, and what a call of one gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from brim.techniques.quantization.linear import form
from brim.techniques.quantization.technique import (
    SCHEMES,
    Quantization,
    QuantizedLinear,
    apply,
    expand,
    quantize,
    quantize_meta,
)

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
    monkeypatch.setattr("brim.techniques.quantization.linear._PIECE_BYTES", 1)
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
    monkeypatch.setattr("brim.techniques.quantization.linear._fused_block", lambda: 0)
    model = nn.Sequential(linear_of(160, 192))
    apply(model, scheme)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    layer: Any = model[0]
    monkeypatch.setattr("brim.techniques.quantization.linear._WIDE_CPU_BYTES", wide_bytes)
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
