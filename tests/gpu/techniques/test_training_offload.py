"""Optimizer states, gradients and activations that leave a real CUDA device during training."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.device.settings import VARIABLE
from brim.memory.tiers import Memory, device_memory
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.blocks import inner_tensors
from brim.techniques.optimizer_offload import technique as optimizer_offload
from support.offloaded import EightBits, Lion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"
WIDTH, BLOCKS = 512, 6
ROWS, MANY_ROWS = 64, 512  # of optimizers' tests, and of those of activations, which are to be larger than a window
NAMES = [f"blocks.{index}" for index in range(BLOCKS)]
MIB = 1 << 20
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Lion": Lion,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "8 bits": EightBits,
    "8 bits wrapped": lambda p: EightBits(p, wrapped=True),
}


def of_torchao(parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pytest.importorskip("torchao.optim").AdamW8bit(parameters, lr=1e-2)
    return optimizer


def of_bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    package = pytest.importorskip("bitsandbytes")
    if VARIABLE in os.environ:
        pytest.skip("bitsandbytes' kernels are machine code for a GPU, which the rehearsal device does not run")
    optimizer: torch.optim.Optimizer = package.optim.AdamW8bit(parameters, lr=1e-2)
    return optimizer


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rehearsal device torchao's update runs eagerly: there is no GPU for which Triton could compile it."""
    if VARIABLE in os.environ:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    device = torch.device("cuda", torch.cuda.current_device())
    made = device_memory(Timeline("t", measured=True), vram_bytes=1 << 30, ram_bytes=1 << 30, device=device)
    made.use_disk(folder=str(tmp_path), limit_bytes=None)
    yield made
    made.close()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, handle: Any = None, *, parts: int = 1) -> list[float]:
    """Four steps; with ``handle`` the last backward pass of each is its final one, unless gradients are clipped."""
    losses = []
    for step in range(4):
        for part in range(parts):
            loss = net(batch(10 * step + part)) / parts
            last = handle is not None and part == parts - 1
            with handle.final() if last else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_close(net: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert one.device.type == DEVICE
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
@pytest.mark.parametrize(
    ("states", "gradients", "brief"),
    [(RAM, "keep", False), (RAM, "keep", True), (RAM, RAM, False), (DISK, "keep", False), (DISK, "keep", True)],
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_states_that_visit_the_gpu_train_bit_for_bit(
    make: Callable[[Any], torch.optim.Optimizer],
    states: str,
    gradients: str,
    brief: bool,
    early: bool,
    memory: Memory,
) -> None:
    net, twin = Net().to(DEVICE), Net().to(DEVICE)
    optimizer, plain = make(net.parameters()), make(twin.parameters())
    handle = optimizer_offload.apply(
        net, optimizer, memory, states=states, gradients=gradients, block_bytes=2 * MIB, brief=brief, gpu_sixteenths=3
    )
    assert train(net, optimizer, handle if early else None, parts=2) == train(twin, plain, parts=2)
    values = [value for state in plain.state.values() for value in state.values() if torch.is_tensor(value)]
    states_bytes = sum(inner.nbytes for value in values for inner in inner_tensors(value) if inner.dim())
    moved = memory.recorder.copied_bytes
    if gradients == "keep":  # the first step creates states: they go down four times, and up three times
        most_bytes = 4.2 * (states_bytes + 4096 * 8 * len(handle.blocks))  # in full pages
        assert 4 * states_bytes <= moved[VRAM, RAM] <= most_bytes
        assert 3 * states_bytes <= moved[RAM, VRAM] <= most_bytes  # and some ahead of the fifth step
        if states == DISK:
            assert 4 * states_bytes <= moved[RAM, DISK] <= most_bytes
            assert 3 * states_bytes <= moved[DISK, RAM] <= most_bytes
    handle.remove()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in plain.state[other].items():
            got, wanted = (list(inner_tensors(torch.as_tensor(v))) for v in (optimizer.state[one][key], value))
            assert all(map(torch.equal, got, wanted)), key
    assert memory.ram.held_bytes == memory.compute.held_bytes == 0


@pytest.mark.parametrize("make", [of_torchao, of_bitsandbytes])
def test_packages_of_8_bits_train_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer], memory: Memory) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]).to(DEVICE)
    twin = copy.deepcopy(net)
    optimizer, plain = make(net.parameters()), make(twin.parameters())
    handle = optimizer_offload.apply(net, optimizer, memory, states=RAM, block_bytes=64 << 10, gpu_sixteenths=6)
    for step in range(3):
        for model, chosen in ((net, optimizer), (twin, plain)):
            model(batch(step)[:, :128]).square().mean().backward()
            chosen.step()
            chosen.zero_grad()
    assert memory.recorder.copied_bytes[RAM, VRAM] > 0
    handle.remove()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gradients", ["keep", RAM])
