"""A program that fails for what this machine lacks is told what to do."""

from __future__ import annotations

import pytest

from brim.rehearsal.remedies import remedy


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("TritonMissing: Cannot find a working triton installation. Either the package is", "--compiler"),
        ("ModuleNotFoundError: No module named 'triton.language'", "--compiler"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable", "gcc or clang"),
        ("RuntimeError: Cannot find ptxas", "TRITON_PTXAS_PATH"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "nvcc"),
        (
            "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the "
            "package flash_attn seems to be not installed.",
            'attn_implementation="sdpa"',
        ),
        (
            "RuntimeError: Configured CUDA binary not found at /x/bitsandbytes/libbitsandbytes_cuda130.so",
            "BNB_CUDA_VERSION",
        ),
        ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", "CUDA_HOME"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", "CUDA toolkit"),
        ("RuntimeError: operator torchvision::nms does not exist", "built for CPUs"),
        (
            "ModuleNotFoundError: No module named 'wandb.sdk'",
            "Install the package of wandb for",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(message: str, says: str) -> None:
    assert says in remedy(message)


@pytest.mark.parametrize("message", ["ValueError: x must be positive", "it ended with exit code 3", ""])
def test_errors_of_the_program_itself_have_no_remedy(message: str) -> None:
    assert remedy(message) == ""
