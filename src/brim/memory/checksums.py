"""Detect damaged weights by a 64-bit checksum per tensor, computed at the speed of RAM.

safetensors has no checksums, so brim writes a manifest beside its checkpoints. In a hub cache, each blob is named by
its SHA-256 instead.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

from brim.core.files import regular
from brim.errors import ModelError

MANIFEST_NAME = "brim.manifest.json"
_VERSION = 1
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 15  # 256 KiB: the chunk and its factors stay in the L2 cache
_MASK = (1 << 64) - 1


def checksum(data: torch.Tensor) -> int:
    """Return the checksum of a contiguous one-dimensional uint8 tensor."""
    running = Checksum()
    running.update(data)
    return running.value()


class Checksum:
    """A running 64-bit checksum; the division into updates does not change it.

    Each chunk of 8-byte words is summed modulo 2**64 with odd factors that depend on the position, and the sums are
    hashed. An odd factor loses no bit, so any single flipped bit changes its chunk's sum.
    """

    def __init__(self) -> None:
        self._bytes = self._position = self._sum = 0
        self._sums: list[int] = []
        self._tail = b""

    def update(self, data: torch.Tensor) -> None:
        """Add the bytes of a contiguous one-dimensional uint8 tensor."""
        assert data.dtype == torch.uint8 and data.dim() == 1, "bytes, please"
        self._bytes += data.numel()
        if self._tail:
            missing = min(_WORD_BYTES - len(self._tail), data.numel())
            self._tail += bytes(data[:missing].tolist())
            data = data[missing:]
            if len(self._tail) == _WORD_BYTES:
                self._add(torch.frombuffer(bytearray(self._tail), dtype=torch.int64))
                self._tail = b""
        if data.numel():
            end = data.numel() // _WORD_BYTES * _WORD_BYTES
            self._tail = bytes(data[end:].tolist())
            aligned = data[:end].clone() if data.data_ptr() % _WORD_BYTES else data[:end]
            self._add(aligned.view(torch.int64))

    def _add(self, words: torch.Tensor) -> None:
        factors, at = _factors(), 0
        while at < words.numel():
            part = words[at : at + _CHUNK_WORDS - self._position]
            self._sum += int(torch.dot(part, factors[self._position : self._position + part.numel()]))
            self._position += part.numel()
            at += part.numel()
            if self._position == _CHUNK_WORDS:
                self._sums.append(self._sum)
                self._position = self._sum = 0

    def value(self) -> int:
        """Return the checksum of all bytes so far."""
        sums = [*self._sums, self._sum] if self._position else self._sums
        digest = hashlib.blake2b(self._bytes.to_bytes(8, "little"), digest_size=8)
        digest.update(self._tail)
        digest.update(b"".join((total & _MASK).to_bytes(8, "little") for total in sums))
        return int.from_bytes(digest.digest(), "little")


def manifest_text(checksums: dict[str, int]) -> str:
    content = {"version": _VERSION, "checksums": {name: f"{value:016x}" for name, value in checksums.items()}}
    return json.dumps(content, indent=0) + "\n"


def write_manifest(directory: str | Path, checksums: dict[str, int]) -> None:
    """Write the checksums of a checkpoint's tensors, by name, into its folder."""
    (Path(directory) / MANIFEST_NAME).write_text(manifest_text(checksums))


def read_manifest(directory: str | Path) -> dict[str, int] | None:
    """Return the checksums by tensor name, None without a manifest. Raises ModelError if it is damaged."""
    path = Path(directory) / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(regular(path).read_bytes())
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}, and this brim knows {_VERSION}")
        return {str(name): int(value, 16) for name, value in content["checksums"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"Cannot read {path}.", f"It is damaged: {error!r:.200}.", "Delete the folder: brim writes it again."
        ) from error


def verify_hub_blob(path: str | Path) -> bool:
    """Compare a file of a hub cache with the SHA-256 in its name.

    Returns False for a file outside a hub cache. Raises ModelError if they differ.
    """
    blob = Path(path).resolve()
    if blob.parent.name != "blobs" or len(blob.name) != 64:
        return False
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        raise ModelError(
            f"{path} does not match its SHA-256, {blob.name}.",
            f"Its SHA-256 is {digest}: the file is damaged.",
            f"Delete {blob} and fetch it again.",
        )
    return True


@cache
def _factors() -> torch.Tensor:
    """Return odd 64-bit factors: the splitmix64 finalizer of the position (Steele, Lea, Flood 2014)."""
    mixed = torch.arange(1, _CHUNK_WORDS + 1) * _signed(0x9E3779B97F4A7C15)  # int64 wraps around: modulo 2**64
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right with zeros; int64's own shift copies the sign."""
    return words >> by & (1 << 64 - by) - 1
