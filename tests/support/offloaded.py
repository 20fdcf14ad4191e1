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
from brim.techniques.blocks import inner_tensors
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
    "eight_bits": lambda p: EightBits(p),
    "wrapped_eight_bits": lambda p: EightBits(p, wrapped=True),
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


class Codes(torch.Tensor):
    """Numbers in 8 bits, as torchao has them: codes, a scale for each 16, and a table that ``copy_`` leaves alone."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.table = codes, scales, table
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales", "table"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> Codes:
        return cls(**parts, dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, aten = args[0], torch.ops.aten
        if func is aten.copy_.default and isinstance(first, Codes):
            source = args[1] if isinstance(args[1], Codes) else None
            codes, scales = (source.codes, source.scales) if source is not None else eight_bits(args[1])
            first.codes.copy_(codes)
            first.scales.copy_(scales)
            return first
        if func in (aten.detach.default, aten._to_copy.default):
            device = (kwargs or {}).get("device")
            return cls(*(part.detach().to(device) for part in inner_tensors(first)), dtype=first.dtype)
        raise NotImplementedError(func)


def eight_bits(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    rows = values.reshape(-1, 16)
    scales = rows.abs().amax(1)
    codes = (rows / scales.clamp(min=1e-30)[:, None] * 127).round() + 128
    return codes.to(torch.uint8).view(values.shape), scales


def of_eight_bits(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (table[codes.long()].view(-1, 16) * scales[:, None]).view(codes.shape)


class EightBits(torch.optim.Optimizer):
    """Large parameters have an average in 8 bits, with its scales and the table beside it, or all of them wrapped."""

    def __init__(self, params: Any, *, wrapped: bool = False) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.wrapped, self.tables = wrapped, {"linear": (torch.arange(256) - 128) / 127}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"count": 0, **self.new(p)}
                state["count"] += 1
                if "average" in state and type(state["average"]) is not Codes:
                    average = state["average"].lerp_(p.grad, 0.1)
                else:
                    parts = state if "codes" in state else vars(state["average"])
                    average = of_eight_bits(parts["codes"], parts["scales"], parts["table"]).lerp(p.grad, 0.1)
                    if "codes" in state:
                        state["codes"], state["scales"] = eight_bits(average)
                    else:
                        state["average"].copy_(average)
                p.add_(average, alpha=-group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in bitsandbytes codes keep their dtype, which PyTorch's does not allow, and no hooks are called."""
        if self.wrapped:
            super().load_state_dict(state_dict)
            return
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, number in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(number, {}).items()
                self.state[p] = {k: v.to(p.device) if isinstance(v, torch.Tensor) else v for k, v in state}
            group.update({**saved, "params": group["params"]})

    def new(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        if p.numel() < 64 or p.numel() % 16:
            return {"average": torch.zeros_like(p)}
        self.tables["linear"] = self.tables["linear"].to(p.device)
        codes = torch.full_like(p, 128, dtype=torch.uint8)
        parts = {"codes": codes, "scales": p.new_zeros(p.numel() // 16), "table": self.tables["linear"]}
        return {"average": Codes(**parts, dtype=p.dtype)} if self.wrapped else parts


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
                for inner, expected in zip(inner_tensors(value), inner_tensors(wanted), strict=True):
                    assert inner.dtype == expected.dtype and inner.stride() == expected.stride()
                    assert torch.equal(inner, expected), key
            else:
                assert value == wanted
