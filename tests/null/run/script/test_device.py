"""``brim run --device cpu``: a program that names CUDA at every turn, on a machine without."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import DefaultDeviceType, checkpoint
from torch.utils.data import DataLoader, TensorDataset

from brim.run.script.device import PretendedDevice
from brim.run.script.moves import DeferredMoves

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")


@pytest.fixture
def pretended() -> Iterator[PretendedDevice]:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("__")}
    made = PretendedDevice()
    made.begin()
    yield made
    made.end()
    made.end()
    assert all(getattr(torch.cuda, name) is value for name, value in before.items())
    assert not torch.cuda.is_available() and not torch.accelerator.is_available()
    assert DefaultDeviceType.get_device_type() == "cpu"


def test_every_way_to_put_something_on_cuda_puts_it_on_the_cpu(pretended: PretendedDevice) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.ones(2, 3)
    made = [
        x.cuda(), x.cuda(0), x.cuda(non_blocking=True), x.to(device), x.to("cuda:0"), x.to(0), x.to(device=device),
        x.to("cuda", torch.float32), x.to(device, non_blocking=True), x.pin_memory(),
        torch.ones(2, 3, device="cuda"), torch.ones_like(x, device=device), torch.tensor(x.tolist(), device=0),
        x.new_ones(2, 3, device="cuda"), torch.as_tensor(x.numpy(), device="cuda"),
    ]  # fmt: skip
    for one in made:
        assert one.device.type == "cpu" and torch.equal(one, x)
    assert x.to("cuda", dtype=torch.float64).dtype == torch.float64
    assert x.to(torch.float16).dtype == torch.float16
    for model in (nn.Linear(3, 3).cuda(), nn.Linear(3, 3).to(device), nn.Linear(3, 3, device="cuda")):
        assert model(x.cuda()).device.type == "cpu"


def test_what_programs_ask_of_cuda(pretended: PretendedDevice) -> None:
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        end.record()
    assert begin.elapsed_time(end) >= 0
    assert torch.cuda.get_device_name() == "CPU"


def test_what_pytorch_asks_of_the_accelerator(pretended: PretendedDevice) -> None:
    """As optimizers, checkpointing and data loaders do inside, whether this PyTorch was built for CUDA or not."""
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1
    assert accelerator.current_accelerator(check_available=True) == torch.device("cuda")
    assert not accelerator.current_stream().is_capturing()
    accelerator.set_device_index(accelerator.current_device_index())
    accelerator.synchronize()
    with accelerator.device_index(0):
        assert torch.ones(1, device=accelerator.current_accelerator()).device.type == "cpu"
    with torch.random.fork_rng():
        torch.rand(1)
    model = nn.Linear(3, 3, device="cuda")
    recomputed = checkpoint(model, torch.ones(2, 3), use_reentrant=False)
    recomputed.sum().backward()
    torch.optim.Adam(model.parameters()).step()


@pytest.mark.parametrize("workers", [0, 1])
def test_data_is_pinned_where_it_is(pretended: PretendedDevice, workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, pin_memory=True, num_workers=workers)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]


def test_automatic_mixed_precision_is_the_cpu_s(pretended: PretendedDevice) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scalers = [torch.amp.GradScaler("cuda", init_scale=8.0), torch.cuda.amp.GradScaler(init_scale=8.0)]
    for scaler in scalers:
        assert scaler.is_enabled()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            made = model(torch.randn(4, 8).cuda())
        assert made.dtype == torch.bfloat16
        scaler.scale(made.float().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model(torch.randn(4, 8)).dtype == torch.float32


def test_checkpoints_are_loaded_to_where_cuda_is(pretended: PretendedDevice, tmp_path: object) -> None:
    path = f"{tmp_path}/x.pt"
    torch.save({"x": torch.ones(3)}, path)
    for where in ("cuda", torch.device("cuda:0"), lambda storage, location: storage, None):
        assert torch.load(path, map_location=where)["x"].device.type == "cpu"


def test_parameters_without_room_wait_for_the_plan() -> None:
    """With the meta device in the place of the GPU."""
    moves = DeferredMoves(lambda: 5000, kind="meta")
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    moves.begin()
    moves.begin()
    with torch.device("cpu"):  # a mode that the program enters in between
        for model in (first, second):
            model.to("meta", torch.float64)
        moves.end()
        assert torch.zeros(1).device.type == "cpu"
    assert not _get_current_function_mode_stack()
    assert first.weight.is_meta and not second.weight.is_meta
    assert second.weight.dtype == torch.float64
    moves.finish(first)  # nothing of it waits
    assert first.weight.is_meta
    third = nn.Linear(4, 4).to("meta")
    assert third.weight.is_meta


@pytest.mark.thorough
def test_compiled_and_data_parallel_models_run_where_cuda_is_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(8, 8)\n"
        "x = torch.randn(2, 8)\n"
        "print(torch.equal(torch.nn.DataParallel(model)(x), model(x)))\n"
        "print(torch.equal(torch.compile(model, backend='eager')(x), model(x)))\n"
    )
    command = [sys.executable, "-m", "brim", "run", "--device", "cpu", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr
