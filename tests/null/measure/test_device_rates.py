"""What is measured of an accelerator, where it matters in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from brim.measure import device_rates


@pytest.mark.parametrize(
    ("rates", "measured"),
    [([1, 1, 4, 8, 8, 9], 5), ([2**n for n in range(40)], 15)],
    ids=["the clock rises after a while", "it rises on and on"],
)
def test_products_go_on_until_the_clock_is_high(
    rates: list[float], measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a second each: not before 0.3 s, nor longer than 1.5."""
    left, now = iter(rates), [0.0]

    def rate(*_: object) -> float:
        now[0] += 0.1
        return next(left)

    monkeypatch.setattr(device_rates, "_rate", rate)
    monkeypatch.setattr(device_rates, "_product", lambda *_: None)
    monkeypatch.setattr(device_rates, "time", SimpleNamespace(monotonic=lambda: now[0]))
    device_rates.warm_clocks(SimpleNamespace())  # type: ignore[arg-type]
    assert len(rates) - len(list(left)) == measured


@pytest.mark.parametrize(("hip", "measured"), [(None, True), ("6.4", False)], ids=["CUDA", "ROCm"])
def test_float8_is_multiplied_where_its_contract_is_cudas(
    hip: str | None, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gfx1100 says (11, 0), a gfx942 (9, 4): no capabilities of NVIDIA's."""
    monkeypatch.setattr(device_rates, "_rate", lambda *_: 1.0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    rates = device_rates.matrix_rates(SimpleNamespace(type="cuda", device="cuda"))  # type: ignore[arg-type]
    assert ("float8_e4m3fn" in rates) == measured and {"float32", "tf32", "bfloat16"} <= set(rates)
