"""Counts in a GGUF header are checked against the file: a library would count to them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from brim.errors import ModelError
from brim.run.model.gguf_header import check_header


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(
    entries: list[bytes], tensors: Sequence[bytes] = (), *, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    found = (len(tensors), len(entries)) if counts is None else counts
    return b"GGUF" + struct.pack("<IQQ", version, *found) + b"".join(entries) + b"".join(tensors)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return text(b"key") + struct.pack("<IIQ", 9, kind, count) + values


WEIGHT = text(b"weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
GOOD = [
    text(b"a") + struct.pack("<If", 6, 1.0),
    text(b"b") + struct.pack("<I", 8) + text(b"word"),
    array(8, 2, text(b"x") + text(b"")),
    array(5, 3, bytes(12)),
    array(9, 1, struct.pack("<IQ", 4, 2) + bytes(8)),
]


def test_a_good_header_passes(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(GOOD, [WEIGHT]))
    check_header(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUX" + bytes(40),
        header([], version=1),
        header([], counts=(0, 1 << 60)),
        header([], counts=(1 << 60, 0)),
        header([array(8, 1 << 60)]),
        header([array(0, 1 << 60)]),
        header([array(4, (1 << 22) + 1, bytes(4 * ((1 << 22) + 1)))]),
        header([array(99, 4, bytes(64))]),
        header([text(b"a") + struct.pack("<I", 99)]),
        header([text(b"a") + struct.pack("<IQ", 8, 1 << 62)]),
        header([text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20 + bytes(64)]),
        header([], [text(b"w") + struct.pack("<I", 1 << 31)]),
        *(header(GOOD, [WEIGHT])[:cut] for cut in range(4, len(header(GOOD, [WEIGHT])), 9)),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError):
        check_header(tmp_path / "a.gguf")
