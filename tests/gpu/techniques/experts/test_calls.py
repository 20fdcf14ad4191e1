"""Experts in slots of a CUDA device."""

from __future__ import annotations

import pytest
import torch

from brim import device
from brim.errors import UnsupportedError
from brim.techniques.experts.calls import _on_device
from brim.techniques.experts.technique import CACHE_DISK, CACHE_RAM
from support.cached_experts import fit
from support.families import inputs, make

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


def test_the_host_does_not_wait_for_experts_on_their_way() -> None:
    """A copy out of pageable memory would wait for all that is in its stream."""
    try:
        rehearsed = device.loaded()
    except UnsupportedError:
        pytest.skip("only the rehearsal device counts such copies")
    table, where = torch.arange(6), torch.device("cuda", 0)
    before = rehearsed.pageable_copies()
    sent = _on_device(table, where)
    assert rehearsed.pageable_copies() == before
    assert sent.device == where and torch.equal(sent.cpu(), table)
