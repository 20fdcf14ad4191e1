"""Which attention kernel a trace takes, and what it allocates, against PyTorch's own choice on cards of each kind."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

PROGRAM = Path(__file__).with_name("programs") / "attention_choices.py"

PEAKS = """
    import torch
    import torch.nn.functional as F
    from brim.estimation.simulation import place_of, simulate
    from brim.predict.tracer import trace

    def mask_of(kind, dtype):
        if kind == "whole":
            return torch.randn(1, 2, 512, 512, device="cuda", dtype=dtype)
        if kind == "rows cut":
            return torch.randn(8, 1, 512, 515, device="cuda", dtype=dtype)[..., :512]
        if kind == "true or false":
            return torch.randn(1, 2, 512, 512, device="cuda", dtype=dtype) > 0
        heads_last = torch.randn(1, 512, 512, 2, device="cuda", dtype=dtype)
        return heads_last.permute(0, 3, 1, 2).requires_grad_(kind == "learned, heads last")

    def build(dtype, kind, dropout):
        shape = (8, 512, 2, 64)
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
        mask = None if kind == "none" else mask_of(kind, dtype)

        def step():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
            out.sum().backward()

        return step

    case = (getattr(torch, DTYPE), KIND, DROPOUT)
    made = trace(lambda: build(*case), steps=1, capability=torch.cuda.get_device_capability())
    peaks = simulate(made, place_of(None)).peak_bytes
    build(*case)()
    measured = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    result = {"trace": [peaks.allocated, peaks.reserved], "device": measured}
"""


@pytest.mark.parametrize("card", ["H100", "A100-SXM4-80GB", "RTX 4090", "RTX 5090", "T4", "B200"])
def test_a_trace_takes_the_kernel_that_pytorch_takes(on_device: OnDevice, card: str) -> None:
    environment = on_device.variables(card)
    command = [on_device.environment.python, PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differ"] == []
    expected = {"T4": {"math", "efficient"}, "H100": {"math", "flash", "efficient", "cudnn"}}
    expected["B200"] = expected["H100"]
    chosen = {name for name, times in found["chosen"].items() if times}
    assert chosen == expected.get(card, {"math", "flash", "efficient"})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["none", "whole", "rows cut", "true or false", "heads last", "learned, heads last"])
def test_what_it_allocates(on_device: OnDevice, kind: str, dtype: str, dropout: float) -> None:
    found = on_device.run(f"DTYPE, KIND, DROPOUT = {dtype!r}, {kind!r}, {dropout}\n" + textwrap.dedent(PEAKS))
    assert found["trace"] == found["device"]
