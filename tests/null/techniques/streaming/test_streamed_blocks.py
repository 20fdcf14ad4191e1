"""StreamedBlock weights are changed block by block, read wherever they are, and counted for the planner."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UsageError
from brim.memory.transfer import ThreadEngine
from brim.techniques.blocks import find_blocks
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.weight_streaming import Weights, WeightStreaming
from brim.techniques.weights import place_weights
from support.streamed_training import (
    CHOICES,
    IDS,
    LAYERS,
    WIDTH,
    WORDS,
    Net,
    assert_equal,
    gradients,
    kept_gradients,
    loss_of,
    memory_for,
    plan_of,
    wanted_gradients,
)

# -- updating


def step_by_block(handle: WeightStreaming, optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer does, one block after the other."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {id(p): p.grad for p in parameters}
    for name, block in handle.blocks:
        for parameter in parameters:
            parameter.grad = kept[id(parameter)] if any(parameter is p for p in block) else None
        with handle.updating(name):
            optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_updated_block_by_block(kind: str, fit: Callable[..., WeightStreaming], tied: bool, apart: bool) -> None:
    net, twin = Net(tied=tied), Net(tied=tied)
    handle = fit(net)
    if apart:
        for streamed in handle._streamed_blocks:
            streamed.apart = not streamed.block.lookups
            streamed.rest()
    assert sorted(id(p) for _, block in handle.blocks for p in block) == sorted(id(p) for p in net.parameters())
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (net, twin))
    for _ in range(4):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        step_by_block(handle, ours)
        theirs.step()
        theirs.zero_grad()
    handle.settle()
    assert_equal(net.state_dict(), twin.state_dict())
    moved = handle.memory.recorder.copied_bytes
    assert moved[RAM, DISK] > 0 if "ram" not in kind else moved[VRAM, RAM] > 0
    handle.remove()
    assert_equal(dict(net.named_parameters()), dict(twin.named_parameters()))


def test_updated_during_backward(fit: Callable[..., WeightStreaming]) -> None:
    net, twin = Net(), Net()
    handle = fit(net)

    def descend(model: nn.Module, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def ours(parameter: nn.Parameter) -> None:
        with handle.updating([parameter]):
            descend(net, parameter)

    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        one.register_post_accumulate_grad_hook(ours)
        other.register_post_accumulate_grad_hook(lambda p: descend(twin, p))
    for _ in range(4):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    assert_equal(net.state_dict(), twin.state_dict())


@pytest.mark.parametrize("during", [False, True], ids=["after", "during backward"])
def test_a_fused_optimizer_of_the_users(fit: Callable[..., WeightStreaming], during: bool) -> None:
    """It writes to parameters without telling autograd."""
    net, twin = Net(), Net()
    fit(net)
    optimizers = [
        {p: torch.optim.AdamW([p], lr=1e-2, fused=True) for p in model.parameters()} for model in (net, twin)
    ]

    def step(parameter: nn.Parameter) -> None:
        for made in optimizers:
            if parameter in made:
                made[parameter].step()
                parameter.grad = None

    if during:
        for parameter in [*net.parameters(), *twin.parameters()]:
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        if not during:
            for parameter in [*net.parameters(), *twin.parameters()]:
                step(parameter)
    assert_equal(net.state_dict(), twin.state_dict())


def test_what_a_step_has_written_back_is_not_read_and_written_once_more(
    fit: Callable[..., WeightStreaming], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, twin = Net(), Net()
    handle = fit(net)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (net, twin))
    offload = optimizer_offload.apply(net, ours, handle.memory, states="ram", gradients="ram", streaming=handle)
    again, adopt_changes = list[bool](), StreamedBlock.adopt_changes

    def counted(streamed: StreamedBlock) -> bool:
        again.append(adopt_changes(streamed))
        return again[-1]

    monkeypatch.setattr(StreamedBlock, "adopt_changes", counted)
    for _ in range(3):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(again)
    offload.remove()
    loss_of(net).backward()  # the user's own step from now on: it writes to weights at rest
    loss_of(twin).backward()
    ours.step()
    theirs.step()
    assert torch.equal(loss_of(net), loss_of(twin))
    assert any(again)


class _Late:
    """A condition that takes its time: whatever waits for it comes later than the code after it."""

    done = False

    def wait(self) -> None:
        time.sleep(0.02)


@pytest.fixture
def slow_way_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves the compute tier is long on its way."""
    copy, write = ThreadEngine.copy, ThreadEngine.write

    def late_copy(
        self: Any, source: Any, target: Any, label: str, after: Any, way: tuple[str, str], moves: Any = ()
    ) -> Any:
        return copy(self, source, target, label, [*after, _Late()] if way[1] == RAM else after, way, moves)

    def late_write(self: Any, source: Any, extent: Any, label: str, after: Any) -> Any:
        return write(self, source, extent, label, [*after, _Late()])

    monkeypatch.setattr(ThreadEngine, "copy", late_copy)
    monkeypatch.setattr(ThreadEngine, "write", late_write)


