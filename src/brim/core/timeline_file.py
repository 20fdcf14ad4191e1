"""A Timeline's JSON, read into columns some numbers at a time: it takes what they take, and not the text too."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from brim.core.json_stream import JsonStream
from brim.errors import FormatError


def read(source: Path | BinaryIO, asked: str, codes: Mapping[str, str]) -> dict[str, Any]:
    """The object in a file, with what is in its "columns" as arrays; ``codes`` are their type codes by name.

    ``asked``: what the errors say was asked. Raises FormatError for what is no JSON, or no column of numbers.
    """
    stream = JsonStream(source, asked)
    try:
        document: dict[str, Any] = {}
        for key in stream.fields():
            if key == "columns":
                document[key] = {name: column(name, stream.numbers(), codes) for name in stream.fields()}
            elif key == "texts" and stream.peek() == "[":
                document[key] = list(stream.elements())
            else:
                document[key] = stream.value()
        if stream.peek():
            raise stream.refuse("Something follows its end.")
        return document
    finally:
        stream.close()


def column(name: str, pieces: Iterable[list[Any]], codes: Mapping[str, str]) -> array[Any]:
    """An array of numbers that come in pieces. Of a column without a code nothing is kept."""
    values: array[Any] = array(codes.get(name, "b"))
    allowed_types = {int, float} if values.typecode == "d" else {int}
    for piece in pieces:
        if name not in codes:
            continue
        if not allowed_types.issuperset(map(type, piece)):
            odd = next(value for value in piece if type(value) not in allowed_types)
            raise FormatError(f"Cannot read the Timeline column {name!r}.", f"Found {str(odd)[:80]!r}.")
        try:
            values.extend(piece)
        except OverflowError as error:
            raise FormatError(f"Cannot read the Timeline column {name!r}.", f"{error}.") from error
    return values
