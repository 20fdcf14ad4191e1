"""The GPU catalog: complete, consistent, and found by the names that people use."""

import pytest

from brim import catalog
from brim.catalog.gpus import read_facts
from brim.core import Hardware
from brim.errors import UsageError
from brim.planning.request import Request, machine_of
from brim.units import GIB, MIB

# CPU and GPU share the memory of these, as in Apple's chips.
SHARED = ("NVIDIA GB10", "NVIDIA Thor", "AMD Radeon 8060S 128GB", "AMD Radeon 8060S 64GB")


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("4090 24GB", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("a100 pcie 40gb", "NVIDIA A100-PCIE-40GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("L4", "NVIDIA L4"),
        ("L40S", "NVIDIA L40S"),
        ("Tesla T4", "Tesla T4"),
        ("4070", "NVIDIA GeForce RTX 4070"),
        ("4070 Ti Super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("mi300x", "AMD Instinct MI300X"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("A10G", "NVIDIA A10G"),
        ("A10", "NVIDIA A10"),
        ("L40", "NVIDIA L40"),
        ("RTX 4070 Laptop", "NVIDIA GeForce RTX 4070 Laptop GPU"),
        ("4050", "NVIDIA GeForce RTX 4050 Laptop GPU"),
        ("RTX 2060", "NVIDIA GeForce RTX 2060"),
        ("3070 ti", "NVIDIA GeForce RTX 3070 Ti"),
        ("RTX 3080 Laptop 16GB", "NVIDIA GeForce RTX 3080 Laptop GPU 16GB"),
        ("5060 mobile", "NVIDIA GeForce RTX 5060 Laptop GPU"),
        ("RX 7900 XTX", "AMD Radeon RX 7900 XTX"),
        ("m3 max 64gb", "Apple M3 Max 64GB"),
        ("Ascend 910B", "Ascend 910B"),
        ("gb10", "NVIDIA GB10"),
        ("DGX Spark", "NVIDIA GB10"),
        ("Jetson AGX Thor", "NVIDIA Thor"),
        ("strix halo", "AMD Radeon 8060S 128GB"),
        ("Strix Halo 64 GB", "AMD Radeon 8060S 64GB"),
        ("Ryzen AI Max+ 395", "AMD Radeon 8060S 128GB"),
        ("gfx1151", "AMD Radeon 8060S 128GB"),
        ("h20", "NVIDIA H20"),
        ("H20 96GB", "NVIDIA H20"),
        ("H20 141GB", "NVIDIA H20-3e"),
        ("H20-3e", "NVIDIA H20-3e"),
        ("H800", "NVIDIA H800"),
        ("A800 80GB", "NVIDIA A800-SXM4-80GB"),
        ("L20", "NVIDIA L20"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("RTX PRO 6000 96GB", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("rtx pro 6000 server", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("RTX PRO 6000 Max-Q", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        ("RTX PRO 5000", "NVIDIA RTX PRO 5000 Blackwell"),
        ("RTX PRO 5000 48GB", "NVIDIA RTX PRO 5000 Blackwell"),
        ("RTX PRO 5000 72GB", "NVIDIA RTX PRO 5000 72GB Blackwell"),
        ("RTX PRO 4500", "NVIDIA RTX PRO 4500 Blackwell"),
        ("RTX PRO 4000 Blackwell", "NVIDIA RTX PRO 4000 Blackwell"),
        ("4090D", "NVIDIA GeForce RTX 4090 D"),
        ("RTX 5090 D", "NVIDIA GeForce RTX 5090 D"),
        ("5090 32GB", "NVIDIA GeForce RTX 5090"),
    ],
)
def test_names_as_people_write_them(asked, name):
    assert catalog.gpu(asked).name == name


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_the_name_that_torch_reports_finds_the_card(name):
    card = catalog.gpu(name)
    assert card.name == name
    for alias in card.aliases:
        assert catalog.gpu(alias) is card


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("rtx 4095", "RTX 4090"),
        ("h1000", "H100"),
        ("a100", "A100-SXM4-40GB"),  # two sizes: not decided in silence
        ("4060 ti", "4060 Ti 8GB"),
        ("RTX", "Nearest"),
        ("200", "H200"),
        ("180 GB", "Nearest"),  # a size alone names no card, nor does a word
        ("ada", "Nearest"),
        ("potato", "NVIDIA"),
        ("", "Nearest"),
    ],
)
def test_an_unknown_or_ambiguous_name_lists_candidates(asked, named):
    with pytest.raises(UsageError, match=named):
        catalog.gpu(asked)


def test_there_are_enough_gpus_of_every_kind():
    cards = [catalog.gpu(name) for name in catalog.gpu_names()]
    assert len(cards) >= 25
    assert {card.architecture for card in cards} >= {"Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"}
    assert {card.vendor for card in cards} == {"nvidia", "amd", "apple", "huawei"}
    laptops = {card.architecture for card in cards if "Laptop" in card.name}
    assert laptops == {"Turing", "Ampere", "Ada", "Blackwell"}


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_figures_are_sourced_and_fit_one_another(name):
    card = catalog.gpu(name)
    has_cuda = card.vendor in ("nvidia", "amd")  # others have no such kernels and libraries
    has_link = has_cuda and name not in SHARED
    for field in (
        "marketing_bytes",
        *(("bytes_per_s", "cublas_workspace_bytes", "compute_capability") if has_cuda else ()),
        *(("pcie_bytes_per_s",) if has_link else ()),
    ):
        assert getattr(card, field) is not None
        assert len(card.sources[field]) > 10
    assert {f"flops_per_s.{dtype}" for dtype in card.flops_per_s} <= card.sources.keys()
    sizes = [s for s in (card.usable_bytes, card.memory_bytes, card.marketing_bytes) if s is not None]
    assert sizes == sorted(sizes), "usable <= nvidia-smi's total <= the size on the box"
    assert sizes[0] > 0.92 * sizes[-1]
    assert card.capacity_bytes == sizes[0]
    rates = card.flops_per_s
    assert all(measured < rates[dtype] for dtype, measured in card.measured_flops_per_s.items())
    assert rates.get("tf32", 0) <= rates.get("bfloat16", 0) <= rates.get("float8_e4m3fn", float("inf"))
    if "bfloat16" in rates and card.vendor == "nvidia":
        assert float(card.compute_capability) >= 8.0, "no bfloat16 tensor cores before Ampere"


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_cpu_and_gpu_share_is_divided_between_vram_and_ram(name):
    card = catalog.gpu(name)
    assert card.pcie_bytes_per_s is None
    assert name not in {node["gpu"] for node in read_facts("nodes.json")["nodes"]}, "its host has no RAM beside it"
    assert [tier.name for tier in card.hardware().tiers] == ["vram"]
    for ram in (None, "20GiB"):
        machine = machine_of(Request(model="gpt2", gpu=name, ram=ram))
        parts = [machine.hardware.tier("ram").capacity_bytes, machine.budget_bytes["vram"], card.context().bytes]
        assert sum(parts) == card.capacity_bytes
        assert machine.hardware.link("ram", "vram").bytes_per_s <= (card.bytes_per_s or 0) / 2, "read and written"
    with pytest.raises(UsageError, match="computes in the same memory"):
        machine_of(Request(model="gpt2", gpu=name, ram="1TiB"))


def test_a_gpu_without_kernels_of_cuda_or_rocm_is_not_planned_for():
    with pytest.raises(UsageError, match="link to the host"):
        machine_of(Request(model="gpt2", gpu="Apple M4 Max 128GB"))


def test_cards_cut_for_export_are_no_faster_than_those_they_derive_from():
    wholes = {"H20": "H100", "H800": "H100", "A800": "A100 80GB", "4090 D": "4090", "5090 D": "5090"}
    for cut, whole in wholes.items():
        a, b = catalog.gpu(cut), catalog.gpu(whole)
        assert all(rate <= b.flops_per_s[dtype] for dtype, rate in a.flops_per_s.items())
        assert (a.nvlink_bytes_per_s or 0) <= (b.nvlink_bytes_per_s or 0)
        assert a.multiprocessors <= b.multiprocessors
    assert catalog.gpu("H800").nvlink_bytes_per_s == catalog.gpu("A800").nvlink_bytes_per_s == 400e9


@pytest.mark.parametrize(
    ("name", "workspace_bytes"),
    [
        ("h100", 32 * MIB),
        ("5090", 32 * MIB),
        ("4090", 8_519_680),
        ("t4", 8_519_680),
        ("mi300x", 128 * MIB),
        ("gb10", 32 * MIB),
        ("jetson thor", 32 * MIB),
        ("a800", 8_519_680),
        ("strix halo", 32 * MIB),
    ],
)
def test_cublas_workspaces_of_pytorch(name, workspace_bytes):
    assert catalog.gpu(name).cublas_workspace_bytes == workspace_bytes


def test_contexts_say_for_which_versions_they_hold():
    contexts = [c for name in catalog.gpu_names() for c in catalog.gpu(name).contexts]
    assert contexts
    assert all(100 * MIB < c.bytes < GIB and c.cuda and c.torch and c.source for c in contexts)


def test_the_context_of_a_gpu_that_nobody_measured_says_so():
    measured = catalog.gpu("3090").context("12.8")
    assert (measured.cuda, measured.bytes) == ("12.8", 256 * MIB)
    assert catalog.gpu("3090").context("11.8") == measured, "the newest known, and it says for which version"
    general = catalog.gpu("t4").context("12.8")
    assert (general.cuda, general.bytes) == ("", 400_000_000)
    assert "not measured on this GPU" in general.source


def test_a_card_as_hardware():
    hardware = catalog.gpu("h100").hardware(ram_bytes=64 * GIB, ram_bytes_per_s=80e9)
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert hardware.compute == "vram"
    assert hardware.link("ram", "vram").bytes_per_s == 55.43e9
    assert hardware.flops_per_s["bfloat16"] == hardware.flops_per_s["float16"] == 794.5e12
    peak = catalog.gpu("h100").hardware(measured=False)
    assert peak.flops_per_s["bfloat16"] == 989.5e12
    assert [tier.name for tier in peak.tiers] == ["vram"]