@pytest.mark.thorough
@pytest.mark.parametrize("during", [False, True], ids=["step", "final"])
def test_weights_are_new_where_they_rest_once_a_step_returns(
    fit: Callable[..., WeightStreaming], slow_way_home: None, during: bool
) -> None:
    """Whoever reads, changes or loads them then is not overtaken by what was still on its way."""
    net, twin = Net(), Net()
    handle = fit(net)
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (net, twin))
    offload = optimizer_offload.apply(net, ours, handle.memory, states="ram", gradients="ram", streaming=handle)
    begin = {name: value.clone() for name, value in twin.state_dict().items()}
    for what in ("read", "change", "load", "nothing"):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses), what
        with offload.final() if during else contextlib.nullcontext():
            losses[0].backward()
        losses[1].backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for model in (net, twin):
            if what == "change":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            elif what == "load":
                model.load_state_dict(begin)
        assert_equal(dict(net.named_parameters()), dict(twin.named_parameters()))
    offload.remove()


def test_a_weight_changed_in_forward_is_new_where_it_rests(
    fit: Callable[..., WeightStreaming], slow_way_home: None
) -> None:
    net, twin = Net(), Net()
    fit(net)

    def halve(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            module.scale.mul_(0.5)

    for model in (net, twin):
        model.layers[0].register_forward_pre_hook(halve)
        loss_of(model)
        model.layers[0].scale.data.add_(1.0)
    assert torch.equal(loss_of(net), loss_of(twin))
    assert_equal(dict(net.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_mixture_trains_as_it_would_whole(data: st.DataObject) -> None:
    """Any order of layers, some repeated in backward, some frozen, updated at once or block by block."""
    tied, by_block = data.draw(st.booleans()), data.draw(st.booleans())
    order = data.draw(st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=9))
    repeated, frozen = (data.draw(st.sets(st.integers(0, LAYERS - 1))) for _ in range(2))
    net, twin = Net(tied=tied), Net(tied=tied)
    for model in (net, twin):
        model.order = order
        for index, layer in enumerate(model.layers):
            layer.repeats = index in repeated
            layer.requires_grad_(index not in frozen)
    partition, place = find_blocks(net), data.draw(st.sampled_from(sorted(CHOICES)))
    plan = plan_of(partition, CHOICES[place], data.draw(st.integers(2, 4)))
    handle = place_weights(net, partition, plan, memory_for(place), Weights(), training=True)
    ours, theirs = (
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2) for model in (net, twin)
    )
    for _ in range(3):
        losses = [loss_of(net), loss_of(twin)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert_equal(kept_gradients(net), kept_gradients(twin))
        if by_block:
            step_by_block(handle, ours)
        else:
            ours.step()
            ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
    assert_equal(net.state_dict(), twin.state_dict())
    handle.remove()
    assert_equal(net.state_dict(), twin.state_dict())


def test_what_does_not_belong_to_the_model_is_not_updated(fit: Callable[..., WeightStreaming]) -> None:
    handle = fit(Net())
    with pytest.raises(UsageError, match="'nothing'"), handle.updating("nothing"):
        pass
    with (
        pytest.raises(UsageError, match="1 of them are not in the model"),
        handle.updating([nn.Parameter(torch.ones(1))]),
    ):
        pass


def test_a_graph_that_is_dropped_keeps_nothing(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net)
    logits = net(IDS)
    node = weakref.ref(logits)
    del logits
    gc.collect()
    assert node() is None
    loss_of(net).backward()
    assert_equal(gradients(net), wanted_gradients())


@pytest.mark.parametrize("padding", [None, 3])
def test_a_table_elsewhere_gets_the_gradient_of_an_embedding(kind: str, padding: int | None) -> None:
    twin, table = (nn.Embedding(WORDS, WIDTH, padding_idx=padding, scale_grad_by_freq=True) for _ in range(2))
    with torch.no_grad():
        table.weight.copy_(twin.weight)
    net = nn.Sequential(table)
    partition, memory = find_blocks(net), memory_for(kind)
    handle = place_weights(net, partition, plan_of(partition, CHOICES[kind], 2), memory, Weights(), training=True)
    (streamed,) = handle._streamed_blocks
    streamed.apart = True
    streamed.rest()
    handle._guards.look_up(table)
    ids = torch.tensor([[1, 3, 3], [1, 1, 7]])
    for module in (twin, net):
        module(ids).pow(2).sum().backward()
    assert torch.equal(table.weight.grad, twin.weight.grad)
    handle.remove()


def test_values_can_be_read_wherever_they_are(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    net.register_buffer("count", torch.arange(3.0))
    handle = fit(net)
    twin = Net()
    for name, value in twin.named_parameters():
        assert torch.equal(handle.value(name), value)
    assert torch.equal(handle.value("count"), torch.arange(3.0))
    with torch.no_grad():
        net.layers[1].scale.add_(1)
        twin.layers[1].scale.add_(1)
    assert torch.equal(handle.value("layers.1.scale"), twin.layers[1].scale)
    with handle.updating("layers.1"):
        assert torch.equal(handle.value("layers.1.scale"), twin.layers[1].scale)
    with pytest.raises(KeyError):
        handle.value("nothing")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_compiled(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net)
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        loss_of(compiled).backward()
        assert_equal(gradients(net), wanted_gradients())
    torch.compiler.reset()
