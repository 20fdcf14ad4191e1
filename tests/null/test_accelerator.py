"""Accelerators other than CUDA, played by modules of functions: what each backend calls things, and what it lacks.

No such device is here; what these tests show is which of a backend's words are asked, not that its answers are right.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import brim
from brim import accelerator
from brim.accelerator import Accelerator
from brim.core import Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import UnsupportedError, UsageError
from brim.measure import bandwidth, capacity, device_rates
from brim.measure.monitor import Monitor
from brim.measure.probe import probe
from brim.memory import streams as memory_streams
from brim.memory.recorder import Recorder
from brim.memory.tiers import device_memory
from brim.planning.seconds import spans
from brim.planning.strategy.state import restore_rng, rng_state
from brim.units import GIB, MIB

CPU = torch.device("cpu")


def xpu(**more: Any) -> Accelerator:
    """``torch.xpu`` as far as memory goes: of 8 GiB 5 are free, 2 are reserved, 1 of those is used."""
    words: dict[str, Any] = {
        "get_device_name": lambda: "an Intel GPU",
        "mem_get_info": lambda: (5 * GIB, 8 * GIB),
        "memory_allocated": lambda: GIB,
        "memory_reserved": lambda: 2 * GIB,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    return Accelerator(type="xpu", module=SimpleNamespace(**words | more), device=CPU)


def mps() -> Accelerator:
    """``torch.mps``: other names, no peaks, no streams."""
    words = {
        "recommended_max_memory": lambda: 12 * GIB,
        "driver_allocated_memory": lambda: 3 * GIB,
        "current_allocated_memory": lambda: GIB,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    return Accelerator(type="mps", module=SimpleNamespace(**words), device=CPU)


@pytest.fixture
def present(monkeypatch):
    """Makes an accelerator the one that is there."""
    return lambda one: monkeypatch.setattr(
        accelerator, "available", lambda kind=None: one if kind in (None, one.type) else None
    )


def test_free_memory_is_asked_in_each_backends_words(present):
    present(xpu())
    assert capacity.free_bytes(VRAM) == (5 + 1) * GIB  # and what PyTorch holds for nothing
    present(xpu(get_per_process_memory_fraction=lambda: 0.5))
    assert capacity.free_bytes(VRAM) == (2 + 1) * GIB
    present(mps())
    assert capacity.free_bytes(VRAM) == (9 + 2) * GIB


def test_files_in_the_page_cache_are_free_memory_of_a_device_that_shares_ram(monkeypatch):
    """A GB10 whose driver said 41.5 GiB had 115.7 GiB of RAM available: a file of 60 GiB had been written."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=7 * GIB))
    for is_integrated, free_bytes in ((True, 7 * GIB), (False, 5 * GIB)):
        words = {
            "current_device": lambda: 0,
            "get_device_properties": lambda _, integrated=is_integrated: SimpleNamespace(is_integrated=integrated),
            "mem_get_info": lambda: (5 * GIB, 8 * GIB),
        }
        gb10 = Accelerator(type="cuda", module=SimpleNamespace(**words), device=CPU)
        assert gb10.memory_bytes() == (free_bytes, 8 * GIB)


def test_a_limit_is_a_share_of_the_device_and_is_taken_back():
    said: list[float] = []
    words = {
        "get_per_process_memory_fraction": lambda: 0.75,
        "set_per_process_memory_fraction": said.append,
        "current_device": lambda: 0,
    }
    with pytest.raises(ZeroDivisionError), xpu(**words).limited(2 * GIB):
        assert int(said[-1] * 8 * GIB) == 2 * GIB
        raise ZeroDivisionError
    assert said.pop() == 0.75
    with xpu(**words).limited(100 * GIB):
        assert said[-1] == 0.75  # what the program allows holds too
    with xpu().limited(1):
        pass  # a backend without limits has none


def test_what_a_backend_lacks_is_named():
    lacking = Accelerator(type="npu", module=SimpleNamespace(), device=CPU)
    with pytest.raises(UnsupportedError, match=r"Ascend NPU(.|\n)*mem_get_info"):
        lacking.memory_bytes()
    with pytest.raises(UnsupportedError, match="max_memory_reserved"):
        lacking.peak_reserved_bytes(0)
    assert lacking.name == "Ascend NPU"


