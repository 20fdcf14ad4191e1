"""Remedies for rehearsed programs that fail because something is missing on this machine."""

from __future__ import annotations

import re

_REMEDIES = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (
            r"TritonMissing|working triton installation|No module named 'triton",
            "torch.compile and the program's own kernels need Triton: rehearse with --compiler, which fetches it "
            "(190 MB).",
        ),
        (
            r"Failed to find C compiler",
            "Triton compiles its launchers here: install gcc or clang, or name a C compiler in CC.",
        ),
        (
            r"Cannot find ptxas|ptxas.*not found",
            "Triton's package brings ptxas: install Triton anew, or name one in TRITON_PTXAS_PATH.",
        ),
        (
            r"flash_attn|FlashAttention\d? has been toggled on",
            "flash-attn is compiled for a CUDA build of PyTorch: install it with nvcc of the same CUDA version (pip "
            'install flash-attn --no-build-isolation), or rehearse with attn_implementation="sdpa".',
        ),
        (
            r"libbitsandbytes|bitsandbytes.*(CUDA|cuda)|CUDA Setup failed despite",
            "bitsandbytes has no library for the CUDA version of this PyTorch: install a release that has one, or "
            "name the version of one that it has in BNB_CUDA_VERSION.",
        ),
        (
            r"CUDA_HOME environment variable is not set|nvcc\S* .*not found|No such file or directory: '\S*nvcc'",
            "The program compiles code for CUDA: install the CUDA toolkit (nvcc) of this PyTorch's version and name "
            "its folder in CUDA_HOME.",
        ),
        (
            r"operator torchvision::\w+ does not exist|'torchvision::\w+' with arguments from the 'CUDA' backend",
            "The torchvision that is installed is built for CPUs: install its CUDA build of the same version, or "
            "rehearse a part of the program that does not use its operators.",
        ),
    )
)
_MODULE = re.compile(r"No module named '([\w.]+)'")


def remedy(message: str) -> str:
    """The remedy for a program's error ``message``; "" if the machine is not known to cause it."""
    for pattern, known in _REMEDIES:
        if pattern.search(message):
            return known
    missing = _MODULE.search(message)
    return f"Install the package of {missing[1].partition('.')[0]} for the Python that rehearses." if missing else ""
