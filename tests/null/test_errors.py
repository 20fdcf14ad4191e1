"""What counts as memory that ran out, by the words of those that say it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from brim.errors import is_out_of_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",  # cudaHostAlloc as well
    ],
)
def test_libraries_that_allocate_by_themselves(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


def _broken() -> tuple[int, int]:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("used", "free", "expected"),
    [
        (True, lambda: (3 << 20, 80 * GIB), True),
        (True, lambda: (2 * GIB, 80 * GIB), False),
        (True, _broken, False),
        (False, lambda: (3 << 20, 80 * GIB), False),
    ],
    ids=["full", "room", "broken", "unused"],
)
@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_a_handle_that_was_not_made_is_memory_s_fault_on_a_full_gpu_alone(
    library: str, used: bool, free: Callable[[], tuple[int, int]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    error = RuntimeError(f"CUDA error: {library}_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert is_out_of_memory(error) is expected
