"""Counts in a GGUF header are checked against the file: a library would count to them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from brim.errors import ModelError, UnsupportedError
from brim.models.gguf import check_header


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
        header([array(8, 1, text(b"x" * 2000))]),
        header([text(b"k" * 70_000) + struct.pack("<I", 0) + b"1"]),
        *(header(GOOD, [WEIGHT])[:cut] for cut in range(4, len(header(GOOD, [WEIGHT])), 9)),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError):
        check_header(tmp_path / "a.gguf")


def number(key: bytes, kind: int, code: str, value: int) -> bytes:
    return text(key) + struct.pack(f"<I{code}", kind, value)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (number(b"llama.block_count", 4, "I", (1 << 32) - 1), "block_count is 4294967295, and it has 1 tensors"),
        (number(b"llama.block_count", 5, "i", -1), "block_count is -1"),
        (number(b"llama.block_count", 10, "Q", 1 << 63), "block_count is 9223372036854775808"),
        (
            number(b"llama.expert_count", 4, "I", 5),
            "expert_count is 5, and the largest dimension .* is 4",
        ),
        (number(b"llama.embedding_length", 4, "I", 1 << 31), "embedding_length is 2147483648"),
        (number(b"llama.feed_forward_length", 4, "I", 5), "feed_forward_length is 5"),
        (number(b"llama.attention.head_count", 11, "q", -2), "head_count is -2"),
        (number(b"llama.vocab_size", 4, "I", 5), "vocab_size is 5"),
    ],
)
def test_a_size_that_no_tensor_has_is_refused_before_a_library_counts_to_it(
    tmp_path: Path, entry: bytes, says: str
) -> None:
    (tmp_path / "a.gguf").write_bytes(header([entry], [WEIGHT]))
    with pytest.raises(ModelError, match=says):
        check_header(tmp_path / "a.gguf")


def test_a_part_of_a_model_is_refused_with_the_tool_that_joins_parts(tmp_path: Path) -> None:
    path = tmp_path / "a-00001-of-00003.gguf"
    path.write_bytes(header([number(b"split.count", 2, "H", 3), number(b"llama.block_count", 4, "I", 9)], [WEIGHT]))
    with pytest.raises(UnsupportedError, match=r"one of 3 files[\s\S]*llama-gguf-split --merge"):
        check_header(path)


def test_sizes_that_tensors_have_pass(tmp_path: Path) -> None:
    entries = [number(b"llama.block_count", 4, "I", 1), number(b"llama.embedding_length", 10, "Q", 4)]
    (tmp_path / "a.gguf").write_bytes(header(entries, [WEIGHT]))
    check_header(tmp_path / "a.gguf")
