"""What is measured of an accelerator, where it matters in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
