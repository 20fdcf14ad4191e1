"""Tensors that files hold in another layout than the module's, converted once into the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import torch

from brim.measure.user_cache import build_once, cache_folder, fingerprint
from brim.memory.checkpoint_files import TensorSource, read_checkpoint
from brim.memory.checkpoint_writing import write_safetensors
from brim.memory.checksums import read_manifest, write_manifest
from brim.models.file_tensor import FileTensor
from brim.version import __version__


def convert_tensors(
    directory: Path, tensors: dict[str, FileTensor]
) -> tuple[dict[str, TensorSource], dict[str, int]]:
    """Convert ``tensors`` of the checkpoint in ``directory``; return their new sources and checksums.

    They are read, converted and written one at a time. Raises TransferError if a disk fails.
    """
    files = sorted({Path(e.path) for t in tensors.values() for origin in t.origins for e in origin.extents})
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    key = fingerprint(files, __version__, torch.__version__, transformers_version(), sorted(map(str, layout)))

    def fill(folder: Path) -> None:
        values = ((name, tensor.materialize()) for name, tensor in tensors.items())
        write_manifest(folder, write_safetensors(folder / "model.safetensors", layout, values))

    folder = build_once(cache_folder() / "converted" / f"{directory.resolve().name}-{key}", fill)
    return read_checkpoint(folder), read_manifest(folder) or {}


def transformers_version() -> str:
    """The version of transformers, which decides the tensors' layout."""
    import transformers

    return transformers.__version__
