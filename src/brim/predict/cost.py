"""Seconds from a trace and a machine: a roofline per operation, and a CPU that can be too slow to launch them.

An operation takes the longer of its arithmetic at the machine's rate for its dtype and its bytes at the memory's rate
(Williams et al., "Roofline", CACM 2009), each by the share of the rate that kernels of its kind reach
(``Hardware.shares``). A convolution whose channels are not last takes the sum: its operands are converted first. On a
GPU the CPU issues operations ahead of the device; the step ends when the device has done the last one.
"""

from __future__ import annotations

from brim.catalog.gpus import read_facts
from brim.core import Hardware, Op, Trace
from brim.core.hardware import RAM
from brim.errors import UsageError

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

_PRODUCTS = read_facts("operators.json")["work"]["products"]
_CONVOLUTIONS = "conv"
_PLANAR = "planar "  # begins the kernel of a convolution whose channels are not last
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


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
    """Seconds of one operation on the device, without overheads.

    By PyTorch's defaults convolutions of float32 compute in TF32, matrix products do not. Operations other than
    products compute in float32 units whatever their dtype.
    """
    limits = op_limits(op, hardware)
    return sum(limits) if hardware.shares and adds_up(op) else max(limits)


def adds_up(op: Op) -> bool:
    """Return True if an operation converts its operands in kernels of their own, before and after the arithmetic."""
    return op.kernel.startswith(_PLANAR)


def launches(op: Op) -> int:
    """Return the number of kernels that an operation of a GPU launches.

    The gradients of a convolution are two. cuDNN converts two operands of each where channels are not last: a profile
    of a ResNet on an H200 has 906 kernels for 534 operations, and this counts 905.
    """
    return (2 if "convolution_backward" in op.name else 1) * (3 if adds_up(op) else 1)


def share_name(op: Op, rate: str) -> str:
    """Return the name among ``Hardware.shares`` of an operation's share of a rate: ``"flops"`` or ``"bytes"``."""
    if rate == "bytes" and adds_up(op):
        return "planar.bytes"
    return f"{op.kernel.removeprefix(_PLANAR)}.{rate}"


def step_s(trace: Trace, hardware: Hardware) -> float:
    """Seconds of the last step. Raises UsageError for a trace without steps."""
    last = max((op.step for op in trace.ops), default=-1)
    if last < 0:
        raise UsageError(f"The trace of {trace.model} has no steps.")
    issued_s = done_s = 0.0
    runs_alone = hardware.compute == RAM  # the CPU is the device: nothing overlaps
    for op in trace.ops:
        if op.step != last or not (op.written_bytes or op.flops):
            continue  # a view: no kernel, and about a tenth of an operation's time on the CPU
        count = 1 if runs_alone else launches(op)
        issued_s = (done_s if runs_alone else issued_s) + count * hardware.dispatch_s
        done_s = max(issued_s, done_s) + count * hardware.kernel_s + op_s(op, hardware)
    return done_s


def op_limits(op: Op, hardware: Hardware) -> tuple[float, float]:
    """(seconds of arithmetic, seconds of memory)."""
    bandwidth = hardware.tier(hardware.compute).bytes_per_s
    if bandwidth <= 0:
        raise UsageError(f"The memory rate of {hardware.name} is unknown.", todo="Probe the machine.")
    memory = (op.read_bytes + op.written_bytes) / (bandwidth * hardware.share(share_name(op, "bytes")))
    if not op.flops:
        return 0.0, memory
    rate = flops_per_s(hardware, _computes_in(op))
    if hardware.shares:
        rate *= hardware.share(share_name(op, "flops")) * op.fill
    return op.flops / rate, memory


def _computes_in(op: Op) -> str:
    base = base_name(op.name)
    if op.kernel == "depthwise" or (base not in _PRODUCTS and not base.startswith(_ATTENTION)):
        return "float64" if op.dtype == "float64" else "float32"
    return "tf32" if op.dtype == "float32" and _CONVOLUTIONS in base else op.dtype
