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


def _differ(found: dict[str, Any]) -> dict[str, Any]:
    assert found
    return {name: (trace, device) for name, (trace, device) in found.items() if trace != device}


@pytest.mark.parametrize("programs", [RESAMPLED, TRANSPOSED], ids=["resampled", "transposed"])
def test_copies_of_what_lies_in_another_order(on_device: OnDevice, programs: str) -> None:
    assert _differ(on_device.run(textwrap.dedent(PEAKS) + textwrap.dedent(programs))) == {}
