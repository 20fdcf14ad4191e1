"""Operators of the device beside the CPU's, forward and backward: what differs, with the first words of how."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

from brim.rehearsal.force import InForce

InForce.put("all")
drawn = torch.Generator().manual_seed(0)


def r(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=drawn).to(dtype)


def i(limit, *shape):
    return torch.randint(0, limit, shape, generator=drawn)


A, B, M, S, X, W = r(4, 6), r(4, 6), r(6, 5), r(5, 5), r(2, 3, 8, 8), r(4, 3, 3, 3)
P, SPD, J = A.abs() + 0.1, S @ S.T + torch.eye(5), i(6, 4)
q = r(2, 4, 16, 8)
cases = {}


def c(name, function, *arguments, tolerance=1e-4):
    assert name not in cases, name
    cases[name] = function, arguments, tolerance


positive = ["sqrt", "rsqrt", "log2", "log10", "lgamma", "digamma", "log1p"]


def sparse(a):
    return torch.where(a > 0, a, 0).detach().to_sparse()


def entries(found):
    whole = found.detach().coalesce()
    return whole.indices(), whole.values()


for n in """abs neg exp log1p sin cos tan tanh sigmoid relu sqrt rsqrt floor ceil round trunc frac sign erf erfc
    erfinv lgamma digamma expm1 reciprocal square sinh cosh asinh atan logit exp2 log2 log10 isnan
    isfinite isinf logical_not sgn""".split():  # noqa: SIM905
    c(n, getattr(torch, n), P if n in positive else A.clamp(-0.9, 0.9))
for n in """add sub mul div pow atan2 fmod remainder maximum minimum eq ne lt le gt ge logical_and logical_or
    hypot copysign heaviside nextafter logaddexp floor_divide xlogy""".split():  # noqa: SIM905
    c(n, getattr(torch, n), P, B.abs() + 0.2)
for n in ["bitwise_and", "bitwise_or", "bitwise_xor", "gcd", "lcm"]:
    c(n, getattr(torch, n), i(20, 4), i(20, 4) + 1)
for n in """sum mean prod amax amin argmax argmin std var logsumexp cumsum cumprod softmax log_softmax sort
    median mode cummax cummin logcumsumexp count_nonzero""".split():  # noqa: SIM905
    c(n, lambda x, n=n: getattr(torch, n)(x, 1), A)
for n in """gelu silu mish elu leaky_relu softplus hardswish hardsigmoid hardtanh logsigmoid selu celu relu6
    softsign tanhshrink""".split():  # noqa: SIM905
    c(f"F.{n}", getattr(F, n), A)

c("topk", lambda x: torch.topk(x, 2, -1), A)
c("vector_norm", lambda x: torch.linalg.vector_norm(x, dim=-1), A)
c("aminmax", lambda x: torch.aminmax(x, dim=1), A)
c("any", lambda x: (x > 0).any(-1), A)
c("all", lambda x: (x > 0).all(-1), A)
c("sum_all", torch.sum, A)
c("mm", torch.mm, A, M)
c("bmm", torch.bmm, r(3, 4, 5), r(3, 5, 2))
c("addmm", torch.addmm, r(4, 5), A, M)
c("baddbmm", torch.baddbmm, r(3, 4, 2), r(3, 4, 5), r(3, 5, 2))
c("mv", torch.mv, A, r(6))
c("dot", torch.dot, r(5), r(5))
c("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), A, M)
c("linear", F.linear, A, r(3, 6), r(3))
c("linear_half", F.linear, A.bfloat16(), r(3, 6).bfloat16(), r(3).bfloat16(), tolerance=2e-2)
c("matmul_half", torch.matmul, A.half(), M.half(), tolerance=1e-2)
c("conv2d", F.conv2d, X, W, r(4))
c("conv1d", F.conv1d, r(2, 3, 9), r(4, 3, 3))
c("conv3d", F.conv3d, r(1, 2, 5, 5, 5), r(3, 2, 3, 3, 3))
c("conv_t", F.conv_transpose2d, X, r(3, 4, 3, 3))
c("depthwise", lambda x, w: F.conv2d(x, w, groups=3), X, r(3, 1, 3, 3))
c("conv_half", F.conv2d, X.half(), W.half(), tolerance=1e-2)
c("maxpool", F.max_pool2d, X, 2)
c("avgpool", F.avg_pool2d, X, 2)
c("adapt", F.adaptive_avg_pool2d, X, 3)
c("adaptmax", F.adaptive_max_pool2d, X, 3)
c("bn", lambda x: F.batch_norm(x, torch.zeros(3, device=x.device), torch.ones(3, device=x.device), training=True), X)
c("bn_eval", lambda x: F.batch_norm(x, torch.zeros(3, device=x.device), torch.ones(3, device=x.device)), X)
c("gn", lambda x: F.group_norm(x, 3), X)
c("ln", lambda x, w: F.layer_norm(x, (6,), w), A, r(6))
c("rms", lambda x, w: F.rms_norm(x, (6,), w), A, r(6))
c("instnorm", F.instance_norm, X)
c("embedding", F.embedding, J, r(6, 3))
c("embedding_bag", lambda i, w: F.embedding_bag(i.view(2, 2), w), J, r(6, 3))
c("one_hot", F.one_hot, J)
c("gather", lambda a, i: a.gather(1, i[:, None]), A, J)
c("scatter", lambda a, i: a.scatter(1, i[:, None], 1.0), A, J)
c("scatter_add", lambda a, i: a.scatter_add(1, i[:, None], a), A, J)
c("index_select", lambda a, i: a.index_select(1, i), A, J)
c("index", lambda a, i: a[:, i], A, J)
c("index_bool", lambda a: a[a > 0], A)
c(
    "index_put",
    lambda a, i: a.index_put((torch.arange(4, device=a.device), i), torch.tensor(2.0, device=a.device)),
    A,
    J,
)
c("index_add", lambda a, i: a.index_add(1, i, a[:, :4]), A, J)
c("masked_fill", lambda a: a.masked_fill(a > 0, 0), A)
c("masked_select", lambda a: a.masked_select(a > 0), A)
c("where", lambda a, b: torch.where(a > 0, a, b), A, B)
c("nonzero", lambda a: (a > 0).nonzero(), A)
c("take", torch.take, A, J)
c("tril", torch.tril, A)
c("triu", torch.triu, A)
c("roll", lambda a: a.roll(2, 1), A)
c("flip", lambda a: a.flip(1), A)
c("cat", lambda a, b: torch.cat([a, b]), A, B)
c("stack", lambda a, b: torch.stack([a, b]), A, B)
c("repeat", lambda a: a.repeat(2, 2), A)
c("unique", lambda i: torch.unique(i, return_inverse=True, return_counts=True), J)
c("bincount", torch.bincount, J)
c("histc", lambda a: torch.histc(a, 5), A)
c("histc of whole numbers", lambda j: torch.histc(j.int() if j.is_cuda else j.float(), 4, 0, 3).long(), J)
c("searchsorted", torch.searchsorted, A[0].sort()[0], A[1])
c("bucketize", torch.bucketize, A, torch.tensor([-1.0, 0, 1.0]))
c("isin", torch.isin, J, torch.tensor([1, 2]))
c("repeat_interleave", torch.repeat_interleave, J)
c("coalesce", lambda j, a: entries(torch.sparse_coo_tensor(j[None], a, (6, 6))), J, A)
c("sparse product", lambda a: entries(torch.sparse.mm(sparse(a), sparse(a).t())), A)
c("sparse sum", lambda a: entries(torch.sparse.sum(sparse(a), 0)), A)
c("sparse rows", lambda a: entries(sparse(a).index_select(0, torch.tensor([2, 0], device=a.device))), A)
c("pad", lambda a: F.pad(a, (1, 2)), A)
c("reflect", lambda a: F.pad(a, (1, 2, 1, 1), mode="reflect"), X)
c("interp", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), X)
c("nearest", lambda x: F.interpolate(x, scale_factor=2), X)
c("grid", lambda x: F.grid_sample(x, torch.zeros(2, 4, 4, 2, device=x.device), align_corners=False), X)
c("pixshuf", lambda x: F.pixel_shuffle(x, 2), r(1, 8, 3, 3))
c("unfold", lambda x: F.unfold(x, 3), X)
c("fold", lambda x: F.fold(x, (4, 4), 2), r(1, 12, 9))
c("cdist", torch.cdist, A, B)
c("cross", torch.linalg.cross, r(4, 3), r(4, 3))
c("lerp", lambda a, b: torch.lerp(a, b, 0.3), A, B)
c("addcmul", torch.addcmul, A, B, B)
c("addcdiv", torch.addcdiv, A, B, P)
c("clamp", lambda a: a.clamp(-0.5, 0.5), A)
c("nan_to_num", torch.nan_to_num, A / 0)
c("diff", torch.diff, A)
c("to_int", lambda a: a.int(), A * 5)
c("to_half", lambda a: a.half().float(), A, tolerance=1e-3)
c("t_contig", lambda a: a.t().contiguous(), A)
c("expand_clone", lambda a: a[:, :1].expand(4, 6).clone(), A)
c("glu", F.glu, A)
c("prelu", F.prelu, A, torch.tensor([0.2]))
c("ce", F.cross_entropy, A, J)
c("nll", F.nll_loss, A, J)
c("mse", F.mse_loss, A, B)
c("l1", F.l1_loss, A, B)
c("sl1", F.smooth_l1_loss, A, B)
c("bce", lambda a: F.binary_cross_entropy(a.sigmoid(), torch.ones_like(a)), A)
c("bcel", lambda a: F.binary_cross_entropy_with_logits(a, torch.ones_like(a)), A)
c("kl", lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), A, B)
c(
    "ctc",
    lambda a: F.ctc_loss(
        a.log_softmax(-1), torch.tensor([[1, 2]], device=a.device), torch.tensor([8]), torch.tensor([2])
    ),
    r(8, 1, 5),
)
c("cosine", F.cosine_similarity, A, B)
c("huber", F.huber_loss, A, B)
c("margin", lambda a: F.multi_margin_loss(a, torch.tensor([1, 2, 3, 0], device=a.device)), A)
c("cholesky", torch.linalg.cholesky, SPD)
c("inv", torch.linalg.inv, SPD, tolerance=1e-3)
c("solve", torch.linalg.solve, SPD, S, tolerance=1e-3)
c("det", torch.linalg.det, SPD, tolerance=1e-2)
c("eigvalsh", torch.linalg.eigvalsh, SPD, tolerance=1e-3)
c("svdvals", torch.linalg.svdvals, S, tolerance=1e-3)
c("qr", lambda s: torch.linalg.qr(s)[1].abs(), S, tolerance=1e-3)
c("fft", lambda a: torch.fft.fft(a).abs(), A)
c("rfft", lambda a: torch.fft.irfft(torch.fft.rfft(a)), A)
c("matexp", torch.linalg.matrix_exp, S / 5, tolerance=1e-3)
c("polar", lambda a, b: torch.view_as_real(torch.polar(a, b)), P, B)
c("complex", lambda a, b: (torch.complex(a, b) * 2).real, A, B)
c("foreach_add", lambda a, b: torch._foreach_add([a, b], 1.0), A, B)
c("foreach_norm", lambda a, b: torch._foreach_norm([a, b]), A, B)
c("foreach_mul_", lambda a, b: (lambda both: (torch._foreach_mul_(both, 2.0), both)[1])([a.clone(), b.clone()]), A, B)
c("foreach_lerp", lambda a, b: torch._foreach_lerp([a], [b], 0.2), A, B)
c("inplace_add", lambda a, b: a.clone().add_(b), A, B)
c("inplace_t", lambda a: a.clone().t().mul_(2), A)
c("arange", lambda a: torch.arange(3, 9, 2, device=a.device), A)
c("linspace", lambda a: torch.linspace(0, 1, 7, device=a.device), A)
c("eye", lambda a: torch.eye(3, device=a.device), A)
c("full", lambda a: torch.full((3,), 2.5, device=a.device), A)
c("tril_idx", lambda a: torch.tril_indices(3, 3, device=a.device), A)
c("meshgrid", lambda a: torch.cartesian_prod(a[0], a[1]), A)
c("item", lambda a: torch.tensor(a.sum().item()), A)
c("equal", lambda a: torch.tensor(torch.equal(a, a.clone())), A)
c(
    "sdpa_mask",
    lambda q: F.scaled_dot_product_attention(
        q, q, q, attn_mask=torch.ones(16, 16, dtype=torch.bool, device=q.device).tril()
    ),
    q,
)


def attention(backend, dtype):
    def call(q):
        if q.is_cuda:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*[q.to(dtype)] * 3, is_causal=True).float()
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    return call


c("flash", attention(SDPBackend.FLASH_ATTENTION, torch.float16), q, tolerance=2e-2)
c("efficient", attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32), q)
c("math", attention(SDPBackend.MATH, torch.float32), q)
c("cudnn", attention(SDPBackend.CUDNN_ATTENTION, torch.bfloat16), q, tolerance=5e-2)


def tensors(found):
    return [one for one in tree_flatten(found)[0] if isinstance(one, torch.Tensor)]


def outputs(function, arguments, device, backward):
    given = [one.detach().clone().to(device) if isinstance(one, torch.Tensor) else one for one in arguments]
    floats = [one.requires_grad_() for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
    found = tensors(function(*given))
    if backward:
        weights = [torch.linspace(0.1, 1, one.numel(), device=device).view(one.shape) for one in found]
        total = [(one.float() * w).sum() for one, w in zip(found, weights, strict=True) if one.requires_grad]
        if not total:
            return []
        sum(total).backward()
        found = [one.grad for one in floats if one.grad is not None]
    return [one.detach().cpu() for one in found]


def difference(function, arguments, tolerance, backward):
    wanted = outputs(function, arguments, "cpu", backward)
    found = outputs(function, arguments, "cuda", backward)
    for one, other in zip(found, wanted, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
        else:
            assert torch.equal(one, other), f"{one} is not {other}"


differing = {}
for name, (function, arguments, tolerance) in cases.items():
    for backward in (False, True):
        if backward and name in {"heaviside", "floor_divide", "scatter_add"}:
            continue  # the CPU has no derivative either
        try:
            difference(function, arguments, tolerance, backward)
        except Exception as error:
            differing[f"{name}{' backward' * backward}"] = f"{type(error).__name__}: {error}"[:300]
result = {"cases": len(cases), "differing": differing}
