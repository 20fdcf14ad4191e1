"""The cuDNN version of a build of PyTorch, which decides its attention kernels."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path


def cudnn_version(site_packages: Path) -> int | None:
    """Return the cuDNN that torch in ``site_packages`` requires, as cudnnGetVersion counts (9.20.0: 92000)."""
    for metadata in site_packages.glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^Requires-Dist: nvidia-cudnn-cu\d+\s*\(?==(\d+)\.(\d+)\.(\d+)", text, re.MULTILINE)
        if match:
            major, minor, patch = map(int, match.groups())
            return major * (10_000 if major >= 9 else 1_000) + minor * 100 + patch
    return None


@cache
def installed_cudnn_version(torch_version: tuple[int, int]) -> int:
    """Return the cuDNN of the installed torch; for a build without CUDA, that of its version's CUDA 13 build."""
    spec = importlib.util.find_spec("torch")
    version = cudnn_version(Path(spec.origin).parents[1]) if spec and spec.origin else None
    if version is not None:
        return version
    return 92_400 if torch_version >= (2, 14) else 92_000  # torch 2.13.0 and 2.14.1
