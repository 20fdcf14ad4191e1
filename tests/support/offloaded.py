"""A small language model, its plain twin, and optimizers of every kind, for tests of optimizer offload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core import Timeline
from brim.memory.tiers import Memory, cpu_memory, emulated_memory
from brim.techniques.optimizer_offload.technique import OptimizerOffload, apply

WIDTH, WORDS = 16, 24
MIB = 1 << 20
Make = Callable[[Any], torch.optim.Optimizer]
ON_GPU = "ram, updated on the GPU"
PLACES = [("cpu", "disk"), ("emulated", "ram"), ("emulated", ON_GPU), ("emulated", "disk")]  # where states rest

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lion": lambda p: Lion(p),
    "second moment first": lambda p: SecondMomentFirst(p),
}


class Lion(torch.optim.Optimizer):
    """Replaces its state by a new tensor at each step, and keeps a Python number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(p)
                state["count"] += 1
                p.add_(state["average"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["average"] = state["average"].lerp(p.grad, 0.01)


class SecondMomentFirst(torch.optim.Optimizer):
    """Creates its states in another order than they have in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    square, average = torch.zeros_like(p), torch.zeros_like(p)
                    state |= {"average": average, "square": square}
                state["average"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                p.addcdiv_(state["average"], state["square"].sqrt() + 1e-8, value=-group["lr"])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    """``order`` is the sequence of layers; ``unused`` never gets a gradient; the head may be the embedding."""

    def __init__(self, *, tied: bool = False, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.unused = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(layers))
        self.through: Callable[..., torch.Tensor] = lambda layer, x: layer(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index in self.order:
            x = self.through(self.layers[index], x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make(seed: int = 0, **options: Any) -> Words:
    torch.manual_seed(seed)
    return Words(**options)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups whose parameters alternate in the model."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": vectors, "lr": 3e-3}, {"params": matrices}]


def batch(step: int, part: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(100 * step + part))


def machine(kind: str, folder: Path, *, ram_bytes: int = 8 * MIB) -> Memory:
    made = Timeline("t", measured=True)
    if kind == "cpu":
        memory = cpu_memory(made, ram_bytes=ram_bytes)
    else:
        memory = emulated_memory(made, vram_bytes=8 * MIB, ram_bytes=ram_bytes)
    memory.use_disk(folder=str(folder), limit_bytes=None)
    return memory


@contextlib.contextmanager
def offloaded(
    model: nn.Module, optimizer: torch.optim.Optimizer, memory: Memory, **options: Any
) -> Iterator[OptimizerOffload]:
    if options.get("states") == ON_GPU:
        options |= {"states": "ram", "gpu_sixteenths": 3}
    handle = apply(model, optimizer, memory, **{"block_bytes": 3000, **options})
    try:
        yield handle
    finally:
        handle.remove()
        assert memory.ram.held_bytes == memory.compute.held_bytes == 0
        memory.close()


def backward(model: nn.Module, step: int, parts: int = 1, final: Any = None) -> list[float]:
    """One step's backward passes; the last of them in ``final()``."""
    losses = []
    for part in range(parts):
        loss = model(batch(step, part)) / parts
        with final() if final is not None and part == parts - 1 else contextlib.nullcontext():
            loss.backward()
        losses.append(loss.item())
    return losses


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: Sequence[int] = range(4),
    parts: int = 1,
    final: Any = None,
    clip: Callable[[], Any] | None = None,
) -> list[float]:
    losses = []
    for step in steps:
        losses += backward(model, step, parts, final)
        if clip is not None:
            losses.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Of two optimizers: the same groups, keys in the same order, values, classes and strides."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert list(state) == list(other["state"][number])
        for key, value in state.items():
            wanted = other["state"][number][key]
            assert type(value) is type(wanted)
            if isinstance(value, torch.Tensor):
                assert value.dtype == wanted.dtype and value.stride() == wanted.stride()
                assert torch.equal(value, wanted), key
            else:
                assert value == wanted
