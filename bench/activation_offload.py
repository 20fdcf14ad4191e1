"""Activation offload against no offload, against what the disk allows, and against other hooks, in one run.

    python bench/activation_offload.py                   on the CPU: activations on disk; about a minute
    python bench/activation_offload.py --device cuda     with a GPU: activations in RAM (not run yet)

Two stacks of Llama-like blocks: "narrow" ones save many bytes per flop, so that the disk is what bounds them; "wide"
ones compute long enough to cover the copies. Rounds are interleaved; numbers are medians of whole steps after one
that is not counted. T_bound = max(forward, bytes / write rate) + max(backward, bytes / read rate), with forward and
backward of the plain run, and the rates of direct requests of the same bytes, of the same rounds; eta = T_bound / T.
"disk hooks" are saved-tensor hooks that write each tensor to a file, as PyTorch's tutorial on them does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import _harness as harness
from brim.core import Timeline
from brim.core.hardware import DISK, RAM, VRAM
from brim.memory.tiers import Memory, cpu_memory, device_memory
from brim.techniques.activation_offload.technique import apply

MIB = 1 << 20
PIECE_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    width: int
    inner: int
    heads: int
    blocks: int
    batch: int
    length: int = 256


CPU_SHAPES = (
    Shape(name="narrow", width=64, inner=160, heads=1, blocks=6, batch=64),
    Shape(name="wide", width=512, inner=1408, heads=8, blocks=4, batch=8),
)
CUDA_SHAPES = (
    Shape(name="narrow", width=512, inner=1408, heads=8, blocks=16, batch=16, length=1024),
    Shape(name="wide", width=8192, inner=22016, heads=64, blocks=4, batch=8, length=1024),
)


class Block(nn.Module):
    """RMSNorm, causal attention, SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.heads = shape.heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    shapes = shapes_for(options)
    document: dict[str, Any] = {"device": options.device, "machine": harness.machine_facts(("brim", "torch"))}
    document["settings"] = {"rounds": options.rounds, "threads": options.threads}
    document["shapes"] = [measure(shape, options) for shape in shapes]
    if options.output:
        harness.write_json(options.output, document)
    for result in document["shapes"]:
        show(result)


