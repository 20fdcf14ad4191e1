"""Precisions do what they say to weights, arithmetic and updates; a run can be resumed; removal restores."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.core import Category
from brim.errors import UnsupportedError, UsageError
from brim.techniques import precision
from brim.techniques.precision import round_at_random
from support import trained

PURE = ("bf16", "bf16-stochastic", "bf16-master")
ON_CPU = ("fp32", "bf16-mixed", "fp16-mixed", *PURE)


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train(model: nn.Module, family: str, handle: Any, optimizer: Any, steps: range = range(4)) -> list[float]:
    """As brim's own loop does it."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        with handle.forward():
            loss = model(**trained.batch(family, step)).loss
        handle.backward(loss)
        handle.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("family", trained.FAMILIES)
def test_every_family_trains_in_every_precision(family: str, kind: str) -> None:
    model = trained.make(family)
    optimizer = adamw(model)
    handle = precision.apply(model, optimizer, kind)
    losses = train(model, family, handle, optimizer)
    plain = trained.make(family)
    wanted = train(plain, family, precision.apply(plain, None, "fp32"), adamw(plain))
    assert losses == pytest.approx(wanted, rel=0.03)
    assert (losses == wanted) == (kind == "fp32")
    dtype = torch.bfloat16 if kind in PURE else torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_mixed_is_plain_autocast() -> None:
    model, plain = trained.make("gpt2"), trained.make("gpt2")
    optimizer = adamw(model)
    found = train(model, "gpt2", precision.apply(model, optimizer, "bf16-mixed"), optimizer)
    optimizer, wanted = adamw(plain), []
    for step in range(4):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(**trained.batch("gpt2", step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert found == wanted
    assert trained.same_state(model, plain)


@pytest.mark.parametrize("together_bytes", [1, 1 << 30])
def test_masters_are_those_of_a_loop_by_hand(together_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_TOGETHER_BYTES", together_bytes)
    model = trained.make("llama")
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    by_hand = torch.optim.AdamW(masters.values(), lr=1e-3)
    other = trained.make("llama").bfloat16()
    for buffer, own in zip(other.buffers(), model.buffers(), strict=True):
        buffer.data = own.clone()  # rotary frequencies stay precise
    optimizer = adamw(model)
    handle = precision.apply(model, optimizer, "bf16-master")
    found = train(model, "llama", handle, optimizer)
    for step in range(4):
        torch.manual_seed(step)
        loss = other(**trained.batch("llama", step)).loss
        loss.backward()
        assert loss.item() == found[step]
        for name, parameter in other.named_parameters():
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        by_hand.step()
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter.copy_(masters[name])
    handle.remove()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name])


def test_small_updates_vanish_in_bfloat16_unless_rounded_at_random() -> None:
    moved = {}
    for kind in PURE:
        torch.manual_seed(0)
        model = nn.Linear(100, 100, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        handle = precision.apply(model, optimizer, kind)
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            handle.step(optimizer)
        moved[kind] = 1 - model.weight.float().mean().item()
    assert moved["bf16"] == 0
    assert moved["bf16-stochastic"] == pytest.approx(0.01, rel=0.1)
    assert moved["bf16-master"] == pytest.approx(0.01, rel=0.3)  # read in bfloat16


def test_state_rests_in_the_type_that_is_promised() -> None:
    for kind, dtype in (("bf16-stochastic", torch.bfloat16), ("bf16-master", torch.float32)):
        model = trained.make("gpt2")
        optimizer = adamw(model)
        handle = precision.apply(model, optimizer, kind)
        train(model, "gpt2", handle, optimizer)
        for parameter, state in optimizer.state.items():
            assert parameter.dtype is torch.bfloat16
            assert state["exp_avg"].dtype is dtype
            assert state["step"].item() == 4


def test_rounding_at_random_is_right_on_average_and_takes_neighbours_only() -> None:
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -3.14159, 1e-30, 65504.5, 0.0):
        wide = torch.full((40000,), value)
        rounded = round_at_random(wide, generator).float()
        low, high = torch.nextafter(torch.tensor(value), torch.tensor(-torch.inf)), torch.tensor(value)
        assert rounded.unique().numel() <= 2
        step = abs(value) * 2**-7
        assert abs(rounded.mean().item() - value) <= step / 30
        assert (rounded - high).abs().max() <= step
        assert low <= high
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(round_at_random(exact.float(), generator), exact)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(round_at_random(special).float().nan_to_num(7), special.nan_to_num(7))
    assert round_at_random(torch.randn(4, 6).t()).shape == (6, 4)


@pytest.mark.parametrize("kind", ON_CPU)
def test_a_resumed_run_is_the_run_that_was_not_stopped(kind: str) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = trained.make("llama")
        optimizer = adamw(model)
        return model, optimizer, precision.apply(model, optimizer, kind, seed=5)

    model, optimizer, handle = start()
    train(model, "llama", handle, optimizer, range(2))
    saved = [
        {k: v.clone() for k, v in model.state_dict().items()},
        _copied(optimizer.state_dict()),
        _copied(handle.state_dict()),
    ]
    wanted = train(model, "llama", handle, optimizer, range(2, 5))
    again, optimizer, handle = start()
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    assert train(again, "llama", handle, optimizer, range(2, 5)) == wanted
    assert trained.same_state(again, model)


def _copied(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value)


@pytest.mark.parametrize("family", ["llama", "resnet"])
@pytest.mark.parametrize("kind", ON_CPU)
def test_remove_restores_the_surface_and_the_types(family: str, kind: str) -> None:
    model = trained.make(family)
    optimizer = adamw(model)
    before, types = trained.surface(model), {n: t.dtype for n, t in model.state_dict().items()}
    own = dict(vars(optimizer))
    handle = precision.apply(model, optimizer, kind)
    model(**trained.batch(family, 0)).loss.backward()
    handle.remove()
    handle.remove()
    assert trained.surface(model) == before
    assert {n: t.dtype for n, t in model.state_dict().items()} == types
    assert vars(optimizer) == own
    optimizer.step()  # with the gradients that there are


def test_before_any_step_masters_give_back_the_very_weights() -> None:
    model = trained.make("gpt2")
    precision.apply(model, None, "bf16-master").remove()
    assert trained.same_state(model, trained.make("gpt2"))


@pytest.mark.parametrize("kind", ["bf16-stochastic", "bf16-master"])
def test_a_users_own_loop(kind: str) -> None:
    """``optimizer.step()`` as ever, with a scheduler made before or after."""
    results = []
    for when in ("through the handle", "scheduler before", "scheduler after"):
        model = trained.make("gpt2")
        optimizer = adamw(model)
        if when == "scheduler before":
            torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        handle = precision.apply(model, optimizer, kind)
        if when == "through the handle":
            train(model, "gpt2", handle, optimizer)
        else:
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
            for step in range(4):
                torch.manual_seed(step)
                model(**trained.batch("gpt2", step)).loss.backward()
                optimizer.step()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    schedule.step()
                optimizer.zero_grad()
        results.append(model)
    assert trained.same_state(results[0], results[1])
    assert trained.same_state(results[0], results[2])


def test_a_closure_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.apply(model, optimizer, "bf16-stochastic")
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_scaled_loss_that_overflows_leaves_the_step_out() -> None:
    model = trained.make("resnet")
    optimizer = adamw(model)
    handle = precision.apply(model, optimizer, "fp16-mixed")
    before = {name: value.clone() for name, value in model.named_parameters()}
    handle.backward(model(**trained.batch("resnet", 0)).loss * 1e36)
    assert handle.step(optimizer) is False
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    optimizer.zero_grad()
    handle.backward(model(**trained.batch("resnet", 0)).loss)
    handle.unscale(optimizer)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1e3
    assert handle.step(optimizer) is True
    assert not torch.equal(model.head.weight, before["head.weight"])


@pytest.mark.parametrize("kind", ["tf32", "fp8"])
def test_what_needs_a_gpu_says_so(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.\d, and the model is on the CPU"):
        precision.apply(nn.Linear(2, 2), None, kind)


def test_misuse() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="bf16-mixed"):
        precision.apply(model, None, "bf17")
    with pytest.raises(UnsupportedError):
        precision.apply(model, None, "tf32")
    handle = precision.apply(model, None, "bf16-mixed")
    with pytest.raises(UsageError, match="in bf16-mixed already"):
        precision.apply(model, None, "bf16")
    handle.remove()
    handle = precision.apply(model, None, "bf16-master")
    with pytest.raises(UsageError, match="fp16-mixed"):
        handle.load_state_dict({"precision": "fp16-mixed"})
    with pytest.raises(UsageError, match="float32 copies of 0 weights"):
        handle.load_state_dict({"precision": "bf16-master", "tensors": {}})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", precision.PRECISIONS[:-1])
def test_a_step_can_be_traced_for_a_gpu(kind: str) -> None:
    """As it would run there: with TF32's settings, CUDA's autocast, a scaled loss, steps in float32."""

    def build():
        model = trained.make("gpt2").cuda()
        optimizer = adamw(model)
        handle = precision.apply(model, optimizer, kind)
        inputs = {name: value.cuda() for name, value in trained.batch("gpt2", 0).items()}

        def step() -> None:
            with handle.forward():
                loss = model(**inputs).loss
            handle.backward(loss)
            assert handle.step(optimizer) is True
            optimizer.zero_grad()

        return step

    before = torch.backends.cuda.matmul.fp32_precision
    made = brim.trace(build, target="cuda", steps=2)
    torch.backends.cuda.matmul.fp32_precision = before
    weights = sum(p.numel() for p in trained.make("gpt2").parameters())
    state = sum(s.bytes for s in made.storages if s.category is Category.OPTIMIZER_STATE and s.died is None)
    parameters = sum(s.bytes for s in made.storages if s.category is Category.PARAMETER and s.died is None)
    each = {"bf16": (4, 2), "bf16-stochastic": (4, 2), "bf16-master": (8, 2)}.get(kind, (8, 4))
    assert (state, parameters) == (each[0] * weights, each[1] * weights)
