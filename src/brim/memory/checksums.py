"""Know a damaged weight when it is read: one 64-bit checksum per tensor, at the speed of RAM.

safetensors has no checksums, so a checkpoint that brim writes carries a manifest beside it. One that was fetched
from a hub has none, but there each blob is named by its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

from brim.errors import ModelError

MANIFEST_NAME = "brim.manifest.json"
_VERSION = 1
_CHUNK_WORDS = 1 << 15  # 256 KiB: the chunk and its factors stay in the L2 cache


def checksum(data: torch.Tensor) -> int:
    """64 bits of a contiguous one-dimensional uint8 tensor.

    Each chunk of 8-byte words is summed with odd factors that depend on the position, modulo 2**64, and the sums
    are hashed. An odd factor never loses a bit, so any single flipped bit changes its chunk's sum.
    """
    assert data.dtype == torch.uint8 and data.dim() == 1, "bytes, please"
    if data.data_ptr() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words, tail = data[:whole].view(torch.int64), data[whole:]
    factors = _factors()
    chunks = [words[start : start + _CHUNK_WORDS] for start in range(0, words.numel(), _CHUNK_WORDS)]
    sums = [torch.dot(chunk, factors[: chunk.numel()]) for chunk in chunks]
    digest = hashlib.blake2b(data.numel().to_bytes(8, "little"), digest_size=8)
    digest.update(bytes(tail.tolist()))
    if sums:
        digest.update(torch.stack(sums).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def write_manifest(directory: str | Path, checksums: dict[str, int]) -> None:
    """Record the checksums of a checkpoint's tensors, by tensor name, beside it."""
    content = {"version": _VERSION, "checksums": {name: f"{value:016x}" for name, value in checksums.items()}}
    (Path(directory) / MANIFEST_NAME).write_text(json.dumps(content, indent=0) + "\n")


def read_manifest(directory: str | Path) -> dict[str, int] | None:
    """The checksums by tensor name, or None where there is no manifest. Raises ModelError when it is damaged."""
    path = Path(directory) / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}, and this brim knows {_VERSION}")
        return {str(name): int(value, 16) for name, value in content["checksums"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} was to be read.", f"It is damaged: {error!r:.200}.", "Delete the folder: brim writes it anew."
        ) from error


def verify_hub_blob(path: str | Path) -> bool:
    """Compare a file of a hub cache with its name, which is its SHA-256; reads the whole file.

    Returns False where the name says nothing (not in a hub cache). Raises ModelError when they differ.
    """
    blob = Path(path).resolve()
    if blob.parent.name != "blobs" or len(blob.name) != 64:
        return False
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.name:
        raise ModelError(
            f"{path} was compared with its SHA-256, {blob.name}.",
            f"Its bytes give {found}: the file is damaged.",
            f"Delete {blob} and fetch it again.",
        )
    return True


@cache
def _factors() -> torch.Tensor:
    """Odd 64-bit factors, the splitmix64 finalizer of the position (Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    values = []
    for position in range(1, _CHUNK_WORDS + 1):
        mixed = position * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed = (mixed ^ mixed >> 31) | 1
        values.append(mixed - (1 << 64) if mixed >> 63 else mixed)
    return torch.tensor(values, dtype=torch.int64)