def test_a_monitor_adds_up_the_devices_of_a_backend_in_use(monkeypatch):
    resets: list[int] = []
    words = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "max_memory_reserved": lambda index: (index + 1) * 10 * MIB,
        "reset_peak_memory_stats": resets.append,
    }
    monkeypatch.setattr(torch, "npu", SimpleNamespace(**words), raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)  # a backend that is not here has no device either
    with Monitor() as watching:
        pass
    usage = watching.usage()
    assert resets[:2] == [0, 1]
    assert usage.vram_reserved_bytes == 30 * MIB


@pytest.mark.parametrize("make", [xpu, mps])
def test_a_backend_without_streams_is_measured(make, monkeypatch):
    monkeypatch.setattr(device_rates, "_COPY_BYTES", MIB)
    monkeypatch.setattr(device_rates, "_READ_BYTES", MIB)
    monkeypatch.setattr(device_rates, "matrix_rate", lambda product, **_: float(product(8)() is not None))
    one = make()
    with device_rates.unnoticed(one):
        there, back = device_rates.links(one)
        rates = device_rates.matrix_rates(one)
    assert (there.source, there.target, back.source, back.target) == (RAM, VRAM, VRAM, RAM)
    assert there.duplex_bytes_per_s == there.bytes_per_s / 2
    assert device_rates.vram_read_rate(one) > 0
    assert set(rates) == {"float32", "bfloat16", "float16"}


