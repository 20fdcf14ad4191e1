"""What fails beside a GPU: a disk that stops giving, and a model that goes on when it gives again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from brim.errors import TransferError
from brim.memory import direct_io
from support.placed import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)])


@torch.no_grad()
def test_after_disk_errors_the_values_are_those_of_the_blocks_that_were_asked_for(monkeypatch):
    x = torch.ones(2, 256, device="cuda")
    expected, model = net().cuda()(x), net()
    handle = place(model, vram=MIB, ram=3 * MIB // 2, device="cuda", activations="64KiB")
    assert "stream:disk" in handle.plan.choices("weight_streaming").values()
    plain, left = direct_io.os.preadv, 0

    def preadv(*args: Any) -> int:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(5, "Input/output error")
        return plain(*args)

    monkeypatch.setattr(direct_io.os, "preadv", preadv)
    failed = 0
    for count in (1, 2, 3, 5, 8):
        left = count
        for _ in range(10):
            try:
                torch.testing.assert_close(model(x), expected)
            except TransferError:
                failed += 1
        left = 0
        torch.testing.assert_close(model(x), expected)
    assert failed
    handle.remove()
