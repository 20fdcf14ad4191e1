"""Operators whose CUDA kernels take memory besides their results: each a step, once its inputs lie on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Build = Callable[[], Callable[[], Any]]


def _of(function: Callable[..., Any], *inputs: Any, dtype: torch.dtype = torch.float32, grad: bool = True) -> Build:
    """Shapes become random numbers; whole numbers are moved."""

    def build() -> Callable[[], Any]:
        made = [
            one.cuda() if isinstance(one, torch.Tensor)
            else torch.randn(one, device="cuda", dtype=dtype, requires_grad=grad) for one in inputs
        ]  # fmt: skip

        def step() -> None:
            result = function(*made)
            if grad:
                result.sum().backward()

        return step

    return build


def _mixed(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Build:
    """The step, its backward pass too, is under autocast."""

    def build() -> Callable[[], Any]:
        step = _of(function, *shapes)()
        return lambda: torch.autocast("cuda", torch.bfloat16)(step)()

    return build


def _unrolled(cell: Callable[..., Any], steps: torch.Tensor, first: torch.Tensor, *weights: torch.Tensor) -> Any:
    state = (first, first) if cell is torch.lstm_cell else first
    with torch.autocast("cuda", torch.bfloat16):
        for step in steps:
            state = cell(step, state, *weights)
    return state[0]


def _recomputed(reentrant: bool, hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        hidden = hidden + checkpoint(lambda x, w: F.gelu(x @ w) @ w.mT, hidden, weight, use_reentrant=reentrant)
    return hidden


def _attention(rows: int, columns: int, size: int, dtype: torch.dtype = torch.float32, mask: str = "") -> Build:
    def build() -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        query, key, value = (
            torch.randn(2, 4, tokens, size, device="cuda", dtype=dtype, requires_grad=True)
            for tokens in (rows, columns, columns)
        )
        kept = torch.ones(2, 1, rows, columns, device="cuda", dtype=torch.bool) if mask == "bool" else None
        if mask == "float":
            kept = torch.zeros(2, 1, rows, columns, device="cuda", dtype=dtype, requires_grad=True)
        gradient = torch.randn(2, rows, 4, size, device="cuda", dtype=dtype).transpose(1, 2)

        def step() -> None:
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
                F.scaled_dot_product_attention(query, key, value, attn_mask=kept).backward(gradient)

        return step

    return build


def _flex(score: str = "", *, groups: int = 1, dtype: torch.dtype = torch.float32) -> Build:
    """FlexAttention that nobody compiles; ``score``: what is done to scores."""

    def build() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        query, key = (
            torch.randn(2, heads, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
            for heads in (4, 4 // groups)
        )
        slopes = torch.randn(4, device="cuda", requires_grad=True)
        change = {
            "": None,
            "bias": lambda score, b, h, i, j: score + 0.1 * (j - i),
            "cap": lambda score, b, h, i, j: torch.tanh(score / 30) * 30,
            "trained": lambda score, b, h, i, j: score * slopes[h],
        }[score]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cuda")

        def step() -> None:
            result = flex_attention(query, key, key, score_mod=change, block_mask=mask, enable_gqa=groups > 1)
            result.sum().backward()

        return step

    return build


def _layer(layer: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Build:
    def build() -> Callable[[], Any]:
        made = layer().cuda()
        source = torch.randn(shape, device="cuda", dtype=dtype)
        if source.dim() == 4:
            source = source.to(memory_format=torch.channels_last)
        source.requires_grad_()

        def step() -> None:
            result = made(source)
            result = result[0] if isinstance(result, tuple) else result
            result.backward(torch.ones_like(result))

        return step

    return build


_ROWS, _COLUMNS = torch.arange(50) % 7, torch.arange(50) % 5
_MANY = torch.arange(20_000) % 300

CASES: dict[str, Build] = {
    "attention": _attention(128, 128, 64),
    "attention of wide heads": _attention(192, 256, 128),
    "attention of very wide heads in bfloat16": _attention(192, 1000, 256, torch.bfloat16),
    "attention in float16": _attention(192, 256, 80, torch.float16),
    "attention with a mask": _attention(128, 128, 64, mask="bool"),
    "attention with a trained bias": _attention(128, 120, 64, mask="float"),
    "attention in parts under autocast": _mixed(F.scaled_dot_product_attention, *[(2, 128, 64)] * 3),
    "FlexAttention in bfloat16": _flex(dtype=torch.bfloat16),
    "FlexAttention of groups with a bias": _flex("bias", groups=2),
    "FlexAttention with a cap": _flex("cap"),
    "FlexAttention with trained slopes": _flex("trained"),
    "layer norm of a part": _of(lambda x: F.layer_norm(x[..., 1:], (64,)), (300, 65), grad=False),
    "outer products": _of(torch.bmm, (4, 64, 1), (4, 1, 96), grad=False),
    "outer products with gradients": _of(torch.bmm, (4, 64, 1), (4, 1, 96)),
    "convolution of a part": _of(lambda x, w: F.conv2d(x[..., 1:], w), (8, 96, 56, 57), (32, 96, 3, 3)),
    "convolution by a part": _of(lambda x, w: F.conv2d(x, w[..., 1:]), (8, 96, 56, 57), (32, 96, 3, 4)),
    "depthwise convolution of a part": _of(
        lambda x, w: F.conv2d(x[..., 1:], w, groups=96), (8, 96, 56, 57), (96, 1, 3, 3)
    ),
    "convolution of a part with a bias": _of(
        lambda x, w, b: F.conv2d(x[..., 1:], w, b), (8, 96, 56, 57), (32, 96, 3, 3), (32,)
    ),
    "largest of a part": _of(lambda x: F.max_pool2d(x[..., 1:], 2), (8, 96, 56, 57)),
    "largest of a part, channels last": _of(
        lambda x: F.max_pool2d(x.permute(0, 3, 1, 2)[:, :, 1:], 2), (8, 56, 57, 96)
    ),
    "averages of a part": _of(lambda x: F.avg_pool2d(x[..., 1:], 2), (8, 96, 56, 57)),
    "averages of a part's volumes": _of(lambda x: F.avg_pool3d(x[..., 1:], 2), (2, 16, 16, 16, 17), grad=False),
    "adaptive averages of a part": _of(lambda x: F.adaptive_avg_pool2d(x[..., 1:], 7), (8, 96, 56, 57), grad=False),
    "steps of an LSTM under autocast": _of(
        partial(_unrolled, torch.lstm_cell), (6, 32, 64), (32, 64), (256, 64), (256, 64), (256,), (256,)
    ),
    "steps of a GRU under autocast": _of(
        partial(_unrolled, torch.gru_cell), (6, 32, 64), (32, 64), (192, 64), (192, 64), (192,), (192,)
    ),
    "bilinear forms under autocast": _mixed(F.bilinear, (256, 32), (256, 32), (16, 32, 32)),
    "recomputation under autocast": _mixed(partial(_recomputed, False), (512, 64), *[(64, 256)] * 4),
    "reentrant recomputation under autocast": _mixed(partial(_recomputed, True), (512, 64), *[(64, 256)] * 4),
    "embedding of a part": _of(lambda x, rows: F.embedding(rows.view(2, -1)[:, 1:], x), (300, 64), _ROWS),
    "sum of booleans": _of(lambda x: (x > 0).sum(1), (100, 300), grad=False),
    "sum of int32": _of(lambda x: x.int().sum(0), (100, 300), grad=False),
    "index": _of(lambda x, rows: x[rows], (100, 16), _ROWS),
    "two indices": _of(lambda x, rows, columns: x[rows, columns], (100, 16), _ROWS, _COLUMNS),
    "indices apart": _of(lambda x, rows, columns: x[rows, :, columns], (100, 8, 16), _ROWS, _COLUMNS),
    "index of many": _of(lambda x, rows: x[rows], (1000, 16), _MANY),
    "index_put that adds": _of(
        lambda x, rows: x.clone().index_put_((rows,), torch.zeros(50, 16, device="cuda"), accumulate=True),
        (100, 16), _ROWS,
    ),
    "embedding read often": _of(lambda x, rows: F.embedding(rows, x), (300, 64), _MANY),
    "embedding read rarely": _of(lambda x, rows: F.embedding(rows, x), (7000, 64), _MANY),
    "embedding of more rows read often": _of(lambda x, rows: F.embedding(rows, x), (520, 64), _MANY),
    "embedding of too many rows read often": _of(lambda x, rows: F.embedding(rows, x), (540, 64), _MANY),
    "bfloat16 embedding read often": _of(
        lambda x, rows: F.embedding(rows, x), (300, 33), _MANY, dtype=torch.bfloat16
    ),
    "bfloat16 embedding read rarely": _of(
        lambda x, rows: F.embedding(rows, x), (40_000, 64), _MANY, dtype=torch.bfloat16
    ),
    "bfloat16 embedding of few tokens": _of(
        lambda x, rows: F.embedding(rows, x), (40_000, 64), _ROWS, dtype=torch.bfloat16
    ),
    "embedding by frequency": _of(lambda x, rows: F.embedding(rows, x, scale_grad_by_freq=True), (7000, 64), _MANY),
    "embedding of 32-bit indices": _of(
        lambda x, rows: F.embedding(rows, x, scale_grad_by_freq=True), (7000, 64), _MANY.int()
    ),
    "any of one": _of(lambda x: x.any(), (1,), grad=False),
    "count of what is not zero": _of(lambda x: x.count_nonzero(), (3000, 300), grad=False),
    "count of rows' true": _of(lambda x: (x > 0).count_nonzero(1), (300, 300), grad=False),
    "windows that overlap": _of(lambda x: x.unfold(1, 40, 10), (30, 500)),
    "windows apart": _of(lambda x: x.unfold(1, 10, 30), (30, 500)),
    "roll of two dimensions": _of(lambda x: x.roll((3, 4), (1, 2)), (30, 50, 60)),
    "roll of what is transposed": _of(lambda x: x.transpose(0, 1).roll((3, 4, 5), (0, 1, 2)), (30, 50, 60)),
    "log sigmoid": _of(F.logsigmoid, (30, 500)),
    "isinf": _of(torch.isinf, (300, 500), dtype=torch.bfloat16, grad=False),
    "inverse Fourier transform": _of(torch.fft.irfft2, (30, 64, 33), dtype=torch.complex64, grad=False),
    "Fourier transform and back": _of(lambda x: torch.fft.irfft(torch.fft.rfft(x)), (30, 500)),
    "Fourier transform of inner dimensions": _of(
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x, dim=(1, 2)), s=(16, 16), dim=(1, 2)), (8, 16, 16, 64)
    ),
    "Fourier transform of the second dimension": _of(lambda x: torch.fft.fft(x, dim=1), (8, 16, 16), grad=False),
    "product of nothing": _of(lambda x: x @ torch.ones(0, 30, device="cuda"), (50, 0)),
    "triangular system": _of(
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), (512, 512), (512, 7), grad=False
    ),
    "small triangular systems": _of(
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), (6, 20, 20), (6, 20, 7), grad=False
    ),
    "eigenvalues": _of(lambda x: torch.linalg.eigh(x)[0], (100, 100), grad=False),
    "eigenvalues of several": _of(lambda x: torch.linalg.eigh(x)[0], (5, 20, 20), grad=False),
    "singular values": _of(lambda x: torch.linalg.svd(x, full_matrices=False)[1], (3, 200, 100), grad=False),
    "QR": _of(lambda x: torch.linalg.qr(x)[0], (600, 100), grad=False),
    "QR of small matrices": _of(lambda x: torch.linalg.qr(x)[0], (6, 20, 20), grad=False),
    "Cholesky's factors": _of(lambda x: torch.linalg.cholesky_ex(x)[0], (6, 20, 20), grad=False),
    "LU factors of one": _of(lambda x: torch.linalg.lu_factor_ex(x)[0], (20, 20), grad=False),
    "LU factors that are not square": _of(lambda x: torch.linalg.lu(x)[1], (4, 20, 12), grad=False),
    "LU factors of many": _of(lambda x: torch.linalg.lu_factor_ex(x)[0], (6, 100, 100), grad=False),
    "LU factors of large ones": _of(lambda x: torch.linalg.lu_factor_ex(x)[0], (2, 130, 130), grad=False),
    "unpacked LU factors": _of(lambda x, y: torch.lu_unpack(x, y)[1], (3, 9, 9), torch.ones(3, 9).int(), grad=False),
    **{
        f"solution for {sides} sides of {count} systems of {size}": _of(
            torch.linalg.solve, (count, size, size), (count, size, sides), grad=False
        )
        for count, size, sides in ((3, 8, 2), (1, 30, 2), (3, 30, 2), (3, 30, 9), (2, 64, 70), (9, 200, 3))
    },
    "solution for a vector, and its gradient": _of(torch.linalg.solve, (20, 20), (20,)),
    "transposed LU solution": _of(
        lambda x, y, z: torch.linalg.lu_solve(x, y, z, adjoint=True),
        (3, 130, 130), torch.ones(3, 130).int(), (3, 130, 4), grad=False,
    ),
    "inverse of one": _of(torch.linalg.inv, (20, 20)),
    "inverse of several": _of(torch.linalg.inv, (3, 200, 200)),
    "determinant": _of(torch.linalg.det, (3, 12, 12), grad=False),
    "logarithm of a determinant": _of(lambda x: torch.linalg.slogdet(x)[1], (3, 12, 12), grad=False),
    "inverse by Cholesky's factor": _of(torch.cholesky_inverse, (12, 12), grad=False),
    "solution by Cholesky's factors": _of(torch.cholesky_solve, (3, 12, 2), (3, 12, 12), grad=False),
    "solution by LDL factors": _of(
        lambda x, y: torch.linalg.ldl_solve(x, torch.ones(12, dtype=torch.int32, device="cuda"), y),
        (12, 12), (12, 2), grad=False,
    ),
    "reflections": _of(lambda x: torch.geqrf(x)[0], (20, 20), grad=False),
    "product by reflections": _of(torch.ormqr, (20, 20), (20,), (20, 4), grad=False),
    "product of vectors without elements": _of(torch.dot, (0,), (0,), grad=False),
    "Fourier transform and back of apart batches": _of(
        lambda x: torch.fft.irfft(x, dim=1), (4, 6, 5), dtype=torch.complex64, grad=False
    ),
    "bag of means": _of(
        lambda x: F.embedding_bag(_ROWS.cuda(), x, torch.arange(0, 50, 5, device="cuda"), mode="mean"), (100, 16)
    ),
    "bag of many": _of(
        lambda x: F.embedding_bag(_MANY.cuda(), x, torch.arange(0, 20_000, 5, device="cuda"), mode="sum"), (300, 16)
    ),
    "bag of largest": _of(
        lambda x: F.embedding_bag(_ROWS.cuda(), x, torch.arange(0, 50, 5, device="cuda"), mode="max"), (100, 16)
    ),
    "bilinear": _of(F.bilinear, (7, 5), (7, 6), (4, 5, 6)),
    "distances of all pairs": _of(F.pdist, (30, 4)),
    "norms that are limited": _of(lambda x: x.renorm(2, 0, 1.0), (30, 40), dtype=torch.float16, grad=False),
    "product of all": _of(torch.prod, (30, 40)),
    "product of rows": _of(lambda x: x.prod(1), (30, 40)),
    "running product": _of(lambda x: x.cumprod(0), (30, 40)),
    "norms that are limited, and their gradient": _of(lambda x: x.renorm(2, 0, 1.0), (30, 40)),
    "trace": _of(torch.trace, (30, 30)),
    "x log y": _of(torch.xlogy, (300, 5), (300, 5)),
    "index_reduce": _of(
        lambda x, rows, y: x.index_reduce(0, rows, y, "amax"), (100, 16), _ROWS, (50, 16)
    ),
    "chunks of several": _of(lambda *x: torch._chunk_cat(x, 0, 4), (1000, 7), (3000, 40), (7,), grad=False),
    "chunks of transposed ones": _of(lambda x, y: torch._chunk_cat([x.mT, y], 0, 2), (50, 60), (3, 40), grad=False),
    "sign of complex numbers' parts": _of(torch.sgn, (30, 30)),
    "whether all are close": _of(lambda x, y: (torch.allclose(x, y), x)[1], (30, 30), (30, 30), grad=False),
    "whether all are equal": _of(lambda x, y: (torch.equal(x, y), x)[1], (30, 30), (30, 30), grad=False),
    "which are among a few": _of(lambda x, y: torch.isin(x, y), (30, 30), (5,), grad=False),
    "margins of classes": _of(lambda x, rows: F.multi_margin_loss(x, rows), (50, 7), _COLUMNS),
    "margins of several labels": _of(
        lambda x: F.multilabel_margin_loss(x, torch.zeros(50, 7, dtype=torch.int64, device="cuda")), (50, 7)
    ),
    "sort of long rows": _of(lambda x: x.sort()[0], (4, 30_000)),
    "sort of one row": _of(lambda x: x.sort()[0], (20_000,)),
    "random permutation": _of(lambda x: torch.randperm(100_000, device="cuda"), (1,), grad=False),
    "cumulative sum": _of(lambda x: x.cumsum(0), (30_000,)),
    "multinomial": _of(lambda x: x.exp().multinomial(3), (30, 100), grad=False),
    "gradient of unpacked LU factors": _of(lambda x: torch.linalg.lu(x)[2], (9, 9)),
    "likelihood of targets that are trained": _of(
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (300, 5), (300, 5)
    ),
    "soft margins": _of(lambda x: F.soft_margin_loss(x, torch.ones_like(x)), (300, 5)),
    "pseudo-inverse": _of(lambda x: torch.linalg.pinv(x), (20, 12)),
    "reflections that lie by columns": _of(
        lambda x, y, z: torch.ormqr(x.mT, y, z), (20, 20), (20,), (20, 4), grad=False
    ),
    "loss on the host": _of(lambda x: (x * 2).cpu(), (300, 500)),
    "elements by a mask that is broadcast": _of(
        lambda x: x.masked_select(torch.zeros(300, 1, dtype=torch.bool, device="cuda")), (300, 50)
    ),
    "elements written by a mask": _of(
        lambda x, y: x.masked_scatter(torch.zeros(300, 50, dtype=torch.bool, device="cuda"), y), (300, 50), (300, 50)
    ),
    "counts of whole numbers": _of(lambda x, rows: rows.bincount(minlength=70), (1,), _MANY * 0, grad=False),
    "sums of segments by lengths": _of(
        lambda x, rows: torch.segment_reduce(x, "sum", lengths=rows, unsafe=True), (50, 5), _ROWS * 0
    ),
    "sums of segments by offsets": _of(
        lambda x, rows: torch.segment_reduce(x, "sum", offsets=rows, unsafe=True), (50, 5), _ROWS * 0
    ),
    "indices that are within bounds": _of(
        lambda x, rows, columns: torch._unsafe_masked_index(x, rows > 0, [rows.clamp(0, 9), columns], 0.0),
        (100, 16), _ROWS[:, None], _COLUMNS,
    ),
    "Fourier transform of all dimensions": _of(torch.fft.rfftn, (8, 6, 7), grad=False),
    "CTC": _of(
        lambda x: F.ctc_loss(
            x.log_softmax(-1), torch.ones(8, 5, dtype=torch.int64, device="cuda"), torch.full((8,), 50),
            torch.full((8,), 5),
        ),
        (50, 8, 20),
    ),
    "loss in chunks of rows": _of(
        lambda x, w: F.linear_cross_entropy(
            x, w, torch.zeros(64, dtype=torch.int64, device="cuda"),
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=16),
        ),
        (64, 32), (500, 32),
    ),
    "triangular system of a part": _of(
        lambda x, y: torch.linalg.solve_triangular(x[:30, :30], y, upper=True), (40, 40), (30, 7), grad=False
    ),
    "running product of a mask's": _of(
        lambda x: torch.masked.cumprod(x, 1, mask=torch.ones(30, 40, dtype=torch.bool, device="cuda")), (30, 40)
    ),
    "powers": _of(lambda x: torch.linalg.vander(x, N=7), (300,)),
    "converted after it has come": _of(
        lambda x: torch.zeros(300, 500).to("cuda", torch.bfloat16, non_blocking=True), (1,), grad=False
    ),
    "converted before it goes": _of(lambda x: x.to("cpu", torch.float64, non_blocking=True), (300, 500), grad=False),
    "gradients of parts that meet": _of(lambda x: sum(part.exp().sum() for part in x.hsplit(3)), (300, 60)),
    "Bessel function": _of(torch.special.i1e, (300, 60)),
    "matrix times vector": _of(lambda x, y: x @ y, (30, 100), (100,)),
    "batched product": _of(lambda x, y: x @ y, (3, 10, 100), (3, 100, 5)),
    "dropout": _of(lambda x: F.dropout(x, 0.1), (100, 300)),
    "LSTM": _layer(lambda: nn.LSTM(64, 96, num_layers=2, dropout=0.1), 10, 16, 64),
    "GRU, batch first": _layer(lambda: nn.GRU(64, 96, batch_first=True, bidirectional=True), 10, 16, 64),
    "LSTM cell": _layer(lambda: nn.LSTMCell(64, 96), 16, 64),
    "GRU cell": _layer(lambda: nn.GRUCell(64, 96, bias=False), 16, 64),
    "batch norm, channels last": _layer(lambda: nn.BatchNorm2d(64), 8, 64, 16, 16),
    "batch norm of rows": _layer(lambda: nn.BatchNorm1d(64), 5000, 64),
    "batch norm of few rows": _layer(lambda: nn.BatchNorm1d(64), 500, 64),
    "batch norm of float16 rows": _layer(lambda: nn.BatchNorm1d(64), 5000, 64, dtype=torch.float16),
    "batch norm without weights": _layer(lambda: nn.BatchNorm2d(64, affine=False), 8, 64, 16, 16),
    "batch norm evaluated": _layer(lambda: nn.BatchNorm3d(64).eval(), 8, 64, 4, 4, 4),
    "batch norm of rows evaluated": _layer(lambda: nn.BatchNorm1d(64).eval(), 5000, 64),
    "bfloat16 batch norm": _layer(lambda: nn.BatchNorm2d(64).bfloat16(), 8, 64, 16, 17, dtype=torch.bfloat16),
    "bfloat16 batch norm, channels last": _layer(lambda: nn.BatchNorm2d(64), 8, 64, 16, 16, dtype=torch.bfloat16),
}  # fmt: skip


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


_half, _whole = partial(_ones, dtype=torch.bfloat16), partial(_ones, dtype=torch.int64)
# What CUDA refuses for its dtypes.
REFUSED: dict[str, Callable[[], Any]] = {
    "product": lambda: _half(8, 8) @ _ones(8, 8),
    "matrix times vector": lambda: _half(8, 8) @ _ones(8),
    "bias": lambda: F.linear(_ones(8, 8), _ones(8, 8), _half(8)),
    "convolution": lambda: F.conv2d(_half(1, 3, 8, 8), _ones(4, 3, 3, 3)),
    "transposed convolution": lambda: F.conv_transpose2d(_half(1, 3, 8, 8), _ones(3, 4, 3, 3)),
    "layer norm": lambda: F.layer_norm(_half(4, 8), (8,), _ones(8), _ones(8)),
    "group norm": lambda: F.group_norm(_half(4, 8, 4), 2, _ones(8), _ones(8)),
    "batch norm": lambda: F.batch_norm(_ones(4, 8, 4), _ones(8), _ones(8), _half(8), _half(8), training=True),
    "sampled grid": lambda: F.grid_sample(_half(1, 3, 8, 8), _ones(1, 4, 4, 2), align_corners=False),
    "weights of classes": lambda: F.cross_entropy(_half(8, 8), _whole(8), weight=_ones(8)),
    "classes": lambda: F.cross_entropy(_ones(8, 8), _ones(8, dtype=torch.int32)),
    "labels": lambda: F.binary_cross_entropy(_ones(8, 8), _whole(8, 8)),
    "product of whole numbers": lambda: _whole(8, 8) @ _whole(8, 8),
    "batched product of whole numbers": lambda: _whole(2, 8, 8) @ _whole(2, 8, 8),
    "softmax of whole numbers": lambda: _whole(8, 8).softmax(-1),
    "pooled whole numbers": lambda: F.max_pool2d(_whole(1, 3, 8, 8), 2),
    "variance of whole numbers": lambda: _whole(8, 8).std(),
    "draws by whole numbers": lambda: torch.multinomial(_whole(8, 8), 2),
    "Cholesky of halves": lambda: torch.linalg.cholesky(_half(8, 8)),
    "QR of halves": lambda: torch.linalg.qr(_half(8, 8)),
    "distances of halves": lambda: torch.cdist(_half(8, 8), _half(8, 8)),
    "attention": lambda: F.scaled_dot_product_attention(
        _half(1, 2, 8, 16), _ones(1, 2, 8, 16), _ones(1, 2, 8, 16)
    ),
    "mask of attention": lambda: F.scaled_dot_product_attention(
        *[_ones(1, 2, 8, 16)] * 3, attn_mask=_whole(8, 8)
    ),
}  # fmt: skip
# Under autocast operands become one dtype.
MADE_ONE: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(_ones(8, 8), _half(8, 8), _ones(8)),
    "convolution": lambda: F.conv2d(_half(1, 3, 8, 8), _ones(4, 3, 3, 3), _ones(4)),
    "layer norm": lambda: F.layer_norm(_half(4, 8), (8,), _ones(8), _ones(8)),
    "batch norm": lambda: F.batch_norm(_half(4, 8), *[_ones(8)] * 4, training=True),
    "weights of classes": lambda: F.cross_entropy(_half(8, 8), _whole(8), weight=_ones(8)),
    "attention": lambda: F.scaled_dot_product_attention(
        _ones(1, 2, 8, 16), _half(1, 2, 8, 16), _half(1, 2, 8, 16), attn_mask=_ones(8, 8)
    ),
}  # fmt: skip