@pytest.mark.thorough
def test_a_probe_measures_what_is_named_and_takes_nothing_else_by_itself(present, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    present(xpu())
    monkeypatch.setattr(device_rates, "_COPY_BYTES", MIB)
    monkeypatch.setattr(device_rates, "_READ_BYTES", MIB)
    monkeypatch.setattr(device_rates, "matrix_rate", lambda product, **_: 1.0)
    monkeypatch.setattr(bandwidth, "cpu_matrix_rates", lambda: {"float32": 1.0})
    named = probe(device="xpu", directory=tmp_path)
    assert (named.name, named.compute, named.tier(VRAM).capacity_bytes) == ("an Intel GPU", VRAM, 8 * GIB)
    assert probe(device="auto", directory=tmp_path).compute == RAM
    with pytest.raises(UnsupportedError, match="Ascend NPU"):
        probe(device="npu", directory=tmp_path)
    with pytest.raises(UsageError, match="xpu, npu, mps and cpu"):
        probe(device="tpu", directory=tmp_path)


class Streams:
    """A backend with streams, on the CPU: what is asked of it is noted, and done at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.time_ms = 0.0
        self.now = "the first stream"

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.asked.append(f"device {device.index}")
        yield

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.asked.append(f"{self.now} waits"))

    def Stream(self, device: torch.device) -> Any:  # as the backends have it
        return SimpleNamespace(synchronize=lambda: self.asked.append("stream synchronized"))

    def Event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(query=lambda: True, synchronize=lambda: self.asked.append("event synchronized"))

        def record(stream: Any) -> None:
            self.time_ms += 1000.0
            event.at_ms = self.time_ms

        event.record = record
        if enable_timing:
            event.elapsed_time = lambda later: later.at_ms - event.at_ms
        return event

    def synchronize(self) -> None:
        self.asked.append("synchronized")

    def empty_cache(self) -> None:
        self.asked.append("cache emptied")


NPU = torch.device("meta", 1)  # such a device is not here: only its number matters


@pytest.fixture
def streams(monkeypatch) -> Streams:
    module = Streams()
    monkeypatch.setattr(accelerator, "of", lambda device: Accelerator(type="npu", module=module, device=NPU))
    for user in (memory_streams, spans):
        monkeypatch.setattr(user, "of", accelerator.of)
    return module


def test_an_engine_moves_bytes_in_the_streams_of_any_backend(streams):
    memory = device_memory(Timeline("t", measured=True), vram_bytes=MIB, ram_bytes=MIB, device=CPU)
    source = torch.arange(100, dtype=torch.uint8)
    there = memory.compute.allocate(100, "there")
    copied = memory.engine.copy(source, there, "block", [memory.engine.mark()], (RAM, VRAM))
    copied.wait()
    memory.engine.finish(copied)
    assert torch.equal(there.tensor, source) and copied.done
    assert "device 1" in streams.asked and "the first stream waits" in streams.asked
    assert not any("cuda" in word for word in streams.asked)
    memory.close()
    assert streams.asked.count("stream synchronized") == 2


def test_spans_are_timed_by_the_events_of_any_backend(streams):
    recorder = Recorder(Timeline("t", measured=True))
    clock = spans._EventClock(recorder, accelerator.of(CPU))
    first, second = clock.mark(), clock.mark()
    assert clock.is_over(second)
    assert clock.seconds(second) - clock.seconds(first) == pytest.approx(1.0)
    clock.settle()
    assert streams.asked.count("synchronized") == 3


def test_a_backend_with_one_queue_moves_nothing_and_says_so(monkeypatch):
    monkeypatch.setattr(memory_streams, "of", lambda device: mps())
    with pytest.raises(UnsupportedError, match=r"Apple MPS(.|\n)*no Stream"):
        device_memory(Timeline("t", measured=True), vram_bytes=MIB, ram_bytes=MIB, device=CPU)


def test_random_states_are_those_of_each_backend_in_use(monkeypatch):
    states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    set_to: dict[int, int] = {}
    words = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "get_rng_state_all": lambda: states,
        "set_rng_state": lambda state, index: set_to.update({index: int(state)}),
    }
    npu = SimpleNamespace(**words)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)  # a backend that is not here has no device either
    saved = rng_state()
    assert saved["cuda"] == [] and len(saved["npu"]) == 2
    one = Accelerator(type="npu", module=npu, device=CPU)
    monkeypatch.setattr(accelerator, "available", lambda kind=None: one if kind == "npu" else None)
    restore_rng(saved)
    assert set_to == {0: 1, 1: 2}


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_is_seen_of_any_backend(capturing, monkeypatch):
    words = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: capturing}
    monkeypatch.setattr(torch, "npu", SimpleNamespace(**words), raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)
    assert accelerator.is_capturing() is capturing


# Where torch.cuda is asked itself, and why.
CUDA_ALONE = {
    "accelerator.py": "the place that tells accelerators apart; cudaHostRegister",
    "errors.py": "accelerator.py stands on it",
    "predict": "what CUDA would do, traced on a machine without it",
    "estimation": "the same",
    "device": "PyTorch's CUDA build on a device that is not there",
    "rehearsal": "the same",
    "measure/watch.py": "PyTorch's recorder of memory is CUDA's",
    "measure/device_rates.py": "which CUDA devices multiply float8",
    "integrations/training_step.py": "the peak that CUDA's allocator counts, beside the one predicted for it",
    "techniques/decoding_graphs.py": "graphs of launches",
    "techniques/precision.py": "which CUDA devices multiply TF32 and float8",
    "planning/inference/machine.py": "the compute capability, by which CUDA's kernels are predicted",
    "run/train/loop.py": "NVML knows devices by CUDA's names",
    "run/script": "programs that say cuda; allocators that take torch.cuda's place",
    "run/ranks": "NCCL",
    "cli/generate.py": "the same",
}


@pytest.mark.thorough
def test_torch_cuda_is_asked_for_what_only_cuda_has():
    source, asked = Path(brim.__file__).parent, {}
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
                asked.setdefault(path.relative_to(source).as_posix(), []).append(f"{node.attr}:{node.lineno}")
    found = {name for name in asked for known in CUDA_ALONE if name == known or name.startswith(f"{known}/")}
    assert {name: words for name, words in asked.items() if name not in found} == {}
    unused = [k for k in CUDA_ALONE if not any(name == k or name.startswith(f"{k}/") for name in found)]
    assert unused == []


def test_a_model_is_fitted_to_what_is_here_and_has_streams_and_takes_parameters(present):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"sees no Intel XPU"):
        brim.fit(model, device="xpu")
    present(mps())
    with pytest.raises(UnsupportedError, match=r"Apple MPS has a single queue(.|\n)*probe"):
        brim.fit(model, device="mps")
    words = dict.fromkeys(("Stream", "Event", "stream"))
    present(Accelerator(type="npu", module=SimpleNamespace(**words), device=torch.device("meta")))
    with pytest.raises(UnsupportedError, match=r"parameters that were created on the CPU"):
        brim.fit(model, device="npu")
    for name in ("tpu", "xpu:", "xpu:one", "cpu:0", "auto:1"):
        with pytest.raises(UsageError, match="Devices are"):
            brim.fit(model, device=name)


def test_without_an_accelerator_there_is_none():
    assert accelerator.available("mps") is None
    assert accelerator.kinds()[:4] == ("cuda", "xpu", "npu", "mps")
