"""Write safetensors with one tensor in memory at a time, aligned for unbuffered reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from brim.errors import TransferError
from brim.memory.checkpoint_files import DTYPES, LENGTH_BYTES, Extent, TensorSource
from brim.memory.checksums import checksum
from brim.memory.direct_io import write_all

DATA_ALIGNMENT_BYTES = 4096  # O_DIRECT reads begin on a page
TENSOR_ALIGNMENT_BYTES = 64

CODES = {dtype: code for code, dtype in DTYPES.items()}

Layout = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's name, dtype and shape


def write_safetensors(
    path: str | Path,
    layout: Sequence[Layout],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, str] | None = None,
) -> dict[str, int]:
    """Write ``tensors``, in any order, to a safetensors file with the given ``layout``.

    The file gets its name when it is complete and on the disk; on any error, Ctrl-C included, it is deleted. The
    header is padded with spaces so that the data begins at a multiple of 4096 bytes. Tensors of a multiple of 64
    bytes come first, so that each is aligned.

    Returns each tensor's checksum. Raises TransferError if the disk fails.
    """
    path = Path(path)
    header, sources = plan_safetensors(path, layout, metadata or {})
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            file.write(header)
            checksums = {name: _write_tensor(file.fileno(), sources[name], tensor) for name, tensor in tensors}
            assert checksums.keys() == sources.keys(), f"missing tensors: {sources.keys() - checksums.keys()}"
            file.truncate(len(header) + sum(source.bytes for source in sources.values()))
            os.fsync(file.fileno())
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TransferError(
            f"Cannot write {path}.", f"{error.strerror}.", "Free some disk space or choose another folder."
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return checksums


def plan_safetensors(
    path: Path, layout: Sequence[Layout], metadata: dict[str, str]
) -> tuple[bytes, dict[str, TensorSource]]:
    """Return the file's header and the location of each tensor, in the order of their bytes."""
    blank = [TensorSource(name=n, dtype=d, shape=tuple(s), extents=()) for n, d, s in layout]
    # Gaps are forbidden, so alignment follows from the order: multiples of 64 bytes first, then by item size.
    blank.sort(key=lambda s: (s.bytes % TENSOR_ALIGNMENT_BYTES != 0, -s.dtype.itemsize if s.bytes % 64 else 0))
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for source in blank:
        entries[source.name] = {
            "dtype": CODES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.bytes],
        }
        offset += source.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded_bytes = -(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT_BYTES + len(text)
    header = padded_bytes.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded_bytes, b" ")
    sources, start = {}, len(header)
    for source in blank:
        extent = Extent(path=str(path), offset=start, bytes=source.bytes)
        sources[source.name] = TensorSource(
            name=source.name, dtype=source.dtype, shape=source.shape, extents=(extent,)
        )
        start += source.bytes
    return header, sources


def _write_tensor(descriptor: int, source: TensorSource, tensor: torch.Tensor) -> int:
    assert (tensor.dtype, tuple(tensor.shape)) == (source.dtype, source.shape), f"{source.name}: not as in layout"
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    write_all(descriptor, memoryview(flat.numpy().data), source.extents[0].offset)
    return checksum(flat)


def sync_path(path: Path) -> None:
    """Flush a file to the disk, or a folder after a rename in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
