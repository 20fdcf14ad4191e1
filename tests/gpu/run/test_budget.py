"""What a fit reserves of a GPU, and what a program without a budget gets of it."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim import accelerator
from brim.errors import BudgetError, UnsupportedError
from brim.measure import device_rates as measuring
from brim.measure.capacity import free_bytes
from brim.planning.inference.machine import budgets, held_to, machine
from brim.planning.solver import cost_model
from support.offloaded import EightBits
from support.pipelines import small_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20


def net() -> nn.Sequential:
    """Layers of 16 MiB, each in a segment of its own."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU()) for _ in range(8)])


@torch.no_grad()
def test_what_a_model_had_on_the_device_is_given_back_when_it_is_fitted():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = net().cuda()
    assert torch.cuda.memory_reserved() - before >= 128 * MIB
    torch.cuda.reset_peak_memory_stats()
    handle = brim.fit(model, vram=72 * MIB, ram="1GiB", activations="1MiB")
    assert torch.cuda.memory_reserved() - before <= 72 * MIB
    # What leaves the device leaves before what stays is put in its place.
    assert torch.cuda.max_memory_reserved() - before <= 128 * MIB + 16 * MIB
    handle.remove()


def small_layers(count: int = 16, width: int = 1024) -> nn.Sequential:
    """Layers of 4 MiB, five of which share a segment."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(count)])


def start_anew() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


X = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("vram_bytes", [64 * MIB, 100 * MIB, 120 * MIB], ids=lambda count: f"{count // MIB} MiB")
@pytest.mark.parametrize("example", [X, None], ids=["known", "unknown"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@torch.no_grad()
def test_a_call_reserves_what_is_promised(vram_bytes: int, example: torch.Tensor | None, where: str) -> None:
    """cuBLAS's workspace and what lies unused in segments included."""
    model = small_layers()
    expected = model.cuda()(X.cuda()).cpu()
    model.to(where)
    start_anew()
    before = torch.cuda.memory_reserved()
    handle = brim.fit(model, vram=vram_bytes, ram="1GiB", device="cuda", example=example, activations="4MiB")
    if where == "cuda":
        torch.cuda.reset_peak_memory_stats()
    got = [model(X.cuda()).cpu() for _ in range(2)]
    reserved, promise = torch.cuda.max_memory_reserved() - before, handle.plan.promise.peak_bytes["vram"]
    handle.remove()
    assert promise <= vram_bytes
    assert reserved <= promise
    assert reserved == promise or before  # what earlier tests have left may have room for something
    assert torch.equal(got[0], expected) and torch.equal(got[1], expected)
    assert torch.equal(model.cuda()(X.cuda()).cpu(), expected)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@torch.no_grad()
