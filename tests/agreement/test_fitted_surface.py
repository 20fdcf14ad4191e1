"""What a fitted module refuses, how it lives beside others and hooks, and how it comes back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import UnsupportedError, UsageError
from brim.techniques.base import HANDLE_ATTRIBUTE

Same = Callable[..., None]


def equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


# -- what is refused


@pytest.mark.parametrize(
    "action",
    [copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("part", ["", "layers", "layers.2"])
def test_copies_are_refused_while_fitted(tools: Any, same: Same, action: Callable[[Any], object], part: str) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model, **({"vram": "160KiB"} if tools.device == "emulated" else {"ram": "160KiB"}))
    with pytest.raises(UnsupportedError, match="remove"):
        action(model.get_submodule(part))
    same(model, twin)
    handle.remove()
    if action is copy.deepcopy:
        same(copy.deepcopy(model), twin)


@pytest.mark.parametrize(
    "action",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float64),
        lambda m: m.to("meta"),
        lambda m: m.bfloat16(),
        lambda m: nn.Sequential(m).double(),
        lambda m: m.to(torch.device("meta"), torch.float16),
    ],
)
def test_casts_and_moves_are_refused(tools: Any, same: Same, action: Callable[[nn.Module], object]) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    with pytest.raises(UnsupportedError, match="move or cast"):
        action(model)
    same(model, twin)


def test_cuda_is_refused_or_absent(tools: Any) -> None:
    model = tools.make()
    tools.fit(model)
    with pytest.raises(Exception, match=r"move or cast|CUDA|NVIDIA"):
        model.cuda()


def test_moves_to_where_it_is_are_allowed(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.to(torch.float32).cpu() is model
    assert model.layers.to("cpu") is model.layers
    same(model, twin)


def test_fitting_twice_is_refused(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    handle = tools.fit(model)
    for again in (model, nn.Sequential(model), torch.compile(model, backend="eager")):
        with pytest.raises(UsageError, match="fitted already"):
            tools.fit(again)
    same(model, twin)
    handle.remove()
    handle.remove()
    tools.fit(model)
    same(model, twin)


def test_gradients_through_streamed_weights_are_refused(tools: Any, same: Same, ids: torch.Tensor) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    with pytest.raises(UnsupportedError, match="no_grad"):
        model(ids)
    same(model, twin)
    model.requires_grad_(False)
    twin.requires_grad_(False)
    assert torch.equal(model(ids), twin(ids))  # nothing requires gradients: nothing to refuse
    x = torch.randn(1, 2, 48, requires_grad=True)
    with pytest.raises(UnsupportedError, match="gradients"):
        for layer in model.layers:
            layer(x)
    same(model, twin)


def test_inference_mode(tools: Any, ids: torch.Tensor) -> None:
    twin, model = tools.make(), tools.make()
    with torch.inference_mode():
        handle = tools.fit(model)
        for _ in range(2):
            assert torch.equal(model(ids), twin(ids))
        handle.remove()
    assert torch.equal(model(ids), twin(ids))
    model(ids).sum().backward()


# -- several at once


def test_two_models_at_once(tools: Any, same: Same) -> None:
    twins, models = [tools.make(seed=s) for s in (0, 1)], [tools.make(seed=s) for s in (0, 1)]
    handles = [tools.fit(model) for model in models]
    for _ in range(3):
        for model, twin in zip(models, twins, strict=True):
            same(model, twin, steps=1)
    handles[0].remove()
    same(models[1], twins[1])
    handles[1].remove()
    same(models[0], twins[0])


def test_two_parts_of_one_model(tools: Any) -> None:
    twins, whole = nn.Sequential(tools.make(), tools.make(seed=1)), nn.Sequential(tools.make(), tools.make(seed=1))
    for part in whole:
        tools.fit(part)
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(whole[0](ids) + whole[1](ids), twins[0](ids) + twins[1](ids))


# -- hooks of the user's own


@pytest.mark.parametrize("when", ["before", "after", "after, in front"])
def test_hooks_see_the_weights_and_may_change_inputs_and_outputs(tools: Any, same: Same, when: str) -> None:
    seen: list[torch.Tensor] = []

    def pre(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        seen.append(module.up.weight.detach().clone())
        return (args[0] * 1.5,)

    def post(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        seen.append(module.down.weight.detach().clone())
        return output + module.down.bias

    def register(model: nn.Module) -> None:
        for layer in model.layers:
            layer.register_forward_pre_hook(pre, prepend=when == "after, in front")
            layer.register_forward_hook(post, prepend=when == "after, in front")

    twin, model = tools.make(), tools.make()
    register(twin)
    if when == "before":
        register(model)
    tools.fit(model)
    if when != "before":
        register(model)
    same(model, twin)
    half = len(seen) // 6
    for step in range(3):
        for fitted, wanted in zip(
            seen[2 * step * half : (2 * step + 1) * half],
            seen[(2 * step + 1) * half : (2 * step + 2) * half],
            strict=True,
        ):
            assert torch.equal(fitted, wanted)


def test_a_hook_that_looks_at_all_weights_in_the_middle_of_a_step(tools: Any, same: Same) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    sums: dict[int, list[float]] = {id(twin): [], id(model): []}
    for module in (twin, model):
        module.layers[2].register_forward_hook(
            lambda *_, m=module: sums[id(m)].append(float(sum(p.detach().sum() for p in m.parameters())))
        )
    same(model, twin)
    assert sums[id(twin)] == sums[id(model)]


# -- coming back


def surface(model: nn.Module) -> dict[str, Any]:
    """What of every module the user could see: attribute names, and how many hooks of which kind."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}:{name}"] = len(value) if isinstance(value, dict) and "hooks" in name else None
    return found


