"""Links between GPUs: every figure has its source, and rings are as slow as their slowest link."""

import pytest

from brim import catalog
from brim.errors import UsageError


@pytest.mark.parametrize(("name", "node", "network"), [("A100 80GB", 240e9, 25e9), ("H100", 370.8e9, 50e9),
                                                       ("B200", 721.8e9, 50e9)])  # fmt: skip
def test_links_of_gpus_in_the_machines_they_are_sold_in(name, node, network):
    found = catalog.network(catalog.gpu(name))
    assert found.node_bytes_per_s == pytest.approx(node, rel=1e-3)
    assert found.network_bytes_per_s == pytest.approx(network * 0.91)
    assert all(found.sources)


def test_a_ring_out_of_the_node_takes_the_links_of_all_its_members_there():
    found = catalog.network(catalog.gpu("H100"))
    assert found.bytes_per_s(8, crosses=False) == found.node_bytes_per_s
    assert found.bytes_per_s(1, crosses=True) == found.network_bytes_per_s
    assert found.bytes_per_s(4, crosses=True) == 4 * found.network_bytes_per_s
    assert found.bytes_per_s(8, crosses=True) <= found.node_bytes_per_s


def test_gpus_without_nvlink_talk_over_pcie():
    card = catalog.gpu("RTX 4090")
    assert catalog.network(card).node_bytes_per_s == card.pcie_bytes_per_s


def test_unknown_links_are_an_error():
    card = next(catalog.gpu(name) for name in catalog.gpu_names() if catalog.gpu(name).pcie_bytes_per_s)
    bare = type(card)(**{**vars(card), "nvlink_bytes_per_s": None, "pcie_bytes_per_s": None})
    with pytest.raises(UsageError, match="links"):
        catalog.network(bare)


def test_nccl_takes_nothing_for_one_rank_and_more_for_many():
    assert catalog.nccl_bytes(1) == 0 < catalog.nccl_bytes(2) < catalog.nccl_bytes(8) == catalog.nccl_bytes(512)
    assert "nccl#964" in catalog.nccl_source()
