"""A step that empties the cache gives its free segments back in the simulation."""

from __future__ import annotations

import torch

import brim


def _peak_reserved(*, empties: bool) -> float:
    def build():  # type: ignore[no-untyped-def]
        sizes = iter([30 << 20, 60 << 20])

        def step() -> None:
            if empties:
                torch.cuda.empty_cache()
            torch.empty(next(sizes), dtype=torch.uint8, device="cuda")

        return step

    return brim.simulate(brim.trace(build, steps=2)).peak_bytes.reserved


def test_a_larger_tensor_after_empty_cache_does_not_stand_beside_the_old_segment() -> None:
    assert _peak_reserved(empties=False) == 90 << 20
    assert _peak_reserved(empties=True) == 60 << 20
