"""The machines that GPUs are sold in: every figure has its source, and rings are as slow as their slowest link."""

import dataclasses

import pytest

from brim import catalog
from brim.catalog.gpus import read_facts
from brim.errors import UsageError
from brim.estimation.ranks.split import Split
from brim.estimation.ranks.time import node_rate
from brim.planning.ranks import assumed, node_ram
from brim.planning.request import Request, machine_of
from brim.requests.plan import MeshRequest

GIB = 1 << 30


@pytest.mark.parametrize("name", [node["gpu"] for node in read_facts("nodes.json")["nodes"]])
def test_figures_of_nodes_are_sourced_and_fit_one_another(name):
    host = catalog.host_of(catalog.gpu(name))
    assert {"ram_bytes", "ram_bytes_per_s"} <= host.sources.keys()
    assert all(len(source) > 10 for source in host.sources.values())
    assert host.ram_bytes > 90 * GIB * host.gpus, "nodes have more RAM than this beside each GPU"
    assert host.link_bytes_per_s <= host.ram_bytes_per_s
    assert host.ram_of(host.gpus) == host.ram_bytes == host.ram_of(99)
    assert host.rate_of(1) == host.ram_bytes_per_s / host.gpus


def test_a_part_of_a_node_has_its_share_and_a_desktop_is_shared_by_all():
    h100, card = (catalog.host_of(catalog.gpu(name)) for name in ("H100", "RTX 4090"))
    assert h100.ram_of(2) == 512 * GIB
    assert (card.gpus, card.ram_of(4), card.rate_of(4)) == (None, 64 * GIB, catalog.HOST_BYTES_PER_S)


@pytest.mark.parametrize(("name", "node", "ram_gib"), [("H20", "HGX H20", 1024), ("H20 141GB", "HGX H20-3e", 2048),
                                                       ("H800", "HGX H800", 2048)])  # fmt: skip
def test_servers_of_cards_cut_for_export(name, node, ram_gib):
    card = catalog.gpu(name)
    host = catalog.host_of(card)
    assert (host.name, host.gpus, host.ram_bytes) == (node, 8, ram_gib * GIB)
    assert host.link_bytes_per_s == card.pcie_bytes_per_s


def test_a_superchips_link_is_its_own():
    link = next(
        link for link in machine_of(Request(model="gpt2", gpu="GH200")).hardware.links if link.target == "vram"
    )
    assert link.bytes_per_s > 5 * catalog.gpu("GH200").pcie_bytes_per_s
    assert link.bytes_per_s == catalog.host_of(catalog.gpu("GH200")).ram_bytes_per_s == 346e9, "its LPDDR5X is slower"


@pytest.mark.parametrize(
    ("options", "ram_gib", "gb_per_s", "told"),
    [
        (
            {"gpus": 8},
            0.9 * 2048,
            491.5,
            "2 TiB of RAM and a RAM rate of 492 GB/s, as for 8 of the 8 GPUs",
        ),
        ({"gpus": 16}, 0.9 * 2048, 491.5, "as for 8 of the 8 GPUs"),
        ({"gpus": 4}, 0.9 * 1024, 491.5 / 2, "as for 4 of the 8 GPUs"),
        ({"gpus": 8, "ram": 1024 * GIB}, 0.9 * 1024, 491.5, "a RAM rate of 492 GB/s, as for"),
        ({"gpus": 8, "ram_gb_per_s": 300.0}, 0.9 * 2048, 300.0, "(change with --ram)"),
    ],
)
def test_a_plan_for_several_gpus_takes_the_node_they_are_sold_in_and_says_so(options, ram_gib, gb_per_s, told):
    asked = MeshRequest(model="", gpu="H100", **options)
    assert node_ram(asked) == pytest.approx(ram_gib * GIB, rel=1e-6)
    given = asked.ram_gb_per_s
    rate = node_rate(Split(gpus=options["gpus"]), catalog.gpu("H100"), None if given is None else given * 1e9)
    assert rate == pytest.approx(gb_per_s * 1e9)
    assert told in " ".join(assumed(asked))


def test_a_single_gpu_has_its_share_and_what_is_given_counts():
    machine = machine_of(Request(model="gpt2", gpu="H100"))
    assert machine.hardware.tier("ram").capacity_bytes == 256 * GIB
    assert machine.hardware.tier("ram").bytes_per_s == pytest.approx(491.5e9 / 8)
    given = machine_of(Request(model="gpt2", gpu="H100", ram="1TiB", ram_gb_per_s=200.0))
    assert given.hardware.tier("ram").bytes_per_s == 200e9
    assert not any("of RAM" in text or "RAM rate" in text for text in given.assumed)


def test_a_card_without_a_known_link_is_refused():
    bare = dataclasses.replace(catalog.gpu("RTX 4090"), pcie_bytes_per_s=None)
    assert catalog.host_of(bare).link_bytes_per_s is None
    with pytest.raises(UsageError, match="link"):
        catalog.network(dataclasses.replace(bare, nvlink_bytes_per_s=None))


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


def test_nccl_takes_nothing_for_one_rank_and_more_for_many():
    assert catalog.nccl_bytes(1) == 0 < catalog.nccl_bytes(2) < catalog.nccl_bytes(8) == catalog.nccl_bytes(512)
    assert "nccl#964" in catalog.nccl_source()
