"""Attention over ranks without a mask: outputs and gradients of one process, and what a rank keeps for it."""

import pytest
import torch

from brim.core import Category, Phase
from brim.predict.tracer import trace
from brim.techniques.parallel import context_parallel, sharding
from brim.techniques.parallel.context_parallel import attention, kernel_for
from support.attention_ranks import largest_errors

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about its own process groups
TOKENS, HEADS, SHARED, WIDTH = 8192, 8, 2, 64


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "dtype", "groups", "scale"),
    [
        (2, torch.float32, 2, 0.3),
        pytest.param(3, torch.float64, 4, None, marks=pytest.mark.slow),
        pytest.param(4, torch.float32, 1, None, marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_outputs_and_the_gradients_of_one_process(tmp_path, ranks, dtype, groups, scale):
    errors = largest_errors(ranks, tmp_path, dtype=dtype, groups=groups, scale=scale)
    assert max(errors) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "capability", "name"),
    [(torch.bfloat16, (9, 0), "Flash"), (torch.float32, (9, 0), "Efficient"), (torch.float16, (7, 5), "Efficient")],
)
def test_a_gpus_kernels_are_told_apart_and_traced_both_ways(dtype, capability, name):
    made = traced(dtype, "cuda", capability)
    kernel = {"Flash": "_scaled_dot_product_flash", "Efficient": "_scaled_dot_product_efficient"}[name]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        ran = {op.name for op in made.ops if op.phase is phase and "_scaled_dot_product" in op.name}
        assert ran and all(kernel in each for each in ran)
    assert all(name.endswith("NCCL's buffers") for name in made.not_modelled)


@pytest.mark.parametrize(("target", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_no_rank_has_a_mask_or_keeps_others_keys(target, dtype):
    """A mask would be a fourth of the tokens times all of them; four times the rank's own keys would be kept."""
    made = traced(dtype, target, (9, 0))
    assert max(storage.bytes for storage in made.storages) < TOKENS // 4 * TOKENS
    kept = sum(storage.bytes for storage in made.storages if storage.category is Category.ACTIVATION)
    each = TOKENS // 4 * WIDTH * dtype.itemsize
    own = (2 * HEADS + 2 * SHARED) * each  # queries and outputs, keys and values
    assert kept <= own + TOKENS // 4 * HEADS * 4


def test_what_no_kernel_takes_is_told():
    query, narrow = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 8)
    assert kernel_for(query, query, query) is not None
    assert kernel_for(query, query, narrow) is None
    assert kernel_for(query.int(), query.int(), query.int()) is None


def traced(dtype, target, capability):
    """One of four ranks, twice forward and backward."""
    with sharding.alone(4, 1):
        mesh = context_parallel.mesh_of(4, "cpu")
        ring = context_parallel.Context(mesh).ring

        def build():
            made = [torch.randn(1, heads, TOKENS // 4, WIDTH, dtype=dtype) for heads in (HEADS, SHARED, SHARED)]

            def step():
                query, key, value = (tensor.clone().requires_grad_() for tensor in made)
                kernel = kernel_for(query, key, value)
                attention(query, key, value, ring, kernel, None).sum().backward()

            return step

        return trace(build, steps=1, target=target, capability=capability)
