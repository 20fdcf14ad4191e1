"""Batch norm of inputs that lie another way than their sizes say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from brim import trace
from brim.core import Trace

BATCH, CHANNELS, TOKENS = 4, 32, 48
BYTES = BATCH * CHANNELS * TOKENS * 4


def traced(target: str, transposed: bool) -> tuple[Trace, list[tuple[int, ...]]]:
    strides: list[tuple[int, ...]] = []

    def build():
        norm = nn.BatchNorm1d(CHANNELS).to(target)
        source = torch.randn(BATCH, TOKENS, CHANNELS, device=target).transpose(1, 2)
        source = (source if transposed else source.contiguous()).requires_grad_()

        def step() -> None:
            result = norm(source)
            strides.append(result.stride())
            result.sum().backward()

        return step

    return trace(build, steps=1, target=target), strides


def copies(made: Trace) -> int:
    """Storages as large as the input."""
    return sum(storage.bytes == BYTES for storage in made.storages)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_result_is_dense_whatever_the_inputs_strides(target: str, transposed: bool) -> None:
    _, strides = traced(target, transposed)
    real = nn.BatchNorm1d(CHANNELS)(torch.randn(BATCH, TOKENS, CHANNELS).transpose(1, 2)).stride()
    assert strides == [real] == [(CHANNELS * TOKENS, TOKENS, 1)]


def test_cudnn_is_given_a_copy_of_a_transposed_input() -> None:
    by_cudnn, by_program = (traced("cuda", transposed)[0] for transposed in (True, False))
    assert copies(by_cudnn) == copies(by_program)
