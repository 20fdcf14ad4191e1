"""Which operations' inner allocations are not predicted: every sample of PyTorch's own operator tests, both ways."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from brim.errors import BrimError
from brim.predict.tracer import trace
from support.cpu.compare import predicted_events
from support.cpu.truth import memory_events, peak_bytes


def builds(name: str, dtype: torch.dtype, backward: bool) -> Iterator[Callable[[], Callable[[], Any]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if info.name != name or (backward and not info.supports_autograd):
            continue
        for sample in info.sample_inputs("cpu", dtype, requires_grad=backward):
            yield _build(info.op, sample, backward)


def _build(op: Callable[..., Any], sample: Any, backward: bool) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        def copy(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if type(tensor) is torch.Tensor and type(made) is torch.Tensor:
                made.copy_(tensor.detach())
            return made.requires_grad_(tensor.requires_grad)

        value, args, kwargs = tree_map_only(torch.Tensor, copy, (sample.input, sample.args, sample.kwargs))

        def step() -> None:
            out = op(value, *args, **kwargs)
            if backward:
                outs = [
                    o
                    for o in (out if isinstance(out, (tuple, list)) else [out])
                    if getattr(o, "requires_grad", False)
                ]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

        return step

    return build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    for name in args.names or sorted({info.name for info in op_db}):
        worst: tuple[int, str] = (0, "")
        try:
            for count, build in enumerate(builds(name, getattr(torch, args.dtype), args.backward)):
                if count >= args.samples:
                    break
                predicted = predicted_events(trace(build, steps=1, target="cpu"))
                measured = memory_events(build, 1)
                off = peak_bytes(predicted) - peak_bytes(measured)
                if abs(off) > abs(worst[0]):
                    worst = (off, f"{peak_bytes(predicted)} for {peak_bytes(measured)} at sample {count}")
                    if args.show:
                        print("  predicted", predicted, "\n  measured", measured)
        except BrimError as error:
            print(f"{name:40} refused: {error.request}")
        except Exception as error:
            print(f"{name:40} {type(error).__name__}: {str(error)[:100]!r}")
        if worst[0]:
            print(f"{name:40} {worst[0]:+8} {worst[1]}")


if __name__ == "__main__":
    main()
