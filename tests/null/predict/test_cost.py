"""Seconds by roofline: what limits an operation, what the CPU adds, and which rate a dtype gets."""

from dataclasses import replace

import pytest

from brim import catalog
from brim.core import Hardware, Op, Phase, Tier, Trace
from brim.errors import UsageError
from brim.predict.cost import flops_per_s, op_s, step_s

GPU = Hardware(
    name="made up",
    compute="vram",
    tiers=(Tier(name="vram", capacity_bytes=1, bytes_per_s=1e12),),
    flops_per_s={"float32": 1e13, "tf32": 5e13, "bfloat16": 1e14},
)

INSTANT = replace(GPU, dispatch_s=0.0, kernel_s=0.0)


def op(name="aten.mm.default", *, flops=0, read=0, written=1, dtype="bfloat16", step=0, phase=Phase.FORWARD):
    return Op(
        name=name,
        module="",
        phase=phase,
        step=step,
        at=0,
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        dtype=dtype,
    )


def trace(*ops):
    return Trace(model="m", target="cuda", ops=ops, storages=())


def test_a_large_product_is_limited_by_arithmetic():
    """8,192 cubed in bfloat16: 1.1e12 FLOP against 0.4 GB."""
    n = 8192
    product = op(flops=2 * n**3, read=4 * n * n, written=2 * n * n)
    assert op_s(product, GPU) == 2 * n**3 / 1e14


def test_a_matrix_vector_product_is_limited_by_memory():
    """Decoding reads every weight once: an H100's 3.35 TB/s, not its teraFLOPs."""
    hardware = catalog.gpu("h100").hardware(measured=False)
    decode = op(flops=2 * 8_030_261_248, read=2 * 8_030_261_248, written=8192)
    assert op_s(decode, hardware) == pytest.approx(2 * 8_030_261_248 / 3.35e12, rel=1e-6)


def test_elementwise_operations_use_the_vector_units():
    n = 10**9
    assert op_s(op("aten.gelu.default", flops=n, read=0, written=1), GPU) == n / 1e13


def test_float32_products_use_tf32_where_pytorch_does():
    n = 10**12
    product, conv = op(flops=n, dtype="float32"), op("aten.convolution.default", flops=n, dtype="float32")
    assert op_s(product, GPU) == n / 1e13
    assert op_s(conv, GPU) == n / 5e13


SHARES = replace(
    INSTANT, shares={".bytes": 0.8, "product.flops": 0.5, "planar.bytes": 0.4, "normalization.bytes": 0.2}
)


def test_a_kernel_takes_the_share_of_the_rate_that_its_kind_reaches():
    n = 10**12
    product = replace(op(flops=n), kernel="product", fill=0.5)
    assert op_s(product, SHARES) == n / (1e14 * 0.5 * 0.5)
    assert op_s(product, GPU) == n / 1e14
    assert op_s(op("aten.add.Tensor", written=n), SHARES) == n / (1e12 * 0.8)
    assert op_s(replace(op(written=n), kernel="normalization"), SHARES) == n / (1e12 * 0.2)


def test_a_convolution_of_planes_converts_before_and_after_it_computes():
    n = 10**12
    conv = replace(op("aten.convolution.default", flops=n, written=n // 100), kernel="planar product")
    assert op_s(conv, SHARES) == pytest.approx(n / 0.5e14 + n / 100 / (1e12 * 0.4))
    assert op_s(replace(conv, kernel="product"), SHARES) == pytest.approx(n / 0.5e14)
    instant = replace(SHARES, dispatch_s=1.0)
    gradients = replace(conv, name="aten.convolution_backward.default")
    assert [round(step_s(trace(each), instant)) for each in (conv, gradients)] == [3, 6]


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("bfloat16", 1e14),
        ("float16", 1e14),  # no figure of its own: bfloat16's units
        ("float8_e4m3fn", 1e14),
        ("float8_e5m2", 1e14),
        ("int8", 1e14),
        ("float32", 1e13),
        ("float64", 1e13 / 64),
        ("int64", 1e13),
    ],
)
def test_a_dtype_without_a_figure_falls_back(dtype, rate):
    assert flops_per_s(GPU, dtype) == rate


def test_bfloat16_on_a_card_without_it_runs_in_float32():
    assert flops_per_s(catalog.gpu("t4").hardware(), "bfloat16") == 8.1e12
    assert flops_per_s(catalog.gpu("t4").hardware(), "float16") == 65e12


def test_a_machine_without_rates_is_a_usage_error():
    bare = Hardware(name="bare", compute="ram", tiers=(Tier(name="ram", capacity_bytes=1, bytes_per_s=1e9),))
    with pytest.raises(UsageError, match="bfloat16"):
        op_s(op(flops=1), bare)
    unknown = Hardware(name="slow", compute="ram", tiers=(Tier(name="ram", capacity_bytes=1),))
    with pytest.raises(UsageError, match="memory rate"):
        op_s(op(), unknown)


def test_small_operations_wait_for_the_cpu():
    small = trace(*(op(written=1000) for _ in range(1000)))
    assert step_s(small, GPU) == pytest.approx(1000 * GPU.dispatch_s, rel=1e-3)
    assert step_s(small, INSTANT) == pytest.approx(1000 * 1000 / 1e12)


def test_large_operations_hide_the_cpu():
    large = trace(*(op(flops=10**11, written=1000) for _ in range(100)))
    assert step_s(large, GPU) == pytest.approx(100 * 1e-3 + GPU.dispatch_s + 100 * GPU.kernel_s)


def test_a_slow_start_is_caught_up_only_as_far_as_the_cpu_runs_ahead():
    """Ten small operations, then a long one: the long one starts when the CPU has issued it."""
    mixed = trace(*(op(written=1) for _ in range(10)), op(flops=10**12, written=1))
    found = step_s(mixed, replace(INSTANT, dispatch_s=1e-3))
    assert found == pytest.approx(11 * 1e-3 + 10**12 / 1e14)


def test_on_a_cpu_nothing_overlaps():
    tier = Tier(name="ram", capacity_bytes=1, bytes_per_s=1e10)
    cpu = Hardware(name="cpu", compute="ram", tiers=(tier,), flops_per_s={"float32": 1e11})
    one = op(flops=10**9, dtype="float32", written=1)
    found = step_s(trace(one, one), replace(cpu, dispatch_s=1e-3, kernel_s=0.0))
    assert found == pytest.approx(2 * (1e-3 + 1e-2))


def test_the_last_step_is_taken():
    steps = trace(
        op(flops=10**12, step=0),
        op(flops=10**11, step=1),
        op(flops=2 * 10**11, step=1, phase=Phase.BACKWARD),
        op("aten.view.default", written=0, step=1),
        op("aten.mul.Tensor", written=10**9, step=-1, phase=Phase.BUILD),
    )
    assert step_s(steps, INSTANT) == pytest.approx(3e-3)
    with pytest.raises(UsageError, match="no steps"):
        step_s(trace(), GPU)
