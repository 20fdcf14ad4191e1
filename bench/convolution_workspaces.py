"""What cuDNN's convolutions take of a GPU besides their results, as PyTorch's own memory history has it.

    python bench/convolution_workspaces.py --output measurements/convolution_workspaces.jsonl
    python bench/convolution_workspaces.py --part 0/2 --limit-s 40 --output part.jsonl

Layers of common networks and drawn ones: batches, channels, sizes, kernels, strides, groups, dtypes and layouts. Of
each the forward pass and both gradients, one by one: what was allocated, in order, and which of it is the result.
Which engine cuDNN takes, and so its workspace, is its heuristics' choice (cudnn/Conv_v8.cpp): this says what they
chose on the GPU that is named, with that cuDNN. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# channels in, channels out, size, kernel, stride, groups
LAYERS = [
    *((3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (64, 256, 56, 1, 1, 1)),
    *((256, 64, 56, 1, 1, 1), (256, 128, 56, 1, 1, 1), (128, 128, 56, 3, 2, 1), (128, 512, 28, 1, 1, 1)),
    *((256, 512, 56, 1, 2, 1), (512, 128, 28, 1, 1, 1), (128, 128, 28, 3, 1, 1), (512, 256, 28, 1, 1, 1)),
    *((256, 256, 28, 3, 2, 1), (256, 1024, 14, 1, 1, 1), (512, 1024, 28, 1, 2, 1), (1024, 256, 14, 1, 1, 1)),
    *((256, 256, 14, 3, 1, 1), (1024, 512, 14, 1, 1, 1), (512, 512, 14, 3, 2, 1), (512, 2048, 7, 1, 1, 1)),
    *((1024, 2048, 14, 1, 2, 1), (2048, 512, 7, 1, 1, 1), (512, 512, 7, 3, 1, 1)),
    *((3, 64, 224, 3, 1, 1), (64, 64, 224, 3, 1, 1), (64, 128, 112, 3, 1, 1), (128, 128, 112, 3, 1, 1)),
    *((128, 256, 56, 3, 1, 1), (256, 256, 56, 3, 1, 1), (256, 512, 28, 3, 1, 1), (512, 512, 28, 3, 1, 1)),
    *((512, 512, 14, 3, 1, 1), (3, 32, 224, 3, 2, 1), (32, 32, 112, 3, 1, 32), (32, 64, 112, 1, 1, 1)),
    *((96, 96, 56, 3, 1, 96), (144, 24, 56, 1, 1, 1), (384, 384, 14, 3, 1, 384), (3, 96, 224, 4, 4, 1)),
    *((128, 128, 56, 7, 1, 128), (512, 512, 14, 7, 1, 512), (3, 768, 224, 16, 16, 1), (3, 1024, 224, 14, 14, 1)),
    *((4, 320, 64, 3, 1, 1), (320, 320, 64, 3, 1, 1), (640, 640, 32, 3, 1, 1), (1280, 1280, 16, 3, 1, 1)),
    *((320, 4, 64, 3, 1, 1), (1, 32, 28, 3, 1, 1), (32, 64, 26, 3, 1, 1), (3, 6, 32, 5, 1, 1), (6, 16, 14, 5, 1, 1)),
]


def cases(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Common layers at several batches, then drawn ones, without end."""
    drawn = random.Random(seed)
    common = [
        {"batch": batch, "in": i, "out": o, "size": s, "kernel": k, "stride": t, "groups": g, "dtype": dtype,
         "last": last, "padding": (k // 2) if t < k or k == 1 else 0}
        for batch in (32, 1, 8, 128)
        for dtype in DTYPES
        for last in (False, True)
        for i, o, s, k, t, g in LAYERS
    ]  # fmt: skip
    first, rest = common[: len(common) // 4], common[len(common) // 4 :]
    drawn.shuffle(rest)
    yield from first
    while True:
        if rest and drawn.random() < 0.5:
            yield rest.pop()
            continue
        kernel = drawn.choice((1, 1, 3, 3, 3, 5, 7))
        i, o = (drawn.choice((1, 3, 4, 8, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 384, 512)) for _ in range(2))
        yield {
            "batch": drawn.choice((1, 2, 4, 8, 16, 20, 32, 64)), "in": i, "out": o,
            "size": drawn.choice((7, 8, 14, 16, 28, 32, 33, 56, 64, 100, 128)), "kernel": kernel,
            "stride": drawn.choice((1, 1, 1, 2)), "groups": 1, "dtype": drawn.choice(list(DTYPES)),
            "last": drawn.random() < 0.4, "padding": drawn.choice((0, kernel // 2)),
        }  # fmt: skip


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes allocated in each direction, in order; ``result`` is the bytes of what was returned."""
    dtype, groups = DTYPES[case["dtype"]], case["groups"]
    layout = torch.channels_last if case["last"] else torch.contiguous_format
    x = torch.randn(case["batch"], case["in"], case["size"], case["size"], device="cuda").to(dtype)
    w = torch.randn(case["out"], case["in"] // groups, case["kernel"], case["kernel"], device="cuda").to(dtype)
    x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
    shape = ([case["stride"]] * 2, [case["padding"]] * 2, [1, 1], False, [0, 0], groups)
    y = _aten.convolution(x, w, None, *shape)
    gradient = torch.randn_like(y)
    found = {"forward": _allocated(lambda: [_aten.convolution(x, w, None, *shape)])}
    for name, mask in (("input", [True, False, False]), ("weight", [False, True, False])):
        found[name] = _allocated(
            lambda mask=mask: _aten.convolution_backward(gradient, x, w, None, *shape, mask)  # type: ignore[misc]
        )
    return found


def _allocated(call: Callable[[], Any]) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=10_000)
    made = [tensor for tensor in call() if tensor is not None]
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}
    return {
        "events": [signs[event["action"]] * event["size"] for event in events if event["action"] in signs],
        "result": [tensor.untyped_storage().nbytes() for tensor in made],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", help="which of how many, to share the work")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--most", type=int, default=3000)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    end_s = time.monotonic() + options.limit_s
    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
    with options.output.open("w", encoding="utf-8") as out:
        out.write(json.dumps(machine) + "\n")
        for number, case in enumerate(cases()):
            if number >= options.most or time.monotonic() > end_s:
                break
            if number % parts == part:
                try:
                    row = measure(case)
                except torch.OutOfMemoryError as error:
                    row = {"error": str(error)[:200]}
                out.write(json.dumps(case | row) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
