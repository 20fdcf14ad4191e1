"""Check the stored dtypes: weights are streamed as they are stored."""

from __future__ import annotations

from pathlib import Path

import torch

from brim.errors import ModelError
from brim.models.file_tensor import FileTensor


def check_dtypes(directory: Path, tensors: dict[str, FileTensor], main: torch.dtype) -> None:
    """Raise ModelError where stored and required dtypes differ by more than transformers' usual exceptions.

    ``main`` is the dtype the model is built in. Exceptions that are converted: a few tensors stored wider than
    ``main`` (float32 norms of a bfloat16 model), and those that the model itself keeps in another dtype.
    """
    casts = {
        name: (stored, tensor.dtype)
        for name, tensor in tensors.items()
        for stored in {origin.dtype for origin in tensor.origins}
        if stored != tensor.dtype
    }
    for name, (stored, wanted) in casts.items():
        if not _may_cast(stored, wanted, main):
            raise ModelError(
                f"{directory}: the model needs {name} in {_word(wanted)}.",
                f"It is stored in {_word(stored)}.",
                "The checkpoint does not match the dtype in its config.json: fetch it again or save it anew.",
            )
    cast_bytes = sum(origin.bytes for name in casts for origin in tensors[name].origins)
    all_bytes = sum(origin.bytes for tensor in tensors.values() for origin in tensor.origins)
    if 2 * cast_bytes > all_bytes:
        name, (stored, wanted) = max(casts.items(), key=lambda item: tensors[item[0]].numel())
        raise ModelError(
            f"Cannot open {directory} in {_word(main)}.",
            f"Most of its weights, such as {name}, are stored in {_word(stored)}.",
            f"Weights are streamed as they are stored: ask for {_word(stored)}, or save the model in {_word(wanted)} "
            "first (from_pretrained(DIR, dtype=...).save_pretrained(NEW_DIR)).",
        )


def _may_cast(stored: torch.dtype, wanted: torch.dtype, main: torch.dtype) -> bool:
    if not stored.is_floating_point or not wanted.is_floating_point:
        return not stored.is_floating_point and not wanted.is_floating_point
    if stored.itemsize < 2 or wanted.itemsize < 2:
        return False  # eight bits are a quantization: they need their scales
    return wanted != main or torch.promote_types(stored, wanted) == stored


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
