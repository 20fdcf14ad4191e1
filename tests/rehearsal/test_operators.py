"""A trace counts what PyTorch's CUDA kernels take besides their results, as its CUDA build asks for it.

``python bench/operators.py`` goes through samples of all operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import brim
from brim.estimation.simulation import lives
from support.cuda_operators import CASES, REFUSED

if TYPE_CHECKING:
    from conftest import OnDevice

PROGRAM = """
    import gc, sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {folder!r})
    import torch
    from support.cuda_operators import CASES, MADE_ONE, REFUSED
    result = {{}}
    for name, build in CASES.items():
        torch._C._cuda_clearCublasWorkspaces()  # each as in a process of its own
        torch.cuda.empty_cache()  # new memory is zeros: whether a factorization failed is read from it
        step = build()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        result[name] = torch.cuda.max_memory_allocated() - before
        step = None
        gc.collect()
    result["refused"] = []
    for name, call in REFUSED.items():
        try:
            call()
        except RuntimeError:
            result["refused"].append(name)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for call in MADE_ONE.values():
            call()
"""


@pytest.fixture(scope="module")
def taken(on_device: OnDevice) -> dict[str, Any]:
    found: dict[str, Any] = on_device.run(PROGRAM.format(folder=str(Path(__file__).parents[1])))
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_cuda_build_asks_for(taken: dict[str, Any], name: str) -> None:
    made = brim.trace(CASES[name], steps=1, target="cuda", capability=(9, 0))
    held = peak = 0
    for storage, born, _ in lives(made):
        if (storage.born if born else storage.died or 0) >= made.step_starts[0]:
            held += -(-storage.bytes // 512) * 512 * (1 if born else -1)
            peak = max(peak, held)
    assert peak == taken[name]


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_a_trace_refuses_are_refused_by_the_cuda_build(taken: dict[str, Any], name: str) -> None:
    assert name in taken["refused"]
