"""Check the header of a GGUF file before a library reads it: its counts become loops there.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from brim.core.files import regular
from brim.errors import ModelError

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by its type
_STRING, _ARRAY = 8, 9
_LEAST_ENTRY_BYTES = 8 + 4 + 1  # a key's length, a type, a value
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # a name's length, dimensions, type, offset
_MOST_KEY_BYTES = (1 << 16) - 1  # as the format says
_MOST_DEPTH, _MOST_DIMENSIONS = 4, 8
_MOST_VALUES = 1 << 22  # in all arrays: a library needs microseconds for each, and vocabularies have a tenth as many
_MOST_TOKEN_BYTES = 1 << 10  # of a text in an array: a library tries every division of a token in two
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}  # of whole numbers, by their type
# Ends of keys for sizes that must not exceed the largest dimension of the tensors.
_DIMENSIONS = (".embedding_length", ".feed_forward_length", ".head_count", ".expert_count", ".vocab_size")


def check_header(path: Path) -> None:
    """Raise ModelError if a count or length in the header of ``path`` exceeds the file."""
    try:
        with regular(path).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ValueError(f"It begins with {magic!r}, not with {_MAGIC!r}")
            _Header(file, size_bytes).check()
    except OSError as error:
        raise ModelError(f"Cannot read {path} as GGUF.", f"{error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise ModelError(f"Cannot read {path} as GGUF.", f"{error}.", "Fetch the file again.") from error


class _Header:
    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._size = file, size_bytes
        self._order, self._values = "<", 0

    def check(self) -> None:
        version = self._number("I")
        if version & 0xFFFF == 0:  # as written by a machine of the other byte order
            self._order, version = ">", version >> 24
        if version < 2:
            raise ValueError(f"It is of version {version} of the format; versions from 2 on are read")
        tensors, entries = self._number("Q"), self._number("Q")
        self._has_room(entries, _LEAST_ENTRY_BYTES, "entries of metadata")
        self._has_room(tensors, _LEAST_TENSOR_BYTES, "tensors")
        sizes, largest = dict[str, int](), 0
        for _ in range(entries):
            key, kind = self._text(self._number("Q")), self._number("I")
            if kind in _FORMATS:
                sizes[key] = self._number(_FORMATS[kind])
            else:
                self._value(kind, 0)
        for _ in range(tensors):
            self._skip(self._number("Q"))
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"A tensor has {dimensions} dimensions")
            largest = max([largest, *(self._number("Q") for _ in range(dimensions))])
            self._skip(4 + 8)
        for key, size in sizes.items():
            if key.endswith(".block_count") and not 0 <= size <= tensors:
                raise ValueError(f"Its {key} is {size}, and it has {tensors} tensors")
            if key.endswith(_DIMENSIONS) and not 0 <= size <= largest:
                raise ValueError(f"Its {key} is {size}, and the largest dimension of its tensors is {largest}")

    def _value(self, kind: int, depth: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY and depth < _MOST_DEPTH:
            inner, count = self._number("I"), self._number("Q")
            self._has_room(count, _SIZES.get(inner, 8), "values")
            self._values += count
            if self._values > _MOST_VALUES:
                raise ValueError(f"Its arrays have {self._values} values; at most {_MOST_VALUES} are read")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
                return
            for _ in range(count):
                if inner == _STRING:
                    self._skip(self._length(_MOST_TOKEN_BYTES))
                else:
                    self._value(inner, depth + 1)
        else:
            raise ValueError(f"A value is of the unknown type {kind}, or arrays are nested too deep")

    def _length(self, most: int) -> int:
        length = self._number("Q")
        if length > most:
            raise ValueError(f"A text in an array has {length} bytes; at most {most} are read")
        return length

    def _text(self, length: int) -> str:
        self._has_room(length, 1, "bytes")
        if length > _MOST_KEY_BYTES:
            raise ValueError(f"A key has {length} bytes; at most {_MOST_KEY_BYTES} are allowed")
        return self._file.read(length).decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        size = struct.calcsize(code)
        raw = self._file.read(size)
        if len(raw) < size:
            raise ValueError("It is cut short: its header is not complete")
        return int(struct.unpack(self._order + code, raw)[0])

    def _skip(self, count: int) -> None:
        self._has_room(count, 1, "bytes")
        self._file.seek(count, os.SEEK_CUR)

    def _has_room(self, count: int, each_bytes: int, what: str) -> None:
        left = self._size - self._file.tell()
        if count * each_bytes > left:
            raise ValueError(f"Its header announces {count} {what}, and only {left} bytes follow")


__all__ = ["check_header"]
