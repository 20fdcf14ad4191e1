"""Experts in slots of a CUDA device."""

from __future__ import annotations

import pytest
import torch

from brim.errors import UnsupportedError
from brim.rehearsal import device
from brim.techniques.experts.technique import CACHE_DISK, CACHE_RAM
from cached_experts import fit
from families import inputs, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("kernels", ["eager", "batched_mm"])
@pytest.mark.parametrize("choice", [CACHE_RAM, CACHE_DISK])
@torch.no_grad()
def test_logits_are_those_with_all_experts_there(choice: str, kernels: str) -> None:
    model, given = make("mixtral", num_hidden_layers=3), {k: v.cuda() for k, v in inputs("mixtral").items()}
    twin = make("mixtral", num_hidden_layers=3).cuda()
    for one in (model, twin):
        one.set_experts_implementation(kernels)
    expected = twin(**given).logits
    handle = fit(model, "cuda", choice, 2)
    for _ in range(3):
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-5, atol=1e-5)
    assert handle.timeline().facts["expert_loads"] > 0
    handle.remove()


@torch.no_grad()
def test_the_host_does_not_wait_for_experts_on_their_way() -> None:
    """A copy from or to pageable memory makes it wait: one a layer, which says what the router chose."""
    try:
        rehearsed = device.loaded()
    except UnsupportedError:
        pytest.skip("only the rehearsal device counts such copies")
    given, layers = {k: v.cuda() for k, v in inputs("mixtral").items()}, 3
    counts = []
    for slots in (0, 6):
        model = make("mixtral", num_hidden_layers=layers)
        model.set_experts_implementation("batched_mm")
        handle = fit(model, "cuda", CACHE_RAM, slots) if slots else None
        model = model if slots else model.cuda()
        model(**given)
        before = rehearsed.pageable_copies()
        model(**given)
        counts.append(rehearsed.pageable_copies() - before)
        if handle is not None:
            handle.remove()
    assert counts[1] - counts[0] == layers
