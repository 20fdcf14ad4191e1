"""Which convolutions have a workspace that nobody knows, and what the others take."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from brim import trace
from brim.core import Category
from brim.predict.lowering.cuda import convolution
from brim.predict.lowering.kernel import Kernel


def unknown(groups, dtype=torch.float32, layout=torch.contiguous_format):
    def build():
        model = nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False).cuda().to(dtype)
        source = torch.randn(2, 32, 16, 16, device="cuda", dtype=dtype).to(memory_format=layout)
        return lambda: model(source).sum().backward()

    return trace(build, steps=1).not_modelled


def test_depthwise_convolutions_in_float32_take_pytorchs_own_kernels():
    assert unknown(groups=32) == ()


@pytest.mark.parametrize(
    "choice", [{"groups": 1}, {"groups": 4}, {"groups": 32, "dtype": torch.float16},
               {"groups": 32, "layout": torch.channels_last}],
)  # fmt: skip
def test_convolutions_that_go_to_cudnn_are_named(choice):
    assert any("cuDNN" in text for text in unknown(**choice))


def temporaries(dtype, layout=torch.contiguous_format):
    """Sizes of what kernels take and give back in a step of a convolution from 3 to 20 channels."""

    def build():
        model = nn.Conv2d(3, 20, 3, padding=1, bias=False).cuda().to(dtype)
        source = torch.randn(2, 3, 16, 16, device="cuda", dtype=dtype, requires_grad=True)
        source = source.to(memory_format=layout)
        return lambda: model(source).square().sum().backward()

    made = trace(build, steps=1)
    return [storage.bytes for storage in made.storages if storage.category is Category.TEMPORARY]


TRANSPOSED = (2 * 16 * 16) * (8 + 24) + 8 * 24 * 3 * 3  # elements of source, result and weight, channels padded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_transposes_its_operands_with_channels_padded_to_eight(dtype):
    assert temporaries(dtype).count(TRANSPOSED * 2) == 3  # for the result, and for both gradients


def test_channels_last_and_float32_are_not_transposed():
    assert TRANSPOSED * 2 not in temporaries(torch.float16, torch.channels_last)
    assert TRANSPOSED * 4 not in temporaries(torch.float32)


@pytest.mark.parametrize(("groups", "first"), [(32, 32 * 3 * 3), (1, 2 * 32 * 16 * 16)])
def test_depthwise_kernels_make_the_gradient_of_the_weight_before_that_of_the_source(groups, first):
    def build():
        model = nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False).cuda()
        source = torch.randn(2, 32, 16, 16, device="cuda", requires_grad=True)
        return lambda: model(source).square().sum().backward()

    made = trace(build, steps=1)
    backward = next(op for op in made.ops if "convolution_backward" in op.name)
    born = min((s for s in made.storages if s.born > backward.at), key=lambda storage: storage.born)
    assert born.bytes == 4 * first


# -- measured on an H200 --------------------------------------------------------------------------------------------

MEASURED = Path(__file__).parents[3] / "measurements" / "convolution_workspaces.jsonl.gz"
BLOCK_BYTES = 512  # what the allocator rounds to
NEAR, NEAR_BYTES = 0.05, 64 << 10
_aten = torch.ops.aten


def held_out():
    """A third of the rows, drawn by a fixed seed. Thresholds were fitted to the others. The form of the rules was
    found in listings of all rows, and layers come in both parts at other batches: this is no independent test."""
    with gzip.open(MEASURED, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][1:]
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    return [rows[number] for number in order[: len(rows) // 3]]


def workspaces(row):
    """Of each direction: what the rule says and what was measured."""
    dtype, stride, padding = getattr(torch, row["dtype"]), [row["stride"]] * 2, [row["padding"]] * 2
    layout = torch.channels_last if row["last"] else torch.contiguous_format
    x = torch.empty(row["batch"], row["in"], row["size"], row["size"], dtype=dtype, device="meta")
    w = torch.empty(row["out"], row["in"] // row["groups"], *[row["kernel"]] * 2, dtype=dtype, device="meta")
    x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
    shape = (stride, padding, [1, 1], False, [0, 0], row["groups"])
    last = any(tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous() for tensor in (x, w))
    y = _aten.convolution(x, w, None, *shape)
    y = y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)  # as cuDNN writes it
    for direction, mask in (("forward", None), ("input", [True, False, False]), ("weight", [False, True, False])):
        if mask is None:
            func, arguments, result = _aten.convolution.default, (x, w, None, *shape), y
        else:
            func, arguments = _aten.convolution_backward.default, (y, x, w, None, *shape, mask)
            result = x if mask[0] else w
        kernel = Kernel(func, arguments, {}, [result], result, capability=(9, 0))
        convolution.RULES[func](kernel)
        taken = [size for size in row[direction]["events"] if size > 0]
        yield (
            sum(size for what, _, size in kernel.script if what == "alloc"),
            sum(taken) - sum(row[direction]["result"]),
        )


@pytest.mark.thorough
def test_held_out_layers_take_what_was_measured():
    """At least the shares that the rules reached when they were made; the rest is the heuristics' choice."""
    pairs = [pair for row in held_out() for pair in workspaces(row)]
    exact = [-(-said // BLOCK_BYTES) == -(-taken // BLOCK_BYTES) for said, taken in pairs]
    near = [abs(said - taken) <= max(NEAR * taken, NEAR_BYTES) for said, taken in pairs]
    wrong_bytes = sum(abs(said - taken) for said, taken in pairs)
    assert sum(exact) >= 0.60 * len(pairs)
    assert sum(near) >= 0.76 * len(pairs)
    assert wrong_bytes <= 0.14 * sum(taken for _, taken in pairs)
