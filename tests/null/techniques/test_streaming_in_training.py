"""What autograd keeps of a slot comes back in backward, whatever the user does with the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.core import Decision, Plan, Promise, Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.memory.tiers import Memory, cpu_memory, emulated_memory
from brim.techniques.blocks import Partition, adapters, find_blocks
from brim.techniques.weight_streaming import (
    FROM_DISK,
    FROM_RAM,
    NAME,
    RING_SLOTS,
    Weights,
    WeightStreaming,
    apply,
    options,
)

WIDTH, LAYERS, WORDS = 32, 6, 40


class Layer(nn.Module):
    """``scale`` belongs to the layer itself; with ``repeats`` its forward is repeated in backward, past all hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.repeats and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x)


IDS = torch.arange(12).view(3, 4)


def loss_of(net: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten())


def plan_of(partition: Partition, choice: str, slots: int) -> Plan:
    return Plan(
        model="net",
        hardware="this",
        task="train",
        budget_bytes={},
        decisions=tuple(
            Decision(technique=NAME, block=b.name, choice=choice, bytes=b.bytes) for b in partition.blocks
        ),
        promise=Promise(peak_bytes={}, step_s=1.0, bound_s=1.0, limited_by="link"),
        settings={RING_SLOTS: slots},
    )


def memory_for(kind: str) -> Memory:
    timeline = Timeline("training", measured=True)
    if kind == "disk":
        return cpu_memory(timeline, ram_bytes=1 << 20)
    return emulated_memory(timeline, vram_bytes=1 << 20, ram_bytes=1 << 20)


CHOICES = {"disk": FROM_DISK, "ram": FROM_RAM, "three tiers": FROM_DISK}


@pytest.fixture(params=list(CHOICES))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if Path("/dev/shm").is_dir():
        monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm")
    return str(request.param)


@pytest.fixture
def fit(kind: str) -> Iterator[Callable[..., WeightStreaming]]:
    handles: list[WeightStreaming] = []

    def fit(net: nn.Module, *, slots: int = 2, training: bool = True, **parts: Any) -> WeightStreaming:
        partition = find_blocks(net, stay=adapters(net), **parts)
        plan, memory = plan_of(partition, CHOICES[kind], slots), memory_for(kind)
        handles.append(apply(net, partition, plan, memory, Weights(), training=training))
        return handles[-1]

    yield fit
    for handle in handles:
        handle.remove()


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    made = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return made


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def wanted_gradients(**options: Any) -> dict[str, torch.Tensor]:
    twin = Net(**options)
    loss_of(twin).backward()
    return gradients(twin)


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
    assert "layers.0.extra" not in {name for s in handle._streamed for name in s.block.tensors}
    bytes = sum(s.home.layout.bytes for s in handle._streamed if s.block.name != "embed")
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
    """``apart``: parameters at rest are NaN, as they are where kernels work on another device."""
    net = Net()
    for layer in net.layers:
        layer.repeats = True
    handle = fit(net, **({"largest_bytes": 9000} if cut else {}))
    assert (len(handle._streamed) > LAYERS + 2) == cut
    if apart:
        for streamed in handle._streamed:
            if not streamed.block.lookups:
                streamed.apart = True
                streamed.rest()
                assert streamed.parameters[0].isnan().all()
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
    slots = {slot.buffer.tensor.untyped_storage()._cdata for slot in handle._ring._slots}
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
    for streamed in handle._streamed:
        assert streamed.uses == 0


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
        for streamed in handle._streamed:
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


def test_what_does_not_belong_to_the_model_is_not_updated(fit: Callable[..., WeightStreaming]) -> None:
    handle = fit(Net())
    with pytest.raises(UsageError, match="'nothing'"), handle.updating("nothing"):
        pass
    with pytest.raises(UsageError, match="1 are not the model's"), handle.updating([nn.Parameter(torch.ones(1))]):
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


def test_options_count_two_loads_and_the_way_back_of_what_is_trained() -> None:
    net = Net()
    partition = find_blocks(net)
    names = [block.name for block in partition.blocks]
    rows = options(partition, VRAM, trained=["layers.1.up.weight"])
    assert [(row.block, row.choice) for row in rows if row.block == "layers.1"] == [
        ("layers.1", "resident"),
        ("layers.1", FROM_RAM),
        ("layers.1", FROM_DISK),
    ]
    size = next(block.bytes for block in partition.blocks if block.name == "layers.1")
    by = {(row.block, row.choice): row for row in rows}
    assert by["layers.1", FROM_RAM].moves_bytes == {(RAM, VRAM): 2 * size, (VRAM, RAM): size}
    assert by["layers.2", FROM_RAM].moves_bytes == {(RAM, VRAM): 2 * size}
    assert by["layers.1", FROM_DISK].moves_bytes == {
        (DISK, RAM): 2 * size,
        (RAM, VRAM): 2 * size,
        (RAM, DISK): size,
        (VRAM, RAM): size,
    }
    assert by["layers.1", FROM_DISK].saves_bytes == {VRAM: size, DISK: -size}
    assert by["layers.2", FROM_DISK].saves_bytes == {VRAM: size}
    assert {row.block for row in options(partition, RAM)} == set(names)
    assert by["layers.1", FROM_RAM].lossless


@pytest.mark.parametrize("padding", [None, 3])
def test_a_table_elsewhere_gets_the_gradient_of_an_embedding(kind: str, padding: int | None) -> None:
    twin, table = (nn.Embedding(WORDS, WIDTH, padding_idx=padding, scale_grad_by_freq=True) for _ in range(2))
    with torch.no_grad():
        table.weight.copy_(twin.weight)
    net = nn.Sequential(table)
    partition, memory = find_blocks(net), memory_for(kind)
    handle = apply(net, partition, plan_of(partition, CHOICES[kind], 2), memory, Weights(), training=True)
    (streamed,) = handle._streamed
    handle._guards.look_up(table, streamed.home, torch.device("cpu"))
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


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_compiled(fit: Callable[..., WeightStreaming]) -> None:
    net = Net()
    fit(net)
    compiled = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        loss_of(compiled).backward()
        assert_equal(gradients(net), wanted_gradients())
    torch.compiler.reset()
