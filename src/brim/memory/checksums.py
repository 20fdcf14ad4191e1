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

from brim.core.files import regular
from brim.errors import ModelError

MANIFEST_NAME = "brim.manifest.json"
_VERSION = 1
_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 15  # 256 KiB: the chunk and its factors stay in the L2 cache
_MASK = (1 << 64) - 1


def checksum(data: torch.Tensor) -> int:
    """64 bits of a contiguous one-dimensional uint8 tensor."""
    running = Checksum()
    running.update(data)
    return running.value()


class Checksum:
    """64 bits of bytes that come in pieces; how they were cut changes nothing.

    Each chunk of 8-byte words is summed with odd factors that depend on the position, modulo 2**64, and the sums
    are hashed. An odd factor never loses a bit, so any single flipped bit changes its chunk's sum.
    """

    def __init__(self) -> None:
        self._bytes = self._position = self._sum = 0
        self._sums: list[int] = []
        self._tail = b""

    def update(self, data: torch.Tensor) -> None:
        """Go on with the bytes of a contiguous one-dimensional uint8 tensor."""
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
            whole = data.numel() // _WORD_BYTES * _WORD_BYTES
            self._tail = bytes(data[whole:].tolist())
            aligned = data[:whole].clone() if data.data_ptr() % _WORD_BYTES else data[:whole]
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
        """The checksum of everything until now."""
        sums = [*self._sums, self._sum] if self._position else self._sums
        digest = hashlib.blake2b(self._bytes.to_bytes(8, "little"), digest_size=8)
        digest.update(self._tail)
        digest.update(b"".join((total & _MASK).to_bytes(8, "little") for total in sums))
        return int.from_bytes(digest.digest(), "little")


def manifest_text(checksums: dict[str, int]) -> str:
    """What ``write_manifest`` writes."""
    content = {"version": _VERSION, "checksums": {name: f"{value:016x}" for name, value in checksums.items()}}
    return json.dumps(content, indent=0) + "\n"


def write_manifest(directory: str | Path, checksums: dict[str, int]) -> None:
    """Record the checksums of a checkpoint's tensors, by tensor name, beside it."""
    (Path(directory) / MANIFEST_NAME).write_text(manifest_text(checksums))


def read_manifest(directory: str | Path) -> dict[str, int] | None:
    """The checksums by tensor name, or None where there is no manifest. Raises ModelError when it is damaged."""
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
    """Compare a file of a hub cache with its name, which is its SHA-256; reads the whole file.

    Returns False where the name says nothing (not in a hub cache). Raises ModelError when they differ.
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
    """Odd 64-bit factors, the splitmix64 finalizer of the position (Steele, Lea, Flood 2014)."""
    mixed = torch.arange(1, _CHUNK_WORDS + 1) * _signed(0x9E3779B97F4A7C15)  # int64 wraps around: modulo 2**64
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros coming in: int64's own shift brings its sign in."""
    return words >> by & (1 << 64 - by) - 1
