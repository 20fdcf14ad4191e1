"""Sparse tensors in a trace: their indices and values are what takes memory, and their kernels take some besides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brim
from brim.core import Trace
from brim.errors import UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]
NODES, EDGES, WIDTH = 50, 200, 8


def edges() -> torch.Tensor:
    return torch.stack(((torch.arange(EDGES) * 7) % NODES, (torch.arange(EDGES) * 13) % NODES))


def sizes(made: Trace) -> list[int]:
    """Bytes that are allocated in the first step, in order."""
    return [storage.bytes for storage in made.storages if storage.born >= made.step_starts[0]]


def taken(function, *, steps: int = 1, strict: bool = False) -> Trace:
    """Of ``function(adjacency, features)`` on the GPU; the adjacency has distinct edges."""

    def build():
        adjacency = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce().cuda()
        features = torch.randn(NODES, WIDTH).cuda()
        return lambda: function(adjacency, features)

    return brim.trace(build, steps=steps, target="cuda", strict=strict)


def test_a_coalesced_tensor_has_as_many_values_as_indices_differ():
    seen = []

    def build():
        adjacency = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce()
        seen.append((adjacency._nnz(), adjacency.is_coalesced(), adjacency.sparse_dim()))
        return lambda: None

    brim.trace(build, steps=1, target="cuda")
    real = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce()
    assert seen == [(real._nnz(), True, 2)]


def test_values_of_a_known_sparse_tensor_are_known():
    def build():
        adjacency = torch.sparse_coo_tensor(edges(), torch.arange(EDGES), (NODES, NODES)).coalesce()
        chosen = adjacency.index_select(0, torch.tensor([0, 7])).to_dense()
        real = torch.sparse_coo_tensor(edges(), torch.arange(EDGES), (NODES, NODES)).to_dense()[[0, 7]]
        assert chosen.tolist() == real.tolist()
        assert adjacency.indices()[0].max().item() == int(edges()[0].max())
        return lambda: None

    brim.trace(build, steps=1, target="cuda", strict=True)


def test_a_product_compresses_rows_to_32_bits():
    made = taken(lambda adjacency, features: torch.sparse.mm(adjacency, features))
    real = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce()._nnz()
    dense = NODES * WIDTH * 4
    assert sizes(made) == [dense, dense, (NODES + 1) * 4, real * 4, real * 4, dense]
    product = next(op for op in made.ops if "_sparse_addmm" in op.name)
    assert product.flops == 2 * real * WIDTH
    assert any("cuSPARSE" in note for note in made.not_modelled)


def test_the_gradient_of_a_sparse_embedding_has_a_row_for_each_token():
    def build():
        embedding = nn.Embedding(3000, 64, sparse=True).cuda()
        tokens = (torch.arange(256) * 3 % 3000).cuda()
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.01)

        def step():
            embedding(tokens).sum().backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()

        return step

    made = brim.trace(build, steps=1, target="cuda", strict=True)
    found = sizes(made)
    assert found.count(256 * 64 * 4) >= 4
    assert found.count(3000 * 64 * 4) == 2  # both states of the optimizer


def test_rows_that_are_compressed_are_multiplied_and_differentiated():
    def build():
        coo = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce()
        adjacency, layer = coo.to_sparse_csr().cuda(), nn.Linear(WIDTH, WIDTH).cuda()
        features = torch.randn(NODES, WIDTH).cuda()

        def step():
            assert adjacency.crow_indices().shape == (NODES + 1,)
            (adjacency @ layer(features)).sum().backward()
            assert layer.weight.grad.shape == (WIDTH, WIDTH)

        return step

    assert brim.trace(build, steps=1, target="cuda").storages


def test_weights_of_edges_have_gradients():
    def build():
        weights = nn.Parameter(torch.rand(EDGES, device="cuda"))
        where, features = edges().cuda(), torch.randn(NODES, WIDTH).cuda()

        def step():
            adjacency = torch.sparse_coo_tensor(where, weights.sigmoid(), (NODES, NODES))
            F.mse_loss(torch.sparse.mm(adjacency, features), features).backward()
            assert weights.grad.shape == (EDGES,)

        return step

    assert brim.trace(build, steps=1, target="cuda").storages


def test_bags_with_sparse_gradients_are_traced():
    def build():
        bag = nn.EmbeddingBag(500, 16, mode="mean", sparse=True).cuda()
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        tokens = (torch.arange(64) % 500).view(8, 8).cuda()

        def step():
            optimizer.zero_grad()
            bag(tokens).sum().backward()
            optimizer.step()

        return step

    made = brim.trace(build, steps=2, target="cuda", strict=True)
    assert 64 * 16 * 4 in sizes(made)  # no gradient of the whole table
    assert 500 * 16 * 4 not in sizes(made)


def test_places_that_depend_on_weights_are_refused_where_all_is_to_be_known():
    layer = []

    def run(adjacency, features):
        layer.append(nn.Linear(WIDTH, WIDTH).cuda())
        return layer.pop()(features).detach().relu().to_sparse()

    assert "test_sparse.py" in taken(run).notes["assumed"]
    with pytest.raises(UnsupportedError, match=r"test_sparse\.py"):
        taken(run, strict=True)


def test_a_factory_finds_the_size_and_moves_its_parts():
    def build():
        where, amounts = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.rand(3)
        assert torch.sparse_coo_tensor(where, amounts).shape == (2, 3)
        there = torch.sparse_coo_tensor(where, amounts, (3, 4), device="cuda")
        assert there.is_cuda
        assert there._values().is_cuda
        listed = torch.sparse_csr_tensor([0, 1, 2, 3], [0, 1, 2], [1.0, 2.0, 3.0], device="cuda")
        assert (listed.shape, listed.device.type) == ((3, 3), "cuda")
        assert there.to("cpu").device.type == "cpu"
        return lambda: None

    made = brim.trace(build, steps=1, target="cuda", strict=True)
    assert [storage.bytes for storage in made.storages][:2] == [3 * 4, 2 * 3 * 8]


def test_a_sparse_tensor_made_outside_of_the_trace_is_known():
    adjacency = torch.sparse_coo_tensor(edges(), torch.ones(EDGES), (NODES, NODES)).coalesce()

    def build():
        layer, features = nn.Linear(WIDTH, WIDTH).cuda(), torch.randn(NODES, WIDTH).cuda()
        there = adjacency.cuda()
        return lambda: torch.sparse.mm(there, layer(features)).sum().backward()

    made = brim.trace(build, steps=1, target="cuda")
    assert sizes(made).count(adjacency._nnz() * 4) >= 2
