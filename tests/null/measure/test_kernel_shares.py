"""The rates of kernels, measured here on the CPU: a GPU runs the same code."""

from types import SimpleNamespace

import pytest
import torch

from brim import catalog
from brim.measure import device_rates

HERE = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)


@pytest.mark.thorough
def test_every_kind_of_kernel_is_measured_that_the_catalog_has():
    shares = device_rates.kernel_shares(HERE, {"float16": 1e11, "float32": 1e11}, 1e10)
    assert shares.keys() == catalog.gpu("RTX 4090").hardware().shares.keys()
    assert all(share > 0 for share in shares.values())
    assert 0 < device_rates.dispatch_s(HERE) < 1


def test_a_card_takes_the_shares_of_its_generation_or_of_all():
    assert catalog.gpu("RTX 4070").hardware().shares == catalog.gpu("RTX 4090").hardware().shares
    assert catalog.gpu("RX 7900 XTX").hardware().shares
    assert not catalog.gpu("RTX 4090").hardware(measured=False).shares


def test_products_are_hardly_faster_than_the_best_that_was_measured():
    hardware = catalog.gpu("L20").hardware()
    assert max(hardware.shares.values()) <= 1.07
    assert catalog.gpu("H200").hardware().shares["product.flops"] == pytest.approx(1.05, rel=0.01)
