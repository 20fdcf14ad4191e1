"""A module some of whose blocks the CPU computes from RAM is, to its user, the module it was."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache

from brim.core import EventKind
from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, TransferError, UnsupportedError, UsageError
from brim.planning.inference.choosing import Need, make_plan
from brim.planning.inference.machine import machine, put_in_force
from brim.techniques.blocks import find_blocks
from brim.techniques.cpu_compute.technique import TRANSFER_BYTES, rest_in
from brim.techniques.streaming.placement import computable
from brim.techniques.streaming.weight_streaming import COMPUTE_RAM, FROM_RAM, Weights, WeightStreaming
from support.hybrid import compute_some_in_ram, split

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer() for _ in range(8)]).eval()


def fit(net: nn.Module, share: float = 0.5, ram_layers: float = 9, **settings: int) -> WeightStreaming:
    """Three layers' worth of VRAM: two slots and a resident."""
    bytes = 5 * 4096
    budget = {VRAM: int(3.5 * bytes), RAM: int(ram_layers * bytes)}
    partition, plan = make_plan(net, machine("emulated"), budget, Need(step_bytes=0), Weights(), task="forward")
    plan = replace(compute_some_in_ram(plan, partition, share), settings={**plan.settings, **settings})
    return put_in_force(net, partition, plan, machine("emulated"), Weights(), "emulated")


def computed(handle: WeightStreaming) -> list[str]:
    return [name for name, choice in handle.plan.choices("weight_streaming").items() if choice == COMPUTE_RAM]


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.no_grad():
        yield


def test_both_kinds_of_blocks_are_there_and_the_result_is_the_same() -> None:
    net = make_net()
    want, handle = net(X), fit(net)
    assert {COMPUTE_RAM, FROM_RAM} <= set(handle.plan.choices("weight_streaming").values())
    for _ in range(3):
        assert torch.equal(net(X), want)
    moved = {label for _, _, label in copies(handle)}
    assert moved.isdisjoint(computed(handle))  # their weights never move
    handle.remove()
    assert "forward" not in vars(net[3])
    assert torch.equal(net(X), want)


def copies(handle: WeightStreaming) -> list[tuple[float, float, str]]:
    events = [e for e in handle.timeline() if e.kind is EventKind.COPY]
    return [(e.time_s, e.time_s + e.duration_s, e.label) for e in events]


class Gate:
    """Something that a copy waits for."""

    def __init__(self) -> None:
        self.event, self.done = threading.Event(), False

    def wait(self) -> None:
        assert self.event.wait(20)


def test_while_the_cpu_computes_a_block_the_link_brings_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    want, handle = net(X), fit(net, 0.4)
    choices = [choice for _, choice in handle.plan.choices("weight_streaming").items()]
    # The slot of the streamed block before it is free by then, and others come after it.
    place = next(i for i in range(1, 6) if choices[i - 1 : i + 1] == [FROM_RAM, COMPUTE_RAM])
    net(X)
    engine, gate, begun = handle.memory.engine, Gate(), [False]
    moving: list[Any] = []
    copy_block = engine.copy

    def copy_later(source: Any, target: Any, label: str, after: Any, way: Any) -> Any:
        if not begun[0]:
            return copy_block(source, target, label, after, way)
        moving.append(copy_block(source, target, label, [*after, gate], way))
        return moving[-1]

    def let_it_come(*_: Any) -> None:
        assert moving and not moving[0].done
        gate.event.set()
        moving[0].wait()  # here, in the middle of a block that the CPU computes

    monkeypatch.setattr(engine, "copy", copy_later)
    net[place - 1].norm.register_forward_hook(lambda *_: begun.__setitem__(0, True))
    hook = net[place].linear.register_forward_hook(let_it_come)
    assert torch.equal(net(X), want)
    hook.remove()
    assert gate.event.is_set()
    handle.remove()


def test_hooks_of_the_user_see_what_they_saw() -> None:
    net = make_net()
    handle = fit(net, 1.0)
    seen: list[torch.Tensor] = []
    module = net.get_submodule(computed(handle)[1])
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    module.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    net(X)
    assert seen[0] is seen[1]
    handle.remove()


