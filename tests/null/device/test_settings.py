"""Any of NVIDIA's cards in the catalog can be rehearsed on; no other vendor's."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim import catalog
from brim.device.settings import VARIABLE, DeviceSettings
from brim.errors import UnsupportedError


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_every_card_of_the_catalog(name: str) -> None:
    card = catalog.gpu(name)
    if card.vendor != "nvidia":
        with pytest.raises(UnsupportedError, match="Name an NVIDIA GPU"):
            DeviceSettings.of(name)
        return
    made = DeviceSettings.of(name, gpus=2)
    assert (made.memory_bytes, made.capability) == (card.capacity_bytes, card.compute_capability)
    assert 0 < made.context_bytes == card.context().bytes and made.context_source == card.context().source
    text = made.environment(Path("libraries"), {})[VARIABLE]
    assert f"memory_bytes={card.capacity_bytes}" in text.split(";") and "count=2" in text.split(";")
