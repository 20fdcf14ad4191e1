"""Attention in pieces by a GPU's own kernels: outputs and gradients of plain PyTorch, and no mask in its memory."""

import pytest
import torch
import torch.distributed as dist

from brim.techniques.parallel.context_parallel import Ring, attention, kernel_for

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def ring():
    """One rank, which has both chunks: a causal piece of each, and one of the second chunk over the first."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield Ring(group=dist.group.WORLD, rank=0, ranks=1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "name", "tokens", "most"),
    [(torch.bfloat16, "Flash", 1024, 3e-2), (torch.float16, "Flash", 200, 4e-3),
     (torch.float32, "Efficient", 1024, 1e-4), (torch.float32, "Efficient", 200, 1e-4)],
)  # fmt: skip
def test_pieces_have_the_outputs_and_the_gradients_of_the_whole(ring, dtype, name, tokens, most):
    """``tokens``: also of chunks that are no multiple of a kernel's rows."""
    torch.manual_seed(0)
    shapes = [(2, heads, tokens, 64) for heads in (8, 2, 2)]
    whole = [torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True) for shape in shapes]
    gradient = torch.randn(2, tokens, 8, 64, device=DEVICE, dtype=torch.float64)
    query, key, value = whole
    scores = query @ key.repeat_interleave(4, 1).transpose(-2, -1) / 8
    looks = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril()
    expected = scores.masked_fill(~looks, -torch.inf).softmax(-1) @ value.repeat_interleave(4, 1)
    expected.backward(gradient.transpose(1, 2))
    mine = [tensor.detach().to(dtype).requires_grad_() for tensor in whole]
    kernel = kernel_for(*mine)
    assert type(kernel).__name__ == name
    made = attention(*mine, ring, kernel, None)
    made.backward(gradient.to(dtype))
    pairs = [(made.detach().transpose(1, 2), expected.detach())]
    pairs += [(part.grad, tensor.grad) for part, tensor in zip(mine, whole, strict=True)]
    for one, other in pairs:
        assert float((one.double() - other).abs().max()) < most * float(other.abs().max())


def test_no_mask_is_in_memory(ring):
    tokens = 1 << 14
    query = torch.randn(1, 1, tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(query, query, query, ring, kernel_for(query, query, query), None).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 16 * query.nbytes  # a mask would be 128 times as much