@pytest.mark.parametrize("name", ["AdamW fused", "8 bits", "8 bits wrapped"])
def test_visiting_states_under_a_scaler_clipping_and_a_schedule_go_on_after_a_restart(
    name: str, gradients: str, memory: Memory
) -> None:
    """As in VRAM, bit for bit: scaled and clipped steps, a falling learning rate, and a run that was resumed."""

    def made(offloads: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = Net().to(DEVICE)
        optimizer, handle = OPTIMIZERS[name](net.parameters()), None
        if offloads:
            handle = optimizer_offload.apply(
                net, optimizer, memory, states=RAM, gradients=gradients, block_bytes=2 * MIB, gpu_sixteenths=3
            )
        return net, optimizer, handle

    results = []
    for offloads in (True, False):
        net, optimizer, handle = made(offloads)
        losses: list[float] = []
        for turn in range(2):
            scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(2):
                loss = net(batch(2 * turn + step))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                clip = torch.nn.utils.clip_grad_norm_ if handle is None else None
                norm = clip(net.parameters(), 1e-2) if clip else handle.clip_grad_norm_(1e-2)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                losses += [loss.item(), norm.item()]
            weights = {name: value.cpu() for name, value in net.state_dict().items()}
            states = optimizer.state_dict()
            if handle is not None:
                handle.remove()
            net, optimizer, handle = made(offloads)
            net.load_state_dict(weights)
            optimizer.load_state_dict(states)
        results.append((losses, weights, states))
        if handle is not None:
            handle.remove()
    (losses, weights, states), (plain_losses, plain_weights, plain_states) = results
    assert losses == plain_losses
    for name, value in plain_weights.items():
        assert torch.equal(weights[name], value), name
    for number, state in plain_states["state"].items():
        for key, value in state.items():
            got, wanted = (inner_tensors(torch.as_tensor(v)) for v in (states["state"][number][key], value))
            assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True)), key


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("gradients", ["keep", RAM, DISK])
@pytest.mark.parametrize("states", [RAM, DISK])
@pytest.mark.parametrize("early", [False, True], ids=["step", "final"])
def test_adamw_away_trains_as_adamw_on_the_device(
    states: str, gradients: str, parts: int, early: bool, memory: Memory
) -> None:
    net, twin = Net().to(DEVICE), Net().to(DEVICE)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (net, twin))
    handle = optimizer_offload.apply(net, optimizer, memory, states=states, gradients=gradients, block_bytes=6 * MIB)
    assert len(handle.blocks) > BLOCKS
    got = train(net, optimizer, handle if early else None, parts=parts)
    torch.testing.assert_close(got, train(twin, plain, parts=parts), rtol=1e-4, atol=1e-5)
    handle.remove()
    assert_close(net, twin)
    for parameter, state in optimizer.state.items():
        torch.testing.assert_close(state["exp_avg"], plain.state[_twin(net, twin, parameter)]["exp_avg"])
    assert memory.ram.held_bytes == 0


def _twin(net: nn.Module, twin: nn.Module, parameter: torch.Tensor) -> torch.Tensor:
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return next(other for one, other in pairs if one is parameter)


