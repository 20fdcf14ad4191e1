"""Optimizer offload: the optimizer's own surface while it is fitted, what is refused, and the figures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.core.hardware import DISK, RAM
from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory
from brim.planning.strategy.state import optimizer_numbers, restore_optimizer
from brim.techniques.offloaded_tensor import OffloadedTensor
from brim.techniques.optimizer_offload.state_blocks import state_blocks
from brim.techniques.optimizer_offload.technique import apply
from support.offloaded import (
    ON_GPU,
    OPTIMIZERS,
    PLACES,
    Lion,
    assert_same,
    assert_same_state,
    backward,
    batch,
    groups,
    machine,
    make,
    offloaded,
    train,
)


@pytest.fixture
def memory(folder: Path) -> Iterator[Memory]:
    made = machine("cpu", folder)
    yield made
    made.close()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_schedulers_and_hooks_work(before: bool, early: bool, memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(groups(m), lr=1e-2) for m in (model, twin))
    calls: list[tuple[str, int]] = []
    optimizer.register_step_pre_hook(lambda o, a, k: calls.append(("pre", len(o.param_groups[0]["params"]))))
    optimizer.register_step_post_hook(lambda o, a, k: calls.append(("post", len(o.param_groups[1]["params"]))))
    schedule: Callable[[Any], Any] = lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)  # noqa: E731
    mine = schedule(optimizer) if before else None
    with offloaded(model, optimizer, memory, states="disk") as handle:
        mine, other = mine or schedule(optimizer), schedule(plain)
        for step in range(5):
            backward(model, step, final=handle.final if early else None)
            backward(twin, step)
            for its, its_schedule in ((optimizer, mine), (plain, other)):
                its.step()
                its_schedule.step()
                its.zero_grad()
        assert_same(model, twin)
    assert calls == [("pre", 9), ("post", 11)] * 5
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert ("step" in vars(optimizer)) and "brim" not in vars(optimizer)  # the scheduler's
    train(model, optimizer)
    train(twin, plain)
    assert_same(model, twin)


def test_nothing_is_left_on_what_was_fitted(memory: Memory) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    before = set(vars(optimizer))
    with offloaded(model, optimizer, memory, states="disk", gradients="disk") as handle:
        train(model, optimizer, final=handle.final)
        with pytest.raises(UsageError, match="fitted already"):
            apply(model, optimizer, memory, states="disk")
    assert set(vars(optimizer)) == before
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_state_dict_post_hooks and not optimizer._optimizer_load_state_dict_post_hooks
    handle.remove()


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_users_load_state_dict_is_called_and_stays(memory: Memory, early: bool) -> None:
    model, calls = make(), []
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())

    def wrap() -> None:
        inner = optimizer.load_state_dict

        def load(state: dict[str, Any]) -> None:
            calls.append(state)
            inner(state)

        optimizer.load_state_dict = load  # type: ignore[method-assign]

    if early:
        wrap()
    with offloaded(model, optimizer, memory, states="disk"):
        if not early:
            wrap()
        optimizer.load_state_dict(saved)
        torch.optim.Optimizer.load_state_dict(optimizer, saved)  # as a subclass calls it
        assert any(type(v) is OffloadedTensor for state in optimizer.state.values() for v in state.values())
        assert_same_state(optimizer.state_dict(), saved)
    optimizer.load_state_dict(saved)
    assert len(calls) == 2


def test_a_parameter_that_comes_later_is_stepped_where_it_is(memory: Memory) -> None:
    model, twin = make(), make()
    for one in (model, twin):
        one.unused.requires_grad_(False)
    optimizer, plain = (torch.optim.AdamW(m.layers.parameters(), lr=1e-2) for m in (model, twin))
    with offloaded(model, optimizer, memory, states="disk"):
        for one, its in ((model, optimizer), (twin, plain)):
            its.add_param_group({"params": list(one.head.parameters()), "lr": 0.1})
            train(one, its)
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", ["cpu", "emulated"])
def test_states_are_loaded_into_a_fitted_optimizer_and_out_of_one(kind: str, folder: Path) -> None:
    twin = make()
    plain = OPTIMIZERS["rmsprop"](groups(twin))
    train(twin, plain)
    model = make()
    model.load_state_dict(twin.state_dict())
    optimizer = OPTIMIZERS["rmsprop"](groups(model))
    with offloaded(model, optimizer, machine(kind, folder), states="disk") as handle:
        train(model, optimizer, steps=[7])  # to be forgotten
        model.load_state_dict(twin.state_dict())
        optimizer.load_state_dict(plain.state_dict())
        assert any(type(v) is OffloadedTensor for state in optimizer.state.values() for v in state.values())
        assert_same_state(optimizer.state_dict(), plain.state_dict())
        train(model, optimizer, steps=range(4, 7), final=handle.final)
        train(twin, plain, steps=range(4, 7))
        assert_same(model, twin)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "nadam", "lion", "adagrad", "sgd momentum"])
@pytest.mark.parametrize(
    ("keep", "place"), [(False, ("cpu", "disk")), (True, ("emulated", "ram")), (True, ("emulated", ON_GPU))]
)
def test_states_go_one_by_one_into_a_checkpoint_and_back(
    name: str, keep: bool, place: tuple[str, str], folder: Path
) -> None:
    model = make()
    optimizer = OPTIMIZERS[name](groups(model))
    with offloaded(model, optimizer, machine("cpu", folder), states="keep" if keep else "disk") as handle:
        train(model, optimizer)
        saved = {key: value.clone() for key, value in handle.iter_state()}
        numbers = optimizer_numbers(optimizer, {p: key for key, p in model.named_parameters()})
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        want = train(model, optimizer, steps=range(4, 7))
    twin = make(seed=5)
    twin.load_state_dict(weights)
    resumed = OPTIMIZERS[name](groups(twin))
    with offloaded(twin, resumed, machine(place[0], folder), states=place[1]) as handle:
        names = {p: key for key, p in twin.named_parameters()}
        restore_optimizer(resumed, names, numbers, saved.items(), handle.load_state)
        assert [name for name, _ in handle.iter_state()] == list(saved)
        assert train(twin, resumed, steps=range(4, 7)) == want
        assert_same(twin, model)
        with pytest.raises(UsageError, match="nonsense"):
            handle.load_state("embed.weight.nonsense", torch.zeros(1))
    assert_same_state(resumed.state_dict(), optimizer.state_dict())


def test_blocks_that_are_to_stay_stay(memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    names = [block.name for block in state_blocks(model, optimizer, block_bytes=3000)]
    assert names[0] == "embed.weight"
    with offloaded(model, optimizer, memory, states="disk", keep=[names[0]]):
        train(model, optimizer)
        assert type(optimizer.state[model.embed.weight]["exp_avg"]) is torch.Tensor
        assert type(optimizer.state[model.head.weight]["exp_avg"]) is OffloadedTensor
        with pytest.raises(UnsupportedError, match="iter_state"):
            optimizer.state[model.head.weight]["exp_avg"].norm()
    train(twin, plain)
    assert_same(model, twin)
    with pytest.raises(UsageError, match="nobody"):
        apply(model, optimizer, memory, states="disk", keep=["nobody"])


def test_a_state_that_was_there_before_is_taken_over(memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, twin))
    for one, its in ((model, optimizer), (twin, plain)):
        train(one, its)
    with offloaded(model, optimizer, memory, states="disk"):
        assert all(type(state["exp_avg"]) is OffloadedTensor for state in optimizer.state.values())
        train(model, optimizer, steps=range(4, 6))
    train(twin, plain, steps=range(4, 6))
    assert_same(model, twin)


def test_strides_of_states_are_kept(memory: Memory) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3)).to(memory_format=torch.channels_last)

    model, twin = build(), build()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    with offloaded(model, optimizer, memory, states="disk", gradients="disk") as handle:
        for step in range(3):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            with handle.final():
                model(x).square().sum().backward()
            twin(x).square().sum().backward()
            optimizer.step()
            plain.step()
            plain.zero_grad()
            optimizer.zero_grad()
    assert_same(model, twin)
    assert_same_state(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_a_gradient_scaler_works_beside_it(name: str, memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = OPTIMIZERS[name](groups(model)), OPTIMIZERS[name](groups(twin))
    with offloaded(model, optimizer, memory, states="disk"):
        for one, its in ((model, optimizer), (twin, plain)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=2)
            for step in range(40):
                scaler.scale(one(batch(step))).backward()
                scaler.step(its)
                scaler.update()
                its.zero_grad()
        assert_same(model, twin)
        assert_same_state(optimizer.state_dict(), plain.state_dict())


def test_a_gradient_scaler_sees_gradients_that_are_away(memory: Memory) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), fused=False) for m in (model, twin))
    with offloaded(model, optimizer, memory, states="disk", gradients="disk"):
        for fitted, its in ((model, optimizer), (twin, plain)):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            for step in range(3):
                loss = fitted(batch(step)) * (float("inf") if step == 1 else 1)  # this one is to be skipped
                scaler.scale(loss).backward()
                scaler.step(its)
                scaler.update()
                its.zero_grad()
            assert scaler.get_scale() == 32.0
        assert_same(model, twin)


# -- what is refused


class Counting(torch.optim.SGD):
    """Counts its steps in a group: twice as fast when there are two blocks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["turn"] = group.get("turn", 0) + 1
            group["lr"] = 0.1 / group["turn"]
        return super().step(closure)


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(p.grad.norm() for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / norm, alpha=-group["lr"])


