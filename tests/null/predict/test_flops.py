"""Counts per operation, seen through a dispatch mode over meta tensors, against PyTorch's counter and by hand."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from brim import catalog
from brim.predict.flops import is_view, op_bytes, op_dtype, op_flops, op_work

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Every operation with its counts: name -> list of (flops, read, written, dtype)."""

    def __init__(self):
        super().__init__()
        self.rows = []
        self.kernels = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        row = (op_flops(func, args, kwargs, out), *op_bytes(func, args, kwargs, out), op_dtype(args, out))
        self.rows.append((str(func), *row))
        self.kernels.add(op_work(func, args, kwargs, out).kernel)
        return out

    def flops(self, *names):
        return sum(row[1] for row in self.rows if not names or any(name in row[0] for name in names))


def record(step):
    with Recorder() as recorder:
        step()
    return recorder


@pytest.mark.parametrize(
    "build",
    [
        lambda: (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)), (32, 64)),
        lambda: (nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)), (4, 3, 32, 32)),
        lambda: (nn.ConvTranspose2d(8, 6, 4, 2, 1), (2, 8, 9, 9)),
    ],
    ids=["mlp", "cnn", "transposed"],
)
def test_products_are_counted_as_pytorch_counts_them(build):
    with torch.device("meta"):
        model, shape = build()
        inputs = torch.randn(shape)

    def step():
        model(inputs).sum().backward()

    recorder = record(step)
    with FlopCounterMode(display=False) as counter:
        step()
    products = recorder.flops("mm", "convolution")
    assert products == counter.get_total_flops() > 0
    assert recorder.flops() > products, "the activation and the sum compute too"


def test_gradients_of_a_convolution_with_groups_take_twice_its_products():
    """Each of the two gradients has as many as the forward pass; PyTorch's own count leaves the groups out."""
    images = torch.randn(2, 16, 8, 8, device="meta", requires_grad=True)
    model = nn.Conv2d(16, 8, 3, groups=4, device="meta")
    recorder = record(lambda: model(images).sum().backward())
    assert recorder.flops("convolution") == 3 * 2 * (2 * 8 * 6 * 6) * (4 * 9)


def test_kernels_are_named_by_what_limits_them():
    def kernels(module, *shape, last=False):
        module, images = module.to("meta"), torch.empty(*shape, device="meta")
        images = images.to(memory_format=torch.channels_last) if last else images
        return record(lambda: module(images)).kernels - {""}

    assert kernels(nn.Conv2d(8, 16, 3), 2, 8, 9, 9) == {"planar convolution"}
    assert kernels(nn.Conv2d(8, 16, 3), 2, 8, 9, 9, last=True) == {"convolution"}
    assert kernels(nn.Conv2d(8, 16, 1), 2, 8, 9, 9, last=True) == {"product"}
    assert kernels(nn.Conv2d(8, 16, 3, groups=4), 2, 8, 9, 9) == {"planar grouped"}
    assert kernels(nn.Conv2d(8, 8, 3, groups=8), 2, 8, 9, 9) == {"depthwise"}
    assert kernels(nn.BatchNorm2d(8), 2, 8, 9, 9) == kernels(nn.Softmax(1), 2, 8) == {"normalization"}
    assert kernels(nn.BatchNorm2d(8).eval(), 2, 8, 9, 9) == set()
    assert kernels(nn.MaxPool2d(2), 2, 8, 8, 8) == {"pooling"}


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_a_product_into_another_dtype_takes_the_same_work(name):
    with torch.device("meta"):
        batch = (2,) if name[-3:] == "bmm" else ()
        left, right, out = (torch.empty(*batch, *sizes, dtype=torch.half) for sizes in ((5, 6), (6, 7), (5, 7)))
    args = (left, right) if name in ("mm", "bmm") else (out, left, right)
    packet = getattr(aten, name)
    same, wider = op_work(packet.default, args, {}, out), op_work(packet.dtype, (*args, torch.float), {}, out.float())
    assert wider == same._replace(written_bytes=2 * same.written_bytes)
    assert same.flops > 0
    assert same.kernel


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_attention_on_the_cpu_kernel_counts_both_products_and_five_backward(heads, kv_heads):
    q = torch.randn(2, heads, 6, 8, device="meta", requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 10, 8, device="meta", requires_grad=True) for _ in range(2))
    one = 2 * 2 * heads * 6 * 10 * 8
    forward = record(lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))
    assert forward.flops() == 2 * one
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q.detach(), k.detach(), v.detach())
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    backward = record(lambda: back(torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, lse, 0.0, False))
    assert backward.flops("attention") == 5 * one


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 10), (10, 6)])
def test_attention_does_not_count_what_a_causal_mask_hides(queries, keys):
    q = torch.randn(2, 4, queries, 8, device="meta")
    k, v = (torch.randn(2, 4, keys, 8, device="meta") for _ in range(2))
    seen = int(torch.ones(queries, keys, dtype=torch.bool).tril().sum())
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    by_place, by_name = (
        record(lambda: flash(q, k, v, 0.0, True)).flops(), record(lambda: flash(q, k, v, is_causal=True)).flops()
    )  # fmt: skip
    assert by_place == by_name == 2 * 2 * 2 * 4 * seen * 8
    out, lse = flash(q, k, v)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    backward = record(lambda: back(torch.ones_like(out), q, k, v, out, lse, 0.0, True))
    assert backward.flops("attention") == 5 * 2 * 2 * 4 * seen * 8


