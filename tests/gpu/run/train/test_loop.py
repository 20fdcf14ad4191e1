"""``brim train`` on a CUDA device: the promised precision, and the same losses however it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brim.core.hardware import DISK, RAM
from brim.errors import BudgetError
from brim.planning.solver import cost_model, training
from brim.planning.solver.step_profile import FULL, FULL_OFFLOAD, KEEP
from brim.planning.strategy import choice, choose
from brim.run.train import saving
from brim.run.train.loop import Request, Training, train
from brim.techniques.streaming.placement import FROM_RAM, RESIDENT
from support.tiny_model import save_llama
from support.trainings import write_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=128, layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


def run(llama: Path, data: Path, output: Path, **options: Any) -> Training:
    settings = {"batch": 2, "seq": 32, "steps": 3, "lr": 1e-3, "vram": "2GiB", "ram": "4GiB", "device": "cuda"}
    return train(Request(model=llama, data=data, output=output, **{**settings, **options}))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """The type of each product of a linear layer that is computed on the device."""
    seen: list[torch.dtype] = []
    plain = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        made = plain(self, x)
        if type(made) is torch.Tensor and made.is_cuda:
            seen.append(made.dtype)
        return made

    monkeypatch.setattr(nn.Linear, "forward", forward)
    yield seen


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (None, torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        ("fp16-mixed", torch.float16),
        ("bf16", torch.bfloat16),
        ("bf16-stochastic", torch.bfloat16),
        ("bf16-master", torch.bfloat16),
        ("tf32", torch.float32),
        ("fp32", torch.float32),
    ],
)
def test_products_have_the_precision_that_was_promised(precision, dtype, llama, text, tmp_path, products):
    before = torch.backends.cuda.matmul.fp32_precision
    result = run(llama, text, tmp_path, precision=precision)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert products and set(products) == {dtype}
    assert result.losses[-1] < result.losses[0]


class _ScaledProducts(TorchDispatchMode):
    """The types of operands of products that are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm.default:
            self.operands |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


def test_products_in_eight_bits(llama, text, tmp_path):
    pytest.importorskip("torchao")
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with _ScaledProducts() as seen:
        result = run(llama, text, tmp_path, precision="fp8")
    assert seen.operands == {torch.float8_e4m3fn, torch.float8_e5m2} or seen.operands == {torch.float8_e4m3fn}
    assert result.losses[-1] < result.losses[0]
    assert torch.cuda.max_memory_reserved() - before <= result.plan.promise.peak_bytes["vram"]


@pytest.mark.parametrize(
    "options",
    [
        {"offload_optimizer": "ram"},
        {"offload_optimizer": "disk"},
        {"stream_weights": True},
        {"offload_activations": 1},
        {"checkpointing": "full"},
    ],
    ids=str,
)
def test_losses_are_those_of_a_step_in_memory(options, llama, text, tmp_path):
    plain = run(llama, text, tmp_path / "plain", precision="fp32")
    found = run(llama, text, tmp_path / "other", precision="fp32", **options)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("is_allowed", "treatment", "setting"),
    [
        (lambda shape: shape.block_rows, (RESIDENT, FULL), choice.BLOCK_ROWS),
        (lambda shape: shape.block_rows, (FROM_RAM, FULL_OFFLOAD), choice.BLOCK_ROWS),
        (lambda shape: shape.on_gpu and shape.states == RAM, (RESIDENT, KEEP), choice.GPU_SIXTEENTHS),
        (lambda shape: shape.on_gpu and shape.states == DISK, (RESIDENT, KEEP), choice.GPU_SIXTEENTHS),
    ],
    ids=["pieces", "pieces of streamed blocks", "states from RAM to the GPU", "states from the disk to the GPU"],
)
def test_a_step_stays_within_its_promise(is_allowed, treatment, setting, llama, text, tmp_path, monkeypatch):
    """The planner has one kind of choice only; its step reserves no more than promised, and trains as a plain one."""
    sizes = {"precision": "fp32", "batch": 8, "seq": 256}
    plain = run(llama, text, tmp_path / "plain", **sizes)
    plain_bytes, share = plain.plan.promise.peak_bytes["vram"], 0.8
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    shapes, choices = training.shapes, cost_model.choices
    monkeypatch.setattr(training, "shapes", lambda *args: filter(is_allowed, shapes(*args)))
    monkeypatch.setattr(training, "baselines", lambda *args: iter(()))
    monkeypatch.setattr(choose, "is_small", lambda model: False)
    monkeypatch.setattr(
        cost_model, "choices", lambda *args: [c for c in choices(*args) if c == treatment] or list(choices(*args))
    )
    found = run(llama, text, tmp_path / "other", **sizes, vram=f"{int(share * plain_bytes)}B")
    reserved = torch.cuda.max_memory_reserved() - before
    assert found.plan.settings[setting] > 0
    assert reserved <= found.plan.promise.peak_bytes["vram"] <= share * plain_bytes
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)


def test_memory_that_runs_out_in_a_save_leaves_the_one_before(llama, text, tmp_path, monkeypatch):
    whole = run(llama, text, tmp_path / "whole", precision="fp32", save_every=1)
    begun: list[str] = []
    plain = saving.finite

    def finite(values: Any, names: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
        """In the middle of the second save memory runs out."""
        begun.append("the model, then its optimizer")
        fails = len(begun) == 3
        for count, pair in enumerate(plain(values, names)):
            if fails and count == 3:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            yield pair

    monkeypatch.setattr(saving, "finite", finite)
    output = tmp_path / "out"
    with pytest.raises(BudgetError, match=r"training(.|\n)*out of memory(.|\n)*--resume"):
        run(llama, text, output, precision="fp32", save_every=1)
    assert [path.name for path in output.glob("step-*")] == ["step-000001"]
    monkeypatch.setattr(saving, "finite", plain)
    found = run(llama, text, output, precision="fp32", save_every=1, resume=True)
    assert found.losses == whole.losses[1:]