class Halving(torch.optim.SGD):
    """Nobody knows how often it calls a closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Counting, Normed])
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(kind: Any, memory: Memory) -> None:
    model = make()
    optimizer = kind(list(model.parameters()))
    before = dict(vars(optimizer))
    with pytest.raises(UnsupportedError, match="block by block"):
        apply(model, optimizer, memory, states="disk")
    assert vars(optimizer) == before
    assert memory.ram.held_bytes == 0


def test_closures_unknown_choices_and_foreign_steps_are_refused(memory: Memory) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    for options_ in ({"states": "vram"}, {"states": "disk", "gradients": "attic"}):
        with pytest.raises(UsageError, match="Known: "):
            apply(model, optimizer, memory, **options_)
    with offloaded(model, optimizer, memory, states="disk"):
        assert optimizer.step(lambda: 7.0) == optimizer.step(closure=lambda: 7.0) == 7.0
    foreign = Halving(model.parameters())
    with offloaded(model, foreign, memory, states="disk"), pytest.raises(UnsupportedError, match="closure"):
        foreign.step(lambda: 7.0)
    optimizer.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="replaced"):
        apply(model, optimizer, memory, states="disk")


# -- figures


def test_written_bytes_are_known_before_and_after(folder: Path) -> None:
    model = make()
    model.unused.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    memory = machine("cpu", folder)
    with offloaded(model, optimizer, memory, states="disk", gradients="disk") as handle:
        foreseen = handle.written_bytes_per_step
        for _ in range(2):
            before = memory.recorder.copied_bytes.get((RAM, DISK), 0)
            train(model, optimizer, steps=[0])
            handle._storage.states.records.settle()
            assert memory.recorder.copied_bytes[RAM, DISK] - before == handle.written_bytes_per_step == foreseen
        train(model, optimizer, steps=[1], parts=3)
        assert handle.written_bytes_per_step > foreseen


class Slots:
    """Weight streaming as far as the optimizer sees it: weights are NaN but for the time of an update."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = [(name, list(part.parameters())) for name, part in model.layers.named_children()]
        self.homes = {id(p): p.data.clone() for _, held in self.blocks for p in held}
        self.inside: list[nn.Parameter] = []

    def updating(self, parameters: Any) -> Any:
        return _Bound(self, parameters)

    def rests_in_ram(self, parameters: Any) -> bool:
        return False

    def updating_at_rest(self, parameters: Any) -> Any:
        raise AssertionError("they do not rest in RAM")

    def is_updated_by(self, optimizer: torch.optim.Optimizer, parameters: Any) -> None:
        """Weights here are at home whenever they are not bound."""

    def settle(self) -> None:
        """They need not travel."""


