"""Kernels that copy what lies in another order than they read: a trace against the rehearsal device, to the byte."""

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


def _differ(found: dict[str, Any]) -> dict[str, Any]:
    assert found
    return {name: (trace, device) for name, (trace, device) in found.items() if trace != device}


@pytest.mark.parametrize("programs", [RESAMPLED, TRANSPOSED, ACROSS], ids=["resampled", "transposed", "across"])
def test_copies_of_what_lies_in_another_order(on_device: OnDevice, programs: str) -> None:
    assert _differ(on_device.run(textwrap.dedent(PEAKS) + textwrap.dedent(programs))) == {}
