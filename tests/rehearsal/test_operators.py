"""A trace counts what PyTorch's CUDA kernels take besides their results, as its CUDA build asks for it.

``python bench/operators.py`` goes through samples of all operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import brim
from brim.estimation.simulation import lives
from support.cuda_operators import CASES

if TYPE_CHECKING:
    from conftest import OnDevice

PROGRAM = """
    import gc, sys, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, {folder!r})
    import torch
    from support.cuda_operators import CASES
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
"""


@pytest.fixture(scope="module")
def taken(on_device: OnDevice) -> dict[str, int]:
    found: dict[str, int] = on_device.run(PROGRAM.format(folder=str(Path(__file__).parents[1])))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_cuda_build_asks_for(taken: dict[str, int], name: str) -> None:
    made = brim.trace(CASES[name], steps=1, target="cuda", capability=(9, 0))
    held = peak = 0
    for storage, born, _ in lives(made):
        if (storage.born if born else storage.died or 0) >= made.step_starts[0]:
            held += -(-storage.bytes // 512) * 512 * (1 if born else -1)
            peak = max(peak, held)
    assert peak == taken[name]