def test_a_forward_of_the_instances_own_is_used_and_comes_back() -> None:
    net = make_net()
    own = net[4].forward
    net[4].forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    theirs, want = net[4].forward, net(X)
    handle = fit(net, 1.0)
    assert "4" in computed(handle)
    assert torch.equal(net(X), want)
    handle.remove()
    assert net[4].forward is theirs


def test_state_dict_and_changes_are_served() -> None:
    net, twin = make_net(), make_net()
    handle, other = fit(net), make_net(1).state_dict()
    name = f"{computed(handle)[0]}.linear.weight"
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in net.state_dict().items())
    for each in (net, twin):
        each.load_state_dict(other)
    assert torch.equal(net(X), twin(X))
    for each in (net, twin):
        each.get_parameter(name).mul_(2)
    assert torch.equal(net(X), twin(X))
    for each in (net, twin):
        each.get_parameter(name).data = torch.ones(64, 64)
    assert torch.equal(net(X), twin(X))
    with handle.updating(computed(handle)[0]):
        net.get_parameter(name).mul_(3)
    twin.get_parameter(name).mul_(3)
    assert torch.equal(handle.value(name), twin.get_parameter(name))
    assert torch.equal(net(X), twin(X))
    handle.remove()
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in net.state_dict().items())


def test_weights_and_buffers_that_a_call_changes_stay_changed() -> None:
    net, twin = make_net(), make_net()
    handle = fit(net, 1.0)

    def grow(module: Any, args: Any) -> None:
        module.linear.weight.data.add_(0.01)
        module.linear.weight.add_(0.01)

    for each in (net, twin):
        each.train()
        each.get_submodule(computed(handle)[0]).norm.register_forward_pre_hook(
            lambda module, args, each=each: grow(each.get_submodule(computed(handle)[0]), args)
        )
    for _ in range(3):
        assert torch.equal(net(X), twin(X))
    handle.remove()
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in net.state_dict().items())