def test_an_output_that_is_kept_until_the_next_one_is_there_is_in_the_promise(where: str) -> None:
    """``out = model(x)`` in a loop, whole numbers given on either device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 256), *[nn.Linear(256, 256) for _ in range(4)], nn.Linear(256, 16_384))
    ids = torch.randint(0, 1000, (4, 256)).to(where)
    start_anew()
    before = torch.cuda.memory_reserved()
    handle = brim.fit(model, vram=280 * MIB, ram="1GiB", device="cuda", example=ids)
    for _ in range(3):
        out = model(ids.cuda())
    reserved, promise = torch.cuda.max_memory_reserved() - before, handle.plan.promise.peak_bytes["vram"]
    assert out.nbytes == 64 * MIB
    assert reserved <= promise
    assert reserved == promise or before
    handle.remove()


def test_a_model_is_fitted_and_called_in_inference_mode() -> None:
    model = small_layers()
    with torch.inference_mode():
        handle = brim.fit(model, vram=64 * MIB, ram="1GiB", device="cuda")
        first = model(X.cuda())
    with torch.no_grad():
        assert torch.equal(model(X.cuda()), first)
    handle.remove()


def test_a_model_that_was_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = small_layers()
        with pytest.raises(UnsupportedError, match=r"torch\.no_grad"):
            brim.fit(model, vram=64 * MIB, ram="1GiB", device="cuda")


def test_the_smallest_budget_that_a_refusal_names_is_enough() -> None:
    start_anew()
    before = torch.cuda.memory_reserved()
    with pytest.raises(BudgetError, match="including the bytes that PyTorch and cuBLAS hold") as refused:
        brim.fit(small_layers(), vram=24 * MIB, ram="1GiB", device="cuda", example=X)
    smallest = refused.value.smallest_bytes["vram"]
    model = small_layers()
    handle = brim.fit(model, vram=smallest, ram="1GiB", device="cuda", example=X)
    with torch.no_grad():
        model(X.cuda())
    assert torch.cuda.max_memory_reserved() - before <= smallest
    handle.remove()


@pytest.mark.parametrize("example", [X, None], ids=["known", "unknown"])
def test_the_smallest_budget_of_a_training_is_enough(example: torch.Tensor | None) -> None:
    def fitted(vram_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_layers(4)
        optimizer = torch.optim.AdamW(model.parameters())
        brim.fit(model, optimizer, vram=vram_bytes, ram="1GiB", device="cuda", example=example, activations="4MiB")
        return model, optimizer

    start_anew()
    before = torch.cuda.memory_reserved()
    with pytest.raises(BudgetError) as refused:
        fitted(16 * MIB)
    smallest = refused.value.smallest_bytes["vram"]
    model, optimizer = fitted(smallest)
    for _ in range(2):
        model(X.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_reserved() - before <= smallest
    model.brim.remove()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


CODES_BYTES = 16 * (MIB + MIB // 16 * 4 + 4096)  # the table takes a page of its layer's record


@pytest.mark.parametrize(
    ("make", "vram_mib", "sixteenths", "states_bytes"),
    [
        (fused, 218, 1, 128 * MIB),
        (fused, 230, 3, 128 * MIB),
        (fused, 260, 6, 128 * MIB),
        (EightBits, 230, 6, CODES_BYTES),
        (partial(EightBits, wrapped=True), 230, 6, CODES_BYTES),
    ],
    ids=["one", "three", "six", "8 bits", "8 bits wrapped"],
)
def test_a_training_whose_states_visit_the_gpu_takes_what_is_promised(
    make: Any, vram_mib: int, sixteenths: int, states_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "_VISITING_PARTS", (sixteenths,))  # else by this machine's rates
    model = small_layers()
    start_anew()
    before = torch.cuda.memory_reserved()
    optimizer = make(model.parameters())
    handle = brim.fit(model, optimizer, vram=vram_mib * MIB, ram="140MiB", device="cuda", example=X)
    assert handle.choice.gpu_sixteenths == sixteenths
    for _ in range(3):
        model(X.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reserved, promise = torch.cuda.max_memory_reserved() - before, handle.plan.promise.peak_bytes
    assert reserved <= promise["vram"] <= vram_mib * MIB
    assert reserved == promise["vram"] or before
    assert handle.memory.ram.peak_bytes == promise["ram"] == states_bytes  # and nothing beside them
    handle.remove()


def test_a_run_is_held_to_its_budget_and_gives_back_what_no_tensor_needs():
    start_anew()
    with held_to({"vram": 64 * MIB}, "cuda")():
        for size in (30, 40, 50):  # each in a segment of its own, which the next one needs
            torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    more = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert more.numel() < kept.numel()


def test_what_was_removed_holds_nothing_though_its_handle_is_kept() -> None:
    start_anew()
    before = torch.cuda.memory_allocated()
    handle = brim.fit(small_layers(), vram=64 * MIB, ram="1GiB", device="cuda", example=X)
    assert torch.cuda.memory_allocated() > before
    handle.remove()
    assert torch.cuda.memory_allocated() == before


def test_measuring_leaves_neither_memory_nor_a_peak() -> None:
    start_anew()
    before = torch.cuda.memory_reserved()
    on = accelerator.available(accelerator.CUDA)
    assert on is not None
    with measuring.unnoticed(on):
        measuring.links(on)
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved() == before


def test_a_budget_that_nobody_gave_has_what_the_model_holds_already():
    gc.collect()
    torch.cuda.empty_cache()
    hardware = machine("cuda")
    free = budgets(hardware, None, "1GiB", "cuda")["vram"]
    model = net().cuda()
    assert budgets(hardware, None, "1GiB", "cuda")["vram"] == pytest.approx(free - 0.9 * 128 * MIB, abs=2 * MIB)
    assert budgets(hardware, None, "1GiB", "cuda", [model])["vram"] == pytest.approx(free, abs=2 * MIB)


def test_a_program_s_memory_fraction_bounds_what_is_free():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(512 * MIB / total)
    try:
        assert free_bytes("vram") <= 512 * MIB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_fitted_pipeline_reserves_what_was_promised(tmp_path: Path) -> None:
    call = {"prompt": "a", "num_inference_steps": 2, "output_type": "pt"}

    def picture() -> torch.Tensor:
        return pipe(**call, generator=torch.Generator().manual_seed(1)).images.cpu()

    pipe = small_pipeline(tmp_path)
    expected = picture()
    start_anew()
    before = torch.cuda.memory_reserved()
    handle = brim.fit(pipe, vram=66 * MIB, ram="1GiB", example=call)
    for _ in range(2):
        torch.testing.assert_close(picture(), expected, rtol=0, atol=1e-3)
    assert torch.cuda.max_memory_reserved() - before == handle.plan.promise.peak_bytes["vram"] <= 66 * MIB
    handle.remove()