def test_states_in_ram_take_no_vram(memory: Memory) -> None:
    net = Net().to(DEVICE)
    weights_bytes = sum(p.numel() * p.element_size() for p in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    handle = optimizer_offload.apply(net, optimizer, memory, states=RAM, block_bytes=4 * MIB)
    net(batch(0)).backward()  # cuBLAS takes its workspaces, of each thread and stream
    optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(net, optimizer, handle)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < weights_bytes / 4
    handle.remove()
    assert torch.cuda.memory_allocated() - before >= 2 * weights_bytes


def test_clipping_is_the_devices_own(memory: Memory) -> None:
    net, twin = Net().to(DEVICE), Net().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    handle = optimizer_offload.apply(net, optimizer, memory, states=RAM, gradients=RAM, block_bytes=4 * MIB)
    for model in (net, twin):
        model(batch(0)).backward()
    want = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
    torch.testing.assert_close(handle.clip_grad_norm_(1e-3), want)
    optimizer.step()
    handle.remove()


@pytest.mark.parametrize("gradients", [RAM, DISK])
def test_pytorch_s_own_tools_work_on_gradients_that_are_away(gradients: str, memory: Memory) -> None:
    net, twin = Net().to(DEVICE), Net().to(DEVICE)
    optimizer, plain = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, twin))
    handle = optimizer_offload.apply(net, optimizer, memory, states=RAM, gradients=gradients, block_bytes=4 * MIB)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for model, chosen in ((net, optimizer), (twin, plain)):
        scaler.scale(model(batch(0))).backward()
        scaler.unscale_(chosen)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if model is net:
            found, read = norm, [p.grad + 0 for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        chosen.step()
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    torch.testing.assert_close(found, norm)
    for got, parameter in zip(read, twin.parameters(), strict=True):
        assert got.device == parameter.device
        torch.testing.assert_close(got, 2 * parameter.grad, rtol=1e-4, atol=1e-8)
    handle.remove()
    assert_close(net, twin)


@pytest.mark.parametrize("states", [RAM, DISK])
def test_fused_counters_are_where_the_kernels_are(states: str, memory: Memory) -> None:
    """Steps in memory, steps away, what was saved there put back, and steps in memory again."""

    def small() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).to(DEVICE)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            x = torch.ones(4, 64, device=DEVICE) * step
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    net, twin = small(), small()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (net, twin))
    steps(net, optimizer)
    handle = optimizer_offload.apply(net, optimizer, memory, states=states, block_bytes=32 << 10)
    steps(net, optimizer)
    for name, tensor in [(name, tensor.clone()) for name, tensor in handle.iter_state()]:
        handle.load_state(name, tensor)
    steps(net, optimizer)
    handle.remove()
    for parameter, state in optimizer.state.items():
        assert {value.device for value in state.values()} == {parameter.device}
    steps(net, optimizer)
    for _ in range(4):
        steps(twin, plain)
    assert_close(net, twin)


def backward_of(net: nn.Module, stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
    """Gradients of three steps, on ``stream``."""
    made = []
    with torch.cuda.stream(stream):
        for step in range(3):
            net.zero_grad()
            net(batch(step, MANY_ROWS)).backward()
            made += [p.grad.clone() for p in net.parameters()]
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("beside", [False, True], ids=["default stream", "stream of the user's"])
@pytest.mark.parametrize("window_bytes", [8 * MIB, 64 * MIB])
def test_activations_come_back_bit_for_bit(beside: bool, window_bytes: int, memory: Memory) -> None:
    net = Net().to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if beside else None
    want = backward_of(net, stream)
    handle = activation_offload.apply(net, NAMES, memory, window_bytes=window_bytes)
    got = backward_of(net, stream)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert memory.recorder.copied_bytes[VRAM, RAM] > 3 * MANY_ROWS * 4 * WIDTH * 4
    assert handle.misses == 0
    handle.remove()
    assert memory.ram.held_bytes == memory.compute.held_bytes == 0


def test_activations_in_ram_lower_the_peak(memory: Memory) -> None:
    net = Net().to(DEVICE)
    peaks = []
    for blocks in ([], NAMES):
        handle = activation_offload.apply(net, blocks, memory, window_bytes=8 * MIB) if blocks else None
        net(batch(0, MANY_ROWS)).backward()  # workspaces and gradients
        torch.cuda.reset_peak_memory_stats()
        net(batch(1, MANY_ROWS)).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        if handle is not None:
            handle.remove()
    moved_bytes = memory.recorder.copied_bytes[VRAM, RAM] / 2
    assert peaks[0] - peaks[1] >= 0.5 * moved_bytes
