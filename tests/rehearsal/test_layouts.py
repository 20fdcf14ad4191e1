"""Kernels that copy what lies in another order than they read, and formulas of gradients at sizes at which what they
take shows: a trace against the rehearsal device, to the byte."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

PEAKS = """
    import torch
    import torch.nn.functional as F
    from brim.estimation.simulation import place_of, simulate
    from brim.predict.tracer import trace

    result = {}

    def compare(name, build):
        peaks = simulate(trace(build, steps=1, capability=(9, 0)), place_of(None)).peak_bytes
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = build()
        step()
        del step
        result[name] = [peaks.allocated, peaks.reserved], [
            torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
"""

RESAMPLED = """
    LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
    SIZES = {3: (64,), 4: (64, 65), 5: (16, 17, 18)}

    def resampled(mode, dim, channels, options, dense_gradient):
        x = torch.zeros(2, channels, *SIZES[dim], device="cuda")
        x = x.contiguous(memory_format=LAST[dim]) if dim > 3 else x.transpose(1, 2).contiguous().transpose(1, 2)
        x.requires_grad_()

        def step():
            out = F.interpolate(x, scale_factor=2, mode=mode, **options)
            out.backward(torch.ones(out.shape, device="cuda") if dense_gradient else torch.ones_like(out))

        return step

    smooth = {"antialias": True}
    modes = [("bilinear", 4, {}), ("bilinear", 4, smooth), ("bicubic", 4, {}), ("bicubic", 4, smooth),
             ("nearest", 4, {}), ("nearest-exact", 4, {}), ("area", 4, {}), ("trilinear", 5, {}), ("nearest", 5, {}),
             ("linear", 3, {}), ("nearest", 3, {})]
    for mode, dim, options in modes:
        for channels in (3, 8):
            for dense in (True, False):
                name = f"{mode} {dim} {channels} {options} {dense}"
                compare(name, lambda: resampled(mode, dim, channels, options, dense))
"""

TRANSPOSED = """
    def transposed(*shape):
        return torch.zeros(*shape[:-2], shape[-1], shape[-2], device="cuda").transpose(-1, -2).requires_grad_()

    def build(function, *shapes):
        tensors = [transposed(*shape) for shape in shapes]

        def step():
            out = function(*tensors)
            out.backward(torch.ones_like(out))

        return step

    labels = torch.zeros(4096, dtype=torch.int64)
    compare("cdist", lambda: build(torch.cdist, (512, 64), (768, 64)))
    compare("layer_norm", lambda: build(lambda x: F.layer_norm(x, (256,)), (16, 128, 256)))
    compare("rms_norm", lambda: build(lambda x: F.rms_norm(x, (256,)), (16, 128, 256)))
    compare("nll_loss", lambda: build(lambda x: F.nll_loss(x, labels.cuda()), (4096, 1000)))
"""

ACROSS = """
    import itertools

    LAYOUTS = {"whole": lambda x: x, "transposed": lambda x: x.t(), "cut": lambda x: x[:, 1:],
               "rows": lambda x: x[1:], "every other": lambda x: x[:, ::2], "row": lambda x: x[:1].expand(x.shape),
               "one": lambda x: x[:1, :1]}

    def moved(layout, there, dtype, late):
        x = LAYOUTS[layout](torch.zeros(512, 512, device="cpu" if there == "cuda" else "cuda"))

        def step():
            kept = x.to(there, dtype, non_blocking=late)

        return step

    def written(into, out_of, there, dtype, late):
        x = torch.zeros(512, 512, device="cpu" if there == "cuda" else "cuda", dtype=dtype)
        y = torch.zeros(512, 512, device=there)
        source, target = LAYOUTS[out_of](x), LAYOUTS[into](y)
        if source.shape != target.shape:  # of what broadcasts as well
            source = x[:target.shape[0], :target.shape[1]]

        def step():
            target.copy_(source, non_blocking=late)

        return step

    def assigned(dtype):
        x, host = torch.zeros(512, 512, device="cuda"), torch.zeros(511, 510, dtype=dtype)

        def step():
            x[1:, 2:] = host
            x[0] = host[0, :1]
            x[:, 0] = torch.tensor(1.0)

        return step

    dtypes = (torch.float32, torch.float16, torch.float64)
    for there, dtype, late in itertools.product(("cpu", "cuda"), dtypes, (False, True)):
        for layout in LAYOUTS:
            compare(f"{layout} to {there} {dtype} {late}", lambda: moved(layout, there, dtype, late))
        for into, out_of in itertools.product(("whole", "transposed", "cut", "rows"), LAYOUTS):
            name = f"{out_of} into {into} of {there} {dtype} {late}"
            compare(name, lambda: written(into, out_of, there, dtype, late))
    for dtype in dtypes:
        compare(f"assigned {dtype}", lambda: assigned(dtype))
"""

CHANNELS_LAST = """
    def build(function):
        x = torch.zeros(4, 36, 64, 66, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()

        def step():
            out = function(x)
            out.backward(torch.ones(out.shape, device="cuda"))

        return step

    compare("pixel_shuffle", lambda: build(lambda x: F.pixel_shuffle(x, 3)))
    compare("pixel_unshuffle", lambda: build(lambda x: F.pixel_unshuffle(x, 2)))
    compare("channel_shuffle", lambda: build(lambda x: F.channel_shuffle(x, 4)))
    compare("adaptive_max_pool2d", lambda: build(lambda x: F.adaptive_max_pool2d(x, 16)))
    compare("adaptive_avg_pool2d", lambda: build(lambda x: F.adaptive_avg_pool2d(x, 16)))
    compare("max_pool2d", lambda: build(lambda x: F.max_pool2d(x, 2)))
    compare("unfold", lambda: build(lambda x: F.unfold(x, 3)))
"""

FORMULAS = """
    from brim.predict.lowering.cuda import convolution

    convolution._MEASURED = None  # the device's cuDNN has one engine, without a workspace

    def build(function, *shapes, strided=lambda x: x):
        tensors = [strided(torch.ones(*shape, device="cuda")).requires_grad_() for shape in shapes]

        def step():
            out = function(*tensors)
            out.backward(torch.ones(out.shape, device="cuda"))

        return step

    of_ones = lambda *shape: torch.ones(*shape, device="cuda")
    labels = lambda *shape: torch.ones(*shape, device="cuda", dtype=torch.int64)

    def with_logits(x):
        return F.binary_cross_entropy_with_logits(x, of_ones(800, 640), pos_weight=of_ones(640))

    def ctc(x, steps):
        lengths = torch.full((8,), steps), torch.full((8,), 20)
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), labels(8, 20), *lengths)

    compare("bce", lambda: build(with_logits, (800, 640)))
    plain = lambda x: F.binary_cross_entropy_with_logits(x, of_ones(800, 640))
    compare("bce without", lambda: build(plain, (800, 640)))
    for steps in (100, 300):
        compare(f"ctc {steps}", lambda: build(lambda x: ctc(x, steps), (8, steps, 4000)))
        compare(f"ctc {steps} few", lambda: build(lambda x: ctc(x, steps), (8, steps, 40)))
    compare("unfold", lambda: build(lambda x: F.unfold(x, 3), (4, 36, 64, 66)))
    compare("fold", lambda: build(lambda x: F.fold(x, (64, 64), 8, stride=8), (8, 1024, 64)))
    compare("fold of more", lambda: build(lambda x: F.fold(x, (16, 16), 3), (8, 36, 196)))
    compare("conv1d", lambda: build(lambda x, w: F.conv1d(x[:, :, :-3], w), (16, 64, 700), (96, 64, 5)))
    compare("conv1d transposed", lambda: build(lambda x, w: F.conv1d(x.mT, w), (16, 700, 64), (96, 64, 5)))
    multilabel = lambda x: F.multilabel_margin_loss(x, labels(1000, 400).t())
    compare("multilabel", lambda: build(multilabel, (1000, 400), strided=torch.t))
    half = dict(device="cuda", dtype=torch.bfloat16)
    compare("mm to float32", lambda: lambda: torch.mm(torch.ones(512, 256, **half), torch.ones(256, 512, **half),
                                                      out_dtype=torch.float32))
"""


PROGRAMS = {
    "resampled": RESAMPLED,
    "transposed": TRANSPOSED,
    "across": ACROSS,
    "channels last": CHANNELS_LAST,
    "formulas": FORMULAS,
}


def _differ(found: dict[str, Any]) -> dict[str, Any]:
    assert found
    return {name: (trace, device) for name, (trace, device) in found.items() if trace != device}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_takes_what_the_kernels_do(on_device: OnDevice, name: str) -> None:
    assert _differ(on_device.run(textwrap.dedent(PEAKS) + textwrap.dedent(PROGRAMS[name]))) == {}
