"""Convert dataclasses to JSON and back by their annotations. Unknown and missing keys are errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from brim.core.files import regular
from brim.errors import FormatError

T = TypeVar("T")


class Document:
    """Base of dataclasses that are stored as JSON documents with kind and format version."""

    _VERSION: ClassVar[int]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with kind and format version."""
        return to_json(self, self._VERSION)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Read what ``to_json`` returned. Raises FormatError if kind, version or any key differs."""
        return from_json(cls, document, cls._VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file. Raises FormatError for anything else, a missing file included."""
        return read(cls, path, cls._VERSION)


def to_json(value: Any, version: int) -> dict[str, Any]:
    """Return a dataclass as plain JSON values, with its kind and format version."""
    return {"kind": type(value).__name__, "version": version, **encode(value)}


def from_json(kind: type[T], document: Any, version: int) -> T:
    """Read what ``to_json`` returned. Raises FormatError if kind, version or any key differs."""
    if not isinstance(document, Mapping):
        raise FormatError(f"Cannot read a {kind.__name__}.", f"Found {type(document).__name__}.")
    body = dict(document)
    kind_and_version = (body.pop("kind", None), body.pop("version", None))
    if kind_and_version != (kind.__name__, version):
        raise FormatError(
            f"Cannot read a {kind.__name__} of format version {version}.",
            f"Found kind {kind_and_version[0]!r}, version {kind_and_version[1]!r}.",
            "Make the file again with this version of brim.",
        )
    return typing.cast(T, decode(kind, body, kind.__name__))


def read(kind: type[T], path: str | Path, version: int) -> T:
    """Read a JSON file. Raises FormatError for anything else, a missing file included."""
    try:
        document = json.loads(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"Cannot read {path} as a {kind.__name__}.", f"{error}.") from error
    return from_json(kind, document, version)


def encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the annotated type ``kind``; ``where`` is the path that an error names."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        kinds = [a for a in arguments if a is not type(None)]
        return decode(next((a for a in kinds if type(value) is a), kinds[0]), value, where)
    if origin is typing.Literal:
        _expect(value in arguments, value, f"one of {list(arguments)}", where)
        return value
    if origin is tuple:
        _expect(isinstance(value, list), value, "a list", where)
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping), value, "an object", where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            _expect(False, value, f"one of {[member.value for member in kind]}", where)
    if kind is Any:
        return value
    if kind is float:
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), value, "a number", where)
        try:
            return float(value)
        except OverflowError:
            _expect(False, value, "a number below 1.8e308", where)
    _expect(type(value) is kind, value, f"{kind.__name__}", where)
    return value


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    _expect(isinstance(value, Mapping), value, "an object", where)
    hints = _hints(kind)
    unknown, missing = sorted(value.keys() - hints), sorted(hints.keys() - value)
    if unknown or missing:
        parts = [f"unknown keys {unknown}"] * bool(unknown) + [f"missing keys {missing}"] * bool(missing)
        raise FormatError(f"Cannot read {where}.", f"Found {' and '.join(parts)}.")
    fields = {name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    for name, item in fields.items():
        if name == "bytes" or name.endswith(_AMOUNTS):
            _check_amount(item, f"{where}.{name}")
    return kind(**fields)


_AMOUNTS = ("_bytes", "_s")  # endings of names whose numbers cannot be negative


def _check_amount(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_amount(item, f"{where}.{key}")
    elif isinstance(value, (int, float)):
        _expect(0 <= value < math.inf, value, "a number from 0 on", where)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _expect(holds: bool, value: Any, expected: str, where: str) -> None:
    if not holds:
        raise FormatError(f"{where} must be {expected}.", f"Found {str(value)[:80]!r}.")
