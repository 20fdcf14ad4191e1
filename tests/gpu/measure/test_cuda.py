"""What only a CUDA device can show: rates of its links and units, and its memory as the driver counts it."""

import pytest
import torch

from brim.measure.capacity import free_bytes
from brim.measure.monitor import Monitor
from brim.measure.probe import probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def hardware(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        before = torch.backends.cuda.matmul.fp32_precision
        measured = probe(device="cuda")
        assert torch.backends.cuda.matmul.fp32_precision == before
        assert probe(device="cuda").links == measured.links
    return measured


@pytest.mark.seconds
def test_vram_is_the_fastest_tier(hardware):
    assert hardware.tier("vram").bytes_per_s > hardware.tier("ram").bytes_per_s


def test_vram_is_the_compute_tier(hardware):
    assert hardware.compute == "vram"
    assert hardware.name == torch.cuda.get_device_name()
    assert hardware.tier("vram").capacity_bytes == torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize("way", [("ram", "vram"), ("vram", "ram")])
def test_a_link_is_not_faster_when_the_other_way_is_busy(hardware, way):
    link = hardware.link(*way)
    assert 0 < link.duplex_bytes_per_s < 1.1 * link.bytes_per_s
    assert 0 < link.latency_s < 1e-3


@pytest.mark.seconds
def test_smaller_dtypes_multiply_faster(hardware):
    rates = hardware.flops_per_s
    assert rates["float32"] > 1e11
    if torch.cuda.get_device_capability() >= (8, 0):
        assert rates["float32"] < rates["tf32"] < rates["bfloat16"]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert rates["float8_e4m3fn"] > rates["bfloat16"]


def test_pytorchs_peaks_are_seen_by_nested_monitors():
    torch.cuda.init()
    with Monitor() as outer:
        held = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        del held
        torch.cuda.empty_cache()
        with Monitor() as inner:
            held = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
            del held
    assert outer.usage().vram_reserved_bytes - inner.usage().vram_reserved_bytes == 150 * MIB


def test_free_vram_counts_what_pytorch_can_use_again():
    torch.cuda.empty_cache()
    before = free_bytes("vram")
    held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del held
    assert free_bytes("vram") == pytest.approx(before, abs=64 * MIB)