def test_remove_gives_back_exactly_what_was(tools: Any, same: Same, ids: torch.Tensor) -> None:
    twin, model = tools.make(tied=True), tools.make(tied=True)
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    before = surface(model)
    threads = set(threading.enumerate())
    handle = tools.fit(model)
    same(model, twin)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert getattr(model, HANDLE_ATTRIBUTE) is handle
    handle.remove()
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert surface(model) == before
    assert not set(threading.enumerate()) - threads
    assert equal_states(model.state_dict(), twin.state_dict())
    assert all(p.is_leaf and p.requires_grad and not p.is_shared() for p in model.parameters())
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {p.numel() * 4 for p in model.parameters()}
    for module in (model, twin):
        module(ids).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_an_optimizer_made_before_goes_on_after(tools: Any, same: Same, ids: torch.Tensor) -> None:
    twin, model = tools.make(), tools.make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model)]
    for _ in range(2):
        for module, optimizer in zip((twin, model), optimizers, strict=True):
            optimizer.zero_grad()
            module(ids).square().mean().backward()
            optimizer.step()
        handle = tools.fit(model)
        same(model, twin)
        handle.remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["layers.1", "layers.3.drop", "layers.5.down", ""])
def test_an_error_in_a_forward_leaves_the_model_usable(
    tools: Any, same: Same, ids: torch.Tensor, error: type[BaseException], where: str
) -> None:
    twin, model = tools.make(), tools.make()
    tools.fit(model)
    same(model, twin, steps=1)

    def fail(*_: object) -> None:
        raise error("on purpose")

    for _ in range(5):
        failing = model.get_submodule(where).register_forward_hook(fail)
        with torch.no_grad(), pytest.raises(error, match="on purpose"):
            model(ids)
        failing.remove()
        same(model, twin)


def test_a_model_that_is_dropped_takes_its_threads_with_it(tools: Any, ids: torch.Tensor) -> None:
    gc.collect()
    before = set(threading.enumerate())
    model = tools.make()
    tools.fit(model)
    with torch.no_grad():
        model(ids)
    assert set(threading.enumerate()) - before
    del model
    for _ in range(100):  # a load under way keeps its memory until it is done
        gc.collect()
        if not set(threading.enumerate()) - before:
            return
        time.sleep(0.05)
    raise AssertionError(f"{set(threading.enumerate()) - before} are still there")


def test_fit_takes_modules_and_known_options_only() -> None:
    with pytest.raises(UsageError, match=r"nn\.Module"):
        brim.fit([nn.Linear(2, 2)], device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        brim.fit(nn.Linear(2, 2), vramm="1GiB")  # type: ignore[call-arg]
