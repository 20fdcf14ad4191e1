"""Convolutions of many shapes, run for real on a CPU and predicted: kernel, stride, dilation, groups, layout.

    python bench/cpu_convolutions.py --count 200 --seed 1
    python bench/cpu_convolutions.py --count 50 --strided --show

One line per convolution whose peak is not the measured one, and at the end how far all of them are off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from brim.predict.tracer import trace
from cpu_compare import predicted_events
from cpu_truth import memory_events, peak_bytes

_LAYERS = {
    (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
}  # fmt: skip
_LONGEST = {1: 600, 2: 48, 3: 12}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One convolution and its input."""

    rank: int
    transposed: bool
    batch: int
    inputs: int
    outputs: int
    groups: int
    length: int  # of every side of the input
    kernel: int
    stride: int
    padding: int
    dilation: int
    bias: bool
    channels_last: bool

    def build(self) -> Callable[[], Any]:
        """A step of forward and backward, the gradient of the input included."""
        layer: nn.Module = _LAYERS[self.rank, self.transposed](
            self.inputs, self.outputs, self.kernel, stride=self.stride, padding=self.padding, dilation=self.dilation,
            groups=self.groups, bias=self.bias,
        )  # fmt: skip
        source = torch.randn(self.batch, self.inputs, *[self.length] * self.rank)
        if self.channels_last:
            source = source.to(memory_format=torch.channels_last)
            layer = layer.to(memory_format=torch.channels_last)
        source.requires_grad_()

        def step() -> None:
            layer(source).sum().backward()

        return step


def shapes(count: int, seed: int, *, strided: bool = False, transposed: bool = False) -> list[Shape]:
    draw, chance = random.Random(seed), 1.0 if transposed else 0.2
    found: list[Shape] = []
    while len(found) < count:
        rank = draw.choice((1, 1, 2, 2, 2, 3))
        groups = draw.choice((1, 1, 1, 2, 4, 8))
        per_group = draw.choice((1, 3, 4, 8, 12, 16, 24, 32, 48))
        is_transposed = draw.random() < chance
        kernel = draw.choice((1, 2, 3, 3, 4, 5, 7, 10, 16)[: 9 if rank < 3 else 6])
        shape = Shape(
            rank=rank, transposed=is_transposed, batch=draw.choice((1, 2, 4, 8)), inputs=groups * per_group,
            outputs=groups * draw.choice((1, 4, 8, 10, 16, 24, 32, 64)), groups=groups,
            length=draw.randrange(8, _LONGEST[rank]), kernel=kernel,
            stride=draw.choice((2, 2, 3, 4, 5)) if strided else draw.choice((1, 1, 2, 3)),
            padding=draw.randrange(0, kernel // 2 + 1), dilation=1 if strided or draw.random() < 0.8 else 2,
            bias=draw.random() < 0.5, channels_last=rank == 2 and draw.random() < 0.2,
        )  # fmt: skip
        if shape.length + 2 * shape.padding >= shape.dilation * (shape.kernel - 1) + 1:
            found.append(shape)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strided", action="store_true", help="strided and not dilated ones only")
    parser.add_argument("--transposed", action="store_true", help="transposed ones only")
    parser.add_argument("--show", action="store_true", help="both sequences of allocations where the peaks differ")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the profiler
    torch.set_num_threads(2)  # what oneDNN takes is known for two
    errors = []
    for shape in shapes(given.count, given.seed, strided=given.strided, transposed=given.transposed):
        predicted = predicted_events(trace(shape.build, steps=1, target="cpu"))
        measured = memory_events(shape.build, 1)
        error = peak_bytes(predicted) / peak_bytes(measured) - 1
        errors.append(abs(error))
        if error:
            told = " ".join(f"{name}={value}" for name, value in asdict(shape).items())
            print(f"{error:+.2%} {peak_bytes(predicted):,} for {peak_bytes(measured):,}: {told}")
            if given.show:
                print("  predicted", *predicted, "  measured", *measured, sep="\n    ")
    exact, middle = sum(error == 0 for error in errors), statistics.median(errors)
    print(f"{len(errors)} convolutions, {exact} exact, {middle:.3%} median, {max(errors):.2%} most")


if __name__ == "__main__":
    main()