def shapes_for(options: argparse.Namespace) -> tuple[Shape, ...]:
    shapes = CUDA_SHAPES if options.device == "cuda" else CPU_SHAPES
    if options.tiny:
        shapes = tuple(replace(shape, batch=max(1, shape.batch // 16)) for shape in shapes)
    return shapes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the disk is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tiny", action="store_true", help="a sixteenth of the bytes, to see that it works")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    return parser.parse_args()


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one stack, round by round."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    net = nn.Sequential(*[Block(shape) for _ in range(shape.blocks)]).to(device)
    x = torch.randn(shape.batch, shape.length, shape.width, device=device)
    memory = _memory(options)
    contenders = _contenders(net, memory, options)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    growth: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    rates: list[tuple[float, float]] = []
    for number in range(options.rounds + 1):
        before_bytes = _moved_bytes(memory, options.device)
        for name, contender in contenders.items():
            with contender():
                took, growth_bytes = step(net, x)
            gradients[name] = [p.grad.clone() for p in net.parameters()]
            if number:
                times[name].append(took)
                growth[name] = max(growth.get(name, 0), growth_bytes)
        moved_bytes = _moved_bytes(memory, options.device) - before_bytes
        rates.append(raw_rates(moved_bytes, options))
    memory.close()
    same = all(torch.equal(a, b) for a, b in zip(gradients["plain"], gradients["brim"], strict=True))
    return _summary(shape.name, times, growth, moved_bytes, rates[1:] or rates, same)


def step(net: nn.Module, x: torch.Tensor) -> tuple[tuple[float, float], int]:
    """Seconds of forward and of backward; by how much memory grew at most."""
    net.zero_grad(set_to_none=True)
    gc.collect()
    before = _begin_memory(x.device)
    begin_s = time.perf_counter()
    loss = net(x).pow(2).mean()
    _synchronize(x.device)
    middle_s = time.perf_counter()
    loss.backward()
    _synchronize(x.device)
    end_s = time.perf_counter()
    return (middle_s - begin_s, end_s - middle_s), _memory_peak(x.device) - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _begin_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # what the C library kept of earlier runs would hide what this one takes
    harness.reset_rss_peak()
    return harness.status_bytes("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else harness.status_bytes("VmHWM")


# -- contenders


Contender = Callable[[], contextlib.AbstractContextManager[Any]]


def _contenders(net: nn.Sequential, memory: Memory, options: argparse.Namespace) -> dict[str, Contender]:
    @contextlib.contextmanager
    def disk_hooks() -> Iterator[None]:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder, _file_hooks(Path(folder)):
            yield

    @contextlib.contextmanager
    def brim() -> Iterator[None]:
        window_bytes = 4 * MIB if options.tiny else None
        handle = apply(net, [str(index) for index in range(len(net))], memory, window_bytes=window_bytes)
        yield
        handle.remove()

    save_on_cpu = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=options.device == "cuda")
    found: dict[str, Contender] = {"plain": contextlib.nullcontext, "brim": brim, "save_on_cpu": save_on_cpu}
    return found if options.device == "cuda" else found | {"disk hooks": disk_hooks}


def _memory(options: argparse.Namespace) -> Memory:
    timeline = Timeline("bench", measured=True)
    if options.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        return device_memory(timeline, vram_bytes=1 << 40, ram_bytes=1 << 36, device=device)
    memory = cpu_memory(timeline, ram_bytes=1 << 40)
    memory.use_disk(folder=str(options.directory), limit_bytes=None)
    return memory


def _moved_bytes(memory: Memory, device: str) -> int:
    """One way; the other carries the same but for the newest, which may never leave."""
    return memory.recorder.copied_bytes.get((VRAM, RAM) if device == "cuda" else (RAM, DISK), 0)


@dataclass(frozen=True)
class _File:
    path: Path
    shape: torch.Size
    dtype: torch.dtype


def _file_hooks(folder: Path) -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(functools.partial(_to_file, folder), _from_file)


def _to_file(folder: Path, tensor: torch.Tensor) -> _File | torch.Tensor:
    """Plain buffered files, one per tensor; parameters are left alone, or the comparison would not be one."""
    if tensor.numel() * tensor.element_size() < (256 << 10) or tensor.is_leaf:
        return tensor.detach()
    path = folder / str(time.monotonic_ns())
    tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tofile(path)
    return _File(path, tensor.shape, tensor.dtype)


def _from_file(packed: _File | torch.Tensor) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    return torch.from_numpy(np.fromfile(packed.path, dtype=np.uint8)).view(packed.dtype).view(packed.shape)


# -- what bounds it


def raw_rates(count: int, options: argparse.Namespace) -> tuple[float, float]:
    """Bytes/s out of the compute tier and back, nothing else going on; the better of one and two at once."""
    if options.device == "cuda":
        return _link_rates(min(count, 1 << 30))
    descriptor, name = tempfile.mkstemp(dir=options.directory)
    os.close(descriptor)
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
        Path(name).unlink()
        os.ftruncate(descriptor, count)
        offsets = range(0, max(count - PIECE_BYTES, 1), PIECE_BYTES)
        _run_direct(os.pwrite, descriptor, offsets, 1)  # the file has its pages from the second time on
        ways = [[_run_direct(call, descriptor, offsets, n) for n in (1, 2)] for call in (os.pwrite, _pread)]
        return max(ways[0]), max(ways[1])
    finally:
        os.close(descriptor)


def _pread(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def _run_direct(call: Callable[[int, mmap.mmap, int], int], descriptor: int, offsets: Sequence[int], n: int) -> float:
    buffers = [mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(n)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(os.urandom(4096) * (PIECE_BYTES // 4096))

    def work(index: int) -> None:
        for offset in offsets[index::n]:
            call(descriptor, buffers[index], offset)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(n)]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(offsets) * PIECE_BYTES / (time.perf_counter() - begin_s)


def _link_rates(count: int) -> tuple[float, float]:
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(count, dtype=torch.uint8, device="cuda")
    found = []
    for source, target in ((device, host), (host, device)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(count / (time.perf_counter() - begin_s))
    return found[0], found[1]


# -- results


def _summary(
    name: str,
    times: dict[str, list[tuple[float, float]]],
    growth: dict[str, int],
    moved_bytes: int,
    rates: Sequence[tuple[float, float]],
    same: bool,
) -> dict[str, Any]:
    medians = {
        contender: [harness.Spread.of([took[way] for took in found]).median for way in (0, 1)]
        for contender, found in times.items()
    }
    out, back = (harness.Spread.of([rate[way] for rate in rates]).median for way in (0, 1))
    forward_s, backward_s = medians["plain"]
    bound_s = max(forward_s, moved_bytes / out) + max(backward_s, moved_bytes / back)
    return {
        "name": name,
        "moved_bytes": moved_bytes,
        "raw_bytes_per_s": {"out": out, "back": back},
        "bound_s": bound_s,
        "bound_by": {
            "forward": "copies" if moved_bytes / out > forward_s else "compute",
            "backward": "copies" if moved_bytes / back > backward_s else "compute",
        },
        "gradients_equal_plain": same,
        "contenders": {
            contender: {
                "forward_s": found[0],
                "backward_s": found[1],
                "step_s": sum(found),
                "eta": bound_s / sum(found),
                "slower_than_plain": sum(found) / sum(medians["plain"]) - 1,
                "peak_growth_bytes": growth[contender],
                "rounds_s": [sum(took) for took in times[contender]],
            }
            for contender, found in medians.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    rates = result["raw_bytes_per_s"]
    print(
        f"\n{result['name']}: {result['moved_bytes'] / 1e6:.0f} MB each way; raw {rates['out'] / 1e9:.2f} GB/s out, "
        f"{rates['back'] / 1e9:.2f} GB/s back; bound {result['bound_s']:.3f} s (forward: "
        f"{result['bound_by']['forward']}, backward: {result['bound_by']['backward']}); gradients "
        f"{'equal' if result['gradients_equal_plain'] else 'DIFFER'}"
    )
    print(f"{'':12} {'forward s':>10} {'backward s':>10} {'step s':>8} {'eta':>6} {'vs plain':>9} {'peak MB':>8}")
    for name, found in result["contenders"].items():
        print(
            f"{name:12} {found['forward_s']:10.3f} {found['backward_s']:10.3f} {found['step_s']:8.3f} "
            f"{found['eta']:6.2f} {found['slower_than_plain']:+9.1%} {found['peak_growth_bytes'] / 1e6:8.0f}"
        )


if __name__ == "__main__":
    main()
