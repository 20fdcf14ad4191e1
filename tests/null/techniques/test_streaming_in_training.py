"""What autograd keeps of a slot comes back in backward, whatever the user does with the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.techniques.streaming.offloaded_parameter import OffloadedParameter
from brim.techniques.streaming.weight_streaming import WeightStreaming
from support.streamed_training import (
    IDS,
    LAYERS,
    WIDTH,
    Net,
    assert_equal,
    gradients,
    loss_of,
    wanted_gradients,
)


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_are_those_of_the_module(fit: Callable[..., WeightStreaming], slots: int, tied: bool) -> None:
    net = Net(tied=tied)
    fit(net, slots=slots)
    for _ in range(3):
        loss_of(net).backward()
        assert_equal(gradients(net), wanted_gradients(tied=tied))


@pytest.mark.parametrize("repeats", [False, True], ids=["", "repeated"])
@pytest.mark.parametrize("order", [[0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 1, 2, 5, 0], [5, 3, 1], [4, 4, 4]])
def test_layers_in_any_order_and_more_than_once(
    fit: Callable[..., WeightStreaming], order: list[int], repeats: bool
) -> None:
    net, twin = Net(), Net()
    fit(net)
    for model in (net, twin):
        model.order = order
        for layer in model.layers:
            layer.repeats = repeats
    for _ in range(3):
        for model in (net, twin):
            loss_of(model).backward()
        assert_equal(gradients(net), gradients(twin))


def test_layers_that_share_weights_and_a_layer_that_calls_another(fit: Callable[..., WeightStreaming]) -> None:
    net, twin = Net(), Net()
    for model in (net, twin):
        model.layers[1].up.weight = model.layers[4].up.weight
        inner = model.layers[5]
        model.layers[2].down.register_forward_hook(lambda _, args, output, inner=inner: output + inner(output))
    fit(net, slots=4)
    for _ in range(3):
        for model in (net, twin):
            loss_of(model).backward()
        assert_equal(gradients(net), gradients(twin))


def test_a_handle_for_inference_refuses_gradients(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net, training=False)
    with pytest.raises(UnsupportedError, match="for inference only"):
        loss_of(net)
    with torch.no_grad():
        assert torch.equal(net(IDS), Net()(IDS))


def test_nothing_is_waited_for_once_a_step_is_known(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    handle = fit(net)
    loss_of(net).backward()
    assert handle.misses <= 2  # a backward pass is foreseen the first time
    for _ in range(2):
        loss_of(net).backward()
    known = handle.misses
    for _ in range(5):
        loss_of(net).backward()
    assert handle.misses == known


def test_frozen_weights_go_one_way_and_twice_a_step_at_most(kind: str, fit: Callable[..., WeightStreaming]) -> None:
    net = Net().requires_grad_(False)
    net.layers[0].extra = nn.Parameter(torch.zeros(WIDTH))
    net.layers[0].register_forward_hook(lambda layer, args, output: output + layer.extra)
    handle = fit(net)
    assert "layers.0.extra" not in {name for s in handle._streamed_blocks for name in s.block.tensors}
    bytes = sum(s.store.layout.bytes for s in handle._streamed_blocks if s.block.name != "embed")
    for _ in range(3):
        loss_of(net).backward()
    moved = handle.memory.recorder.copied_bytes
    before = dict(moved)
    for _ in range(4):
        loss_of(net).backward()
    for way, count in moved.items():
        assert (count - before[way]) <= 4 * 2 * bytes
        assert way in {(DISK, RAM), (RAM, VRAM)}


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("cut", [False, True], ids=["layers", "parts"])
def test_a_forward_that_is_repeated_past_all_hooks(
    fit: Callable[..., WeightStreaming], apart: bool, cut: bool
) -> None:
    """``apart``: parameters at rest have no memory, as it is where kernels work on another device."""
    net = Net()
    for layer in net.layers:
        layer.repeats = True
    handle = fit(net, **({"largest_bytes": 9000} if cut else {}))
    assert (len(handle._streamed_blocks) > LAYERS + 2) == cut
    if apart:
        for streamed in handle._streamed_blocks:
            if not streamed.block.lookups:
                streamed.apart = True
                streamed.rest()
                assert type(streamed.parameters[0]) is OffloadedParameter
    for _ in range(3):
        loss_of(net).backward()
        assert_equal(gradients(net), wanted_gradients())


def test_a_graph_can_be_used_again_and_outlives_the_handle(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    handle = fit(net)
    loss, wanted = loss_of(net), wanted_gradients()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert_equal(gradients(net), wanted)
    with torch.no_grad():
        net(IDS)
    found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted.values(), strict=True))
    handle.remove()
    loss.backward()
    assert_equal(gradients(net), wanted)


def test_gradients_of_gradients(fit: Callable[..., WeightStreaming]) -> None:
    def penalty(net: nn.Module) -> None:
        first = torch.autograd.grad(loss_of(net), list(net.parameters()), create_graph=True)
        sum(gradient.pow(2).sum() for gradient in first).backward()

    net, twin = Net(), Net()
    fit(net)
    for model in (net, twin):
        penalty(model)
    assert_equal(gradients(net), gradients(twin))


def test_two_forward_passes_before_two_backward_passes(fit: Callable[..., WeightStreaming]) -> None:
    net, twin = Net(), Net()
    fit(net)
    for model in (net, twin):
        first, second = loss_of(model), loss_of(model)
        first.backward()
        second.backward()
    assert_equal(gradients(net), gradients(twin))


def test_saved_tensors_looked_at_outside_of_backward_are_whole(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net)
    logits = net(IDS)
    node = logits.grad_fn
    while "Mm" not in node.name() and "Addmm" not in node.name():
        node = node.next_functions[0][0]
    kept = node._saved_mat2
    with torch.no_grad():
        net(IDS)
    assert torch.equal(kept, Net().head.weight.t())


def test_a_change_between_forward_and_backward_is_an_error(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net)
    loss = loss_of(net)
    with torch.no_grad():
        net.layers[2].up.weight.add_(1)
    with pytest.raises(UsageError, match=r"layers\.2\.up\.weight"):
        loss.backward()
    net.zero_grad()
    with torch.no_grad():
        net.layers[2].up.weight.sub_(1)
    loss_of(net).backward()
    twin = Net()
    with torch.no_grad():
        twin.layers[2].up.weight.add_(1).sub_(1)
    loss_of(twin).backward()
    assert_equal(gradients(net), gradients(twin))


def test_autograd_keeps_nothing_of_what_is_streamed(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    handle = fit(net)
    slots = {slot.buffer.tensor.untyped_storage()._cdata for slot in handle._streamed_blocks.ring._slots}
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        loss = loss_of(net)
    assert seen  # the user's own hooks see all the others
    assert slots.isdisjoint({tensor.untyped_storage()._cdata for tensor in seen})
    loss.backward()
    assert_equal(gradients(net), wanted_gradients())


# -- what goes wrong


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_after_an_error_or_ctrl_c_it_works_again(
    fit: Callable[..., WeightStreaming], error: type[BaseException], place: str
) -> None:
    net = Net()
    handle = fit(net)
    failing = [True]

    def fail(*_: object) -> None:
        if failing[0]:
            raise error

    for index in (0, 3, 5):
        if place == "forward":
            hook = net.layers[index].down.register_forward_pre_hook(fail)
        else:
            hook = net.layers[index].down.weight.register_hook(fail)
        failing[0] = True
        with pytest.raises(error):
            loss_of(net).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        failing[0] = False
        hook.remove()
        net.zero_grad()
        loss_of(net).backward()
        assert_equal(gradients(net), wanted_gradients())
    for streamed in handle._streamed_blocks:
        assert streamed.uses == 0