class _Bound:
    def __init__(self, slots: Slots, parameters: Any) -> None:
        self.slots, self.parameters = slots, [p for p in parameters if id(p) in slots.homes]

    def __enter__(self) -> None:
        assert not self.slots.inside
        self.slots.inside = self.parameters
        for p in self.parameters:
            p.data = self.slots.homes[id(p)].clone()

    def __exit__(self, *_: object) -> None:
        self.slots.inside = []
        for p in self.parameters:
            self.slots.homes[id(p)] = p.data
            p.data = torch.full_like(p, float("nan"))


@pytest.mark.parametrize(("kind", "states"), PLACES)
@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_streamed_weights_are_updated_where_they_are_bound(kind: str, states: str, early: bool, folder: Path) -> None:
    model, twin = make(), make()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    slots = Slots(model)
    with offloaded(model, optimizer, machine(kind, folder), states=states, streaming=slots) as handle:
        assert [block.name for block in handle.blocks.values()][:4] == [name for name, _ in slots.blocks]
        for step in range(3):
            for p in model.parameters():  # forward and backward have the weights
                p.data = slots.homes.get(id(p), p.data)
            loss = model(batch(step))
            with handle.final() if early else torch.enable_grad():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        train(twin, plain, steps=range(3))
        for p in model.parameters():
            p.data = slots.homes.get(id(p), p.data)
        assert_same(model, twin)


def test_a_python_number_in_a_state_survives(memory: Memory) -> None:
    model = make()
    optimizer = Lion(model.parameters())
    with offloaded(model, optimizer, memory, states="disk"):
        train(model, optimizer)
    assert optimizer.state[model.embed.weight]["count"] == 4