def test_products_that_pytorch_does_not_count():
    with torch.device("meta"):
        a, b = torch.randn(6, 5), torch.randn(5)
        experts = torch.randn(4, 8, 16, dtype=torch.bfloat16)
        tokens = torch.randn(64, 8, dtype=torch.bfloat16)
    assert record(lambda: torch.mv(a, b)).flops() == 60
    assert record(lambda: torch.dot(b, b)).flops() == 10
    assert op_flops(aten._grouped_mm.default, (tokens, experts), {}, None) == 2 * 64 * 8 * 16
    assert op_flops(aten._int_mm.default, (a.to(torch.int8), a.t().to(torch.int8)), {}, None) == 2 * 6 * 5 * 6


def test_views_and_moves_compute_nothing():
    x = torch.randn(8, 4, device="meta")
    recorder = record(lambda: (x.t(), x.view(4, 8), x.expand(2, 8, 4), x.clone(), x.bfloat16(), torch.cat([x, x])))
    assert recorder.flops() == 0
    read_written = {name: (read, written) for name, _, read, written, _ in recorder.rows}
    assert read_written["aten.t.default"] == read_written["aten.view.default"] == (0, 0)
    assert read_written["aten.clone.default"] == (128, 128)
    assert read_written["aten._to_copy.default"] == (128, 64)
    assert read_written["aten.cat.default"] == (256, 256)


def test_elementwise_reductions_and_lists():
    x = torch.randn(8, 4, device="meta")
    assert record(lambda: x.exp()).flops() == 32
    assert record(lambda: x.sum()).flops() == 32
    assert record(lambda: torch._foreach_add_([x, x[0].clone()], 1.0)).flops("foreach") == 36
    with torch.no_grad():
        moments = [torch.zeros(8, 4, device="meta") for _ in range(3)]
        recorder = record(lambda: moments[0].mul_(0.9).add_(moments[1]))
    assert recorder.flops() == 64
    assert recorder.rows[1][2:4] == (256, 128), "an in-place sum reads both and writes one"
    assert record(lambda: moments[0].zero_()).rows[0][2:4] == (0, 128), "a fill reads nothing"


def test_lists_that_are_changed_count_as_written():
    with torch.no_grad():
        a, b = ([torch.zeros(10, device="meta"), torch.zeros(6, device="meta")] for _ in range(2))
        (row,) = record(lambda: torch._foreach_mul_(a, b)).rows
    assert row[1:4] == (16, 128, 64)


def test_an_expanded_dimension_is_read_once_and_an_allocation_moves_nothing():
    x = torch.randn(8, 1, device="meta")
    (row,) = record(lambda: aten.mul.Tensor(x.detach().expand(8, 100), 2.0)).rows[-1:]
    assert row[2:4] == (32, 3200)
    assert record(lambda: torch.empty(100, device="meta")).rows[0][2:4] == (0, 0)


def test_an_embedding_reads_its_rows_only():
    table = torch.randn(50_000, 64, device="meta")
    ids = torch.zeros(4, 16, dtype=torch.long, device="meta")
    (row,) = record(lambda: F.embedding(ids, table)).rows
    assert row[2:] == (4 * 16 * 64 * 4 + 4 * 16 * 8, 4 * 16 * 64 * 4, "float32")


def test_the_dtype_is_the_one_of_the_product():
    a = torch.randn(4, 4, device="meta", dtype=torch.bfloat16)
    assert record(lambda: a @ a).rows[0][4] == "bfloat16"
    assert record(lambda: a.float()).rows[0][4] == "bfloat16"
    assert record(lambda: torch.arange(4, device="meta")).rows[0][4] == "int64"
    assert is_view(aten.view.default) and is_view(aten._unsafe_view.default) and not is_view(aten.add.Tensor)


def test_a_step_of_gpt2_takes_six_flop_per_weight_and_token_and_the_attention():
    """Kaplan et al., arXiv 2001.08361: 6 N a token, N without embeddings; and 12 l s d of attention."""
    preset = catalog.model("gpt2")
    config = transformers.AutoConfig.for_model(**preset.config)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(2, 256, dtype=torch.long)
    recorder = record(lambda: model(ids, labels=ids).loss.backward())
    tokens, layers, hidden, vocab = 2 * 256, 12, 768, 50257
    weights = 12 * layers * hidden**2 + vocab * hidden  # the output layer is a product although it is tied
    # forward 2 products of s x s, backward 4; a fused kernel would compute the scores again
    attention = (2 + 4) * 2 * layers * 256 * hidden
    assert recorder.flops("mm", "attention") == pytest.approx(tokens * (6 * weights + attention), rel=1e-3)
