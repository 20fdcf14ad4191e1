"""Seconds from a trace and a machine: a roofline per operation, and a CPU that can be too slow to launch them.

An operation takes the longer of its arithmetic at the machine's rate for its dtype and its bytes at the memory's rate
(Williams et al., "Roofline", CACM 2009). On a GPU the CPU issues operations ahead of the device; the step ends when
the device has done the last one. No efficiency factor is applied here: ``Gpu.hardware`` gives measured rates where
they are known, and a probe gives this machine's.
"""

from __future__ import annotations

from dataclasses import dataclass

from brim.core import Hardware, Op, Trace
from brim.core.hardware import RAM
from brim.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """``dispatch_s``: the CPU's time to issue one operation; ``kernel_s``: the device's pause between two kernels."""

    dispatch_s: float = 0.0
    kernel_s: float = 0.0


# The host's time per operation in a whole program, including the Python of its modules: 15 to 22 us where the
# host never waited for an H200 (transformers' generation, Adafactor; measurements/gpu_truth.jsonl), 16 to 19 us for
# transformers' on a CPU alone. Between back-to-back kernels 0.9 us are lost: 3.8 us per launch of a kernel of 2.9 us
# on a V100 (NVIDIA, "Getting Started with CUDA Graphs", developer.nvidia.com/blog/cuda-graphs).
EAGER = Overheads(dispatch_s=17e-6, kernel_s=0.9e-6)

# Dtypes whose rates replace an unknown one, in this order: the arithmetic then runs in that dtype.
FALLBACKS = {
    "tf32": ("float32",),
    "bfloat16": ("float32",),  # GPUs before Ampere have no bfloat16 units
    "float16": ("bfloat16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "int8": ("bfloat16", "float16", "float32"),  # 8-bit weights are converted to floats before the product
}
_FLOAT8 = ("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DOUBLE_SLOWDOWN = 64  # CUDA C++ Programming Guide, arithmetic throughput: 2 against 128 results per clock (8.6, 8.9)

# fmt: off
_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "_addmm_activation",
    "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "_weight_int8pack_mm", "convolution",
    "_convolution", "convolution_backward", "cudnn_convolution", "convolution_overrideable",
    "_slow_conv2d_forward",
})
# fmt: on
_CONVOLUTIONS = "conv"
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a step by their limit. ``compute_s`` and ``memory_s`` sum the operations that are limited by each.

    ``step_s`` is at least ``device_s``; in the rest of it the device waits for the CPU.
    """

    step_s: float
    device_s: float
    compute_s: float
    memory_s: float
    dispatch_s: float
    flops: int

    @property
    def limited_by(self) -> str:
        """``dispatch`` where the device waits more than it works, else ``compute`` or ``memory``."""
        if self.step_s > 2 * self.device_s:
            return "dispatch"
        return "compute" if self.compute_s > self.memory_s else "memory"


def base_name(name: str) -> str:
    """``aten.mm.default`` or ``aten::mm`` -> ``mm``."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def flops_per_s(hardware: Hardware, dtype: str) -> float:
    """The machine's rate for products in ``dtype``; FALLBACKS name replacements for unknown rates.

    float64 without a figure runs at 1/64 of float32; integers and booleans at float32's rate. Raises UsageError where
    no rate is known.
    """
    rates = hardware.flops_per_s
    name = "float8_e4m3fn" if dtype in _FLOAT8 else dtype
    for candidate in (name, *FALLBACKS.get(name, ())):
        if rates.get(candidate):
            return rates[candidate]
    if not rates.get("float32"):
        raise UsageError(
            f"The rate of {hardware.name} for {dtype} is unknown.",
            f"It has rates for {sorted(rates) or 'nothing'}.",
            "Probe the machine, or name a GPU of the catalog.",
        )
    return rates["float32"] / (_DOUBLE_SLOWDOWN if name in ("float64", "complex128") else 1)


def op_s(op: Op, hardware: Hardware) -> float:
    """Seconds of one operation on the device: the longer of arithmetic and memory, without overheads.

    By PyTorch's defaults convolutions of float32 compute in TF32, matrix products do not. Operations other than
    products compute in float32 units whatever their dtype.
    """
    return max(_op_limits(op, hardware))


def step_cost(trace: Trace, hardware: Hardware, *, overheads: Overheads = EAGER) -> StepCost:
    """Seconds of the last step and where they go. Raises UsageError for a trace without steps."""
    last = max((op.step for op in trace.ops), default=-1)
    if last < 0:
        raise UsageError(f"The trace of {trace.model} has no steps.")
    ops = [op for op in trace.ops if op.step == last]
    device = {"compute": 0.0, "memory": 0.0}
    issued = done = 0.0
    runs_alone = hardware.compute == RAM  # the CPU is the device: nothing overlaps
    for op in ops:
        if not op.written_bytes and not op.flops:
            continue  # a view: no kernel, and about a tenth of an operation's time on the CPU
        compute, memory = _op_limits(op, hardware)
        seconds = max(compute, memory)
        device["compute" if compute > memory else "memory"] += seconds
        issued = (done if runs_alone else issued) + overheads.dispatch_s
        done = max(issued, done) + overheads.kernel_s + seconds
    return StepCost(
        step_s=done,
        device_s=device["compute"] + device["memory"],
        compute_s=device["compute"],
        memory_s=device["memory"],
        dispatch_s=issued,
        flops=sum(op.flops for op in ops),
    )


def _op_limits(op: Op, hardware: Hardware) -> tuple[float, float]:
    """(seconds of arithmetic, seconds of memory)."""
    bandwidth = hardware.tier(hardware.compute).bytes_per_s
    if bandwidth <= 0:
        raise UsageError(f"The memory rate of {hardware.name} is unknown.", todo="Probe the machine.")
    memory = (op.read_bytes + op.written_bytes) / bandwidth
    if not op.flops:
        return 0.0, memory
    return op.flops / flops_per_s(hardware, _computes_in(op)), memory


def _computes_in(op: Op) -> str:
    base = base_name(op.name)
    if base not in _PRODUCTS and not base.startswith(_ATTENTION):
        return "float64" if op.dtype == "float64" else "float32"
    return "tf32" if op.dtype == "float32" and _CONVOLUTIONS in base else op.dtype
