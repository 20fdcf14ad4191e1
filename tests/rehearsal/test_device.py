"""The device as PyTorch sees it: memory, copies, the choice of kernels, libraries."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

MIB = 1 << 20

BASICS = """
    import gc, torch
    from brim.device import loaded
    device, result = loaded(), {}
    x = torch.empty(10_000_000, device="cuda")
    result["allocated"], result["reserved"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    h = torch.arange(1 << 20)
    result["copies"] = torch.equal(h.cuda().cpu(), h)
    del x
    gc.collect(), torch.cuda.empty_cache()
    result["freed"] = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    result["context"], result["total"] = total - free, total
    result["used"] = device.used_bytes()
    layer = torch.nn.Linear(256, 256, device="cuda")
    torch.cuda.memory._record_memory_history()
    layer(torch.randn(8, 256, device="cuda")).sum().backward()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    result["sizes"] = [event["size"] for event in events if event["action"] == "alloc"]
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        result["oom"] = str(error)
    result["pinned"] = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
    q = torch.zeros(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16)
    device.reset()
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    result["attention"] = sorted(device.kernels()) + sorted(device.stubs())
    result["capability"] = torch.cuda.get_device_capability()
    result["name"] = torch.cuda.get_device_name()
    try:
        torch.zeros(4, device="cuda:1")
    except (RuntimeError, AssertionError) as error:
        result["second"] = str(error)
"""


@pytest.fixture(scope="module")
def on_a_hopper(on_device: OnDevice) -> Any:
    return on_device.run(BASICS, "H100")


@pytest.fixture(scope="module")
def on_an_ampere(on_device: OnDevice) -> Any:
    return on_device.run(BASICS, "A100-SXM4-80GB")


def test_memory_is_counted_by_pytorchs_own_allocator(on_a_hopper: Any) -> None:
    assert (on_a_hopper["allocated"], on_a_hopper["reserved"], on_a_hopper["freed"]) == (40_000_000, 20 * 2 * MIB, 0)


def test_copies_are_real(on_a_hopper: Any) -> None:
    assert on_a_hopper["copies"] and on_a_hopper["pinned"]


def test_the_card_is_the_catalogs(on_a_hopper: Any) -> None:
    from brim.catalog.gpus import gpu

    card = gpu("H100")
    assert on_a_hopper["name"] == card.name and on_a_hopper["capability"] == [9, 0]
    assert on_a_hopper["total"] == card.capacity_bytes
    assert on_a_hopper["context"] == on_a_hopper["used"] == card.context().bytes


def test_out_of_memory_is_pytorchs_own_error(on_a_hopper: Any) -> None:
    assert "Tried to allocate 32768.00 GiB" in on_a_hopper["oom"] and "this process has" in on_a_hopper["oom"]


def test_there_are_as_many_devices_as_asked_for(on_a_hopper: Any) -> None:
    assert "invalid device ordinal" in on_a_hopper["second"]


def test_the_cublas_workspace_is_that_of_the_architecture(on_a_hopper: Any, on_an_ampere: Any) -> None:
    assert 32 * MIB in on_a_hopper["sizes"]
    assert 8_519_680 in on_an_ampere["sizes"]


def test_attention_takes_the_kernel_that_the_card_would(on_a_hopper: Any, on_an_ampere: Any) -> None:
    """cuDNN's on Hopper, PyTorch's flash attention on Ampere."""
    assert "cudnnBackendExecute" in on_a_hopper["attention"]
    assert any("flash_fwd_kernel" in name for name in on_an_ampere["attention"])
    assert "cudnnBackendExecute" not in on_an_ampere["attention"]


def test_cudnn_is_of_the_version_that_pytorch_was_built_for(on_device: OnDevice) -> None:
    """PyTorch refuses an older one where a program asks for its version."""
    result = on_device.run("""
        import torch
        result = [torch.backends.cudnn.version(), torch._C._cudnn.getCompileVersion()]
    """)
    assert result[0] == result[1][0] * 10_000 + result[1][1] * 100 + result[1][2]


def test_brim_run_leaves_alone_what_fits_on_the_card_already(on_device: OnDevice, tmp_path: Path) -> None:
    """Models of 60 % of the card, on it before any is called: what is free counts without them."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import torch
            from torch import nn
            models = [nn.Sequential(*[nn.Linear(2048, 2048, device="cuda") for _ in range(30)]) for _ in range(2)]
            x = torch.ones(2, 2048, device="cuda")
            with torch.no_grad():
                for model in models:
                    model(x)
        """)
    )
    done = subprocess.run(
        [on_device.environment.python, "-m", "brim", "run", "--device", "cuda", str(program)],
        env=on_device.variables("H100", memory_bytes=1600 * MIB, context_bytes=200 * MIB),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "fitted for" not in done.stderr