def test_a_block_called_again_and_in_another_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_net()
            self.order = [*range(8)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self.layers[index](x)
            return x

    model = Twice().eval()
    handle = fit(model)
    for order in ([*range(8)], [0, 0, 1, 3, 3, 7], [7, 6, 5, 4, 3, 2, 1, 0], [*range(8)]):
        model.order = order
        twin = Twice().eval()
        twin.order = order
        assert torch.equal(model(X), twin(X))
    handle.remove()


def test_an_error_inside_leaves_everything_as_it_was() -> None:
    net = make_net()
    want, handle = net(X), fit(net, 1.0)
    hook = net.get_submodule(computed(handle)[1]).norm.register_forward_pre_hook(_interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            net(X)
    hook.remove()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(X[:, :10])
    assert torch.equal(net(X), want)
    handle.remove()
    assert torch.equal(net(X), want)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_it_is_refused_what_it_cannot_do() -> None:
    net = make_net()
    handle = fit(net)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="Cannot compute gradients through"):
        net(X)
    with pytest.raises(UnsupportedError, match="copied"):
        copy.deepcopy(net)
    with pytest.raises(UsageError, match="fitted already"):
        fit(net)
    partition, plan = find_blocks(net), handle.plan
    handle.remove()
    with pytest.raises(UnsupportedError, match="Cannot train"):
        put_in_force(net, partition, plan, machine("emulated"), Weights(), "emulated", training=True)
    with pytest.raises(UsageError, match="This machine has no GPU"):
        put_in_force(net, partition, plan, machine("cpu"), Weights(), "cpu")
    assert "brim" not in vars(net)
    assert not any(p.isnan().any() for p in net.parameters())


def test_a_closed_handle_says_so() -> None:
    net = make_net()
    handle = fit(net)
    handle.close()
    with pytest.raises(TransferError, match="closed"):
        net(X)
    handle.remove()


def test_activations_stay_inside_the_budget_of_ram() -> None:
    net = make_net()
    want = net(X)
    with pytest.raises(BudgetError, match="transfer buffer"):
        fit(net, 1.0, **{TRANSFER_BYTES: 1 << 20})
    assert torch.equal(net(X), want)
    handle = fit(net, 1.0)
    held = handle.memory.ram.held_bytes
    handle.memory.ram.limit_bytes = held
    with pytest.raises(BudgetError, match="transfer buffer"):
        net(X)
    handle.memory.ram.limit_bytes = held + 4096
    assert torch.equal(net(X), want)
    handle.remove()
    assert handle.memory.ram.held_bytes == 0


def test_only_modules_with_all_their_parameters_can_be_computed_apart() -> None:
    shared = make_net()
    shared[1].linear.bias = shared[5].linear.bias
    partition = find_blocks(shared)
    assert computable(partition) == {str(i) for i in (0, 2, 3, 4, 6, 7)}
    held_back = find_blocks(make_net(), stay=["2.linear.bias"])
    assert computable(held_back) == {str(i) for i in range(8)} - {"2"}


def test_a_plan_that_computes_a_block_apart_from_its_parameters_is_refused() -> None:
    net = make_net()
    handle = fit(net, 1.0)
    partition, plan, name = find_blocks(net, stay=["2.linear.bias"]), handle.plan, computed(handle)[0]
    handle.remove()
    if name != "2":
        plan = with_block_in_ram(plan, "2")
    with pytest.raises(UnsupportedError, match=r"Cannot compute .*2 on the CPU"):
        put_in_force(net, partition, plan, machine("emulated"), Weights(), "emulated")
    assert torch.equal(net(X), make_net()(X))


def with_block_in_ram(plan: Any, name: str) -> Any:
    return replace(
        plan, decisions=tuple(replace(d, choice=COMPUTE_RAM) if d.block == name else d for d in plan.decisions)
    )


def test_link_and_cpu_end_at_once() -> None:
    made = split(12_000, link_bytes_per_s=1000, host_bytes_per_s=3000)
    assert (made.host_bytes, made.link_bytes, made.seconds) == (9000, 3000, 3.0)
    assert split(0, link_bytes_per_s=1, host_bytes_per_s=1).seconds == 0
    assert split(10, link_bytes_per_s=0, host_bytes_per_s=5).seconds == 2.0
    with pytest.raises(UsageError):
        split(10, link_bytes_per_s=0, host_bytes_per_s=0)


META = torch.device("meta")  # the one other device that every machine has


def filled(layers: int = 3) -> DynamicCache:
    cache = DynamicCache()
    for index in range(layers):
        cache.update(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), index)
    return cache


def devices(cache: Any) -> list[str]:
    return [layer.keys.device.type for layer in cache.layers]


def test_only_the_blocks_own_layers_are_brought() -> None:
    cache = filled()
    rest_in(META, ((torch.ones(1),), {"past_key_values": cache}), {1})
    assert devices(cache) == ["cpu", "meta", "cpu"]
    assert cache.layers[1].values.device == cache.layers[1].device == META


def test_both_caches_of_an_encoder_and_a_decoder() -> None:
    both = EncoderDecoderCache(filled(), filled())
    rest_in(META, [{"cache": both}], {0, 2})
    assert devices(both.self_attention_cache) == devices(both.cross_attention_cache) == ["meta", "cpu", "meta"]


def test_a_cache_that_was_laid_out_before() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    cache = StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    rest_in(META, (cache,), {1})
    assert devices(cache) == ["cpu", "meta"]
    assert cache.layers[1].cumulative_length.device == META


def test_layers_that_are_not_there_yet_are_no_matter() -> None:
    cache = DynamicCache()
    rest_in(META, (cache,), {5})
    assert len(cache.layers) == 0


def test_a_cache_that_moves_its_layers_itself_is_refused() -> None:
    cache = filled()
    cache.offloading = True
    with pytest.raises(UnsupportedError, match="offloads its layers"):
        rest_in(META, (cache,), {0})
