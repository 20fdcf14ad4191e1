"""Convolutions of many kinds, strided ones above all, forward and backward: the peak is what the profiler sees."""

from __future__ import annotations

from typing import Any

import pytest

from brim.predict.tracer import trace
from cpu_compare import predicted_events
from cpu_convolutions import Shape
from cpu_truth import memory_events, peak_bytes

pytestmark = [pytest.mark.usefixtures("two_threads"), pytest.mark.filterwarnings("ignore")]

_PLAIN = {"rank": 2, "transposed": False, "batch": 4, "inputs": 16, "outputs": 32, "groups": 1, "length": 24,
          "kernel": 3, "stride": 2, "padding": 1, "dilation": 1, "bias": False, "channels_last": False}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "speech": {"rank": 1, "batch": 2, "inputs": 32, "length": 1599, "padding": 0},  # rows cut off: 1599 is odd
    "speech-first": {"rank": 1, "batch": 2, "inputs": 1, "length": 8000, "kernel": 10, "stride": 5, "padding": 0},
    "odd-image": {"length": 27, "kernel": 4, "stride": 4, "padding": 0},
    "wide-kernel": {"length": 47, "kernel": 16, "stride": 5, "padding": 0},
    "volume": {"rank": 3, "length": 9, "padding": 0, "stride": 3},
    "groups": {"groups": 2, "inputs": 24, "outputs": 48, "length": 30, "kernel": 5},
    "many-groups": {"groups": 8, "inputs": 8, "outputs": 512, "length": 30, "stride": 5},
    "thin-groups": {"groups": 4, "inputs": 12, "outputs": 16, "length": 30},  # columns
    "one-image": {"rank": 1, "batch": 1, "groups": 2, "inputs": 24, "outputs": 8, "length": 536, "kernel": 10,
                  "padding": 0},  # columns, made by all threads together
    "channels-last": {"channels_last": True, "outputs": 24},
    "transposed": {"transposed": True, "inputs": 32, "outputs": 16},
    "transposed-groups": {"transposed": True, "groups": 8, "inputs": 24, "outputs": 80, "kernel": 5, "padding": 0,
                          "bias": True},
    "transposed-one-channel": {"rank": 1, "batch": 1, "transposed": True, "inputs": 8, "outputs": 1, "length": 135,
                               "kernel": 16},  # PyTorch's own kernel
    "transposed-wide": {"transposed": True, "batch": 2, "inputs": 4, "length": 20, "kernel": 16},  # columns in parts
    "far-padded": {"batch": 8, "inputs": 32, "length": 41, "kernel": 10, "stride": 1, "padding": 5},
    "positions": {"rank": 1, "groups": 4, "inputs": 192, "outputs": 192, "length": 300, "kernel": 64, "stride": 1,
                  "padding": 32},
    "narrow-groups": {"groups": 8, "inputs": 24, "outputs": 128, "length": 30, "stride": 3},
    "dilated-stride": {"inputs": 16, "outputs": 64, "length": 40, "kernel": 5, "padding": 2, "dilation": 2},
    "transposed-thin-groups": {"transposed": True, "batch": 1, "groups": 2, "inputs": 24, "outputs": 20, "length": 12,
                               "kernel": 4, "stride": 1},
    "blocks-of-eight": {"groups": 2, "inputs": 16, "outputs": 48, "stride": 1, "bias": True},
    "pointwise": {"inputs": 24, "outputs": 48, "kernel": 1, "stride": 2, "padding": 0, "bias": True},
    "depthwise": {"groups": 16, "inputs": 16, "outputs": 16, "stride": 1, "bias": True},
    "last-depthwise": {"groups": 32, "inputs": 32, "kernel": 7, "stride": 1, "padding": 3, "bias": True,
                       "channels_last": True},
    "last-wide": {"kernel": 16, "stride": 1, "padding": 0, "bias": True, "channels_last": True},
    "transposed-columns": {"transposed": True, "groups": 2, "inputs": 6, "outputs": 48, "length": 42, "kernel": 10,
                           "stride": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_convolution_takes_what_is_predicted(name):
    build = Shape(**{**_PLAIN, **SHAPES[name]}).build
    predicted = peak_bytes(predicted_events(trace(build, steps=1, target="cpu")))
    assert predicted == pytest.approx(peak_bytes(memory_events(build, steps=1)), rel=0.0005)
