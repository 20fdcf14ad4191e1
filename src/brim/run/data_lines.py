"""A JSONL file of training data: checked once from beginning to end, then read line by line as it is needed."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brim.errors import UsageError
from brim.units import MIB

MESSAGES, TEXT = "messages", "text"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_LINE_BYTES = 64 * MIB  # a line is held in memory
_BOM = b"\xef\xbb\xbf"
_FORM = 'Each line is {"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}.'


class Lines:
    """The lines of a JSONL file that are not blank. Held in memory: where each begins, 16 bytes a line.

    ``kind`` is MESSAGES or TEXT, as the first line has it; ``digest`` is of the content.
    Raises UsageError with file and line number for the first line that is not of the form.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = ""
        self._offsets, self._numbers = array("q"), array("q")
        digest = hashlib.blake2b(digest_size=16)
        offset = 0
        for number, raw in enumerate(_read_lines(path), start=1):
            digest.update(raw)
            if raw.strip() and raw != _BOM:
                row = _parse(raw, self._where(number))
                self.kind = self.kind or _kind(row, self._where(number))
                _check(row, self.kind, self._where(number))
                self._offsets.append(offset)
                self._numbers.append(number)
            offset += len(raw)
        self.digest = digest.hexdigest()
        if not self._offsets:
            raise UsageError(f"{path} was given as training data.", "It is empty.", _FORM)

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        """The line as an error names it."""
        return self._where(self._numbers[index])

    def _where(self, number: int) -> str:
        return f"{self.path}, line {number}"

    def row(self, index: int) -> dict[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            row = _parse(file.readline(_MAX_LINE_BYTES), self.where(index))
        _check(row, self.kind, self.where(index))  # someone may have changed the file
        return row


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            number = 0
            while raw := file.readline(_MAX_LINE_BYTES):
                number += 1
                if len(raw) == _MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    raise UsageError(
                        f"{path}, line {number} was to be read.",
                        f"It is longer than {_MAX_LINE_BYTES // MIB} MiB.",
                        "Split it: a line is one example.",
                    )
                yield raw
    except OSError as error:
        raise UsageError(f"{path} was given as training data.", f"{error.strerror}.") from error


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _refused(where, f"Byte {error.start + 1} of the line is not UTF-8.", "Convert the file.") from error
    except (ValueError, RecursionError) as error:
        raise _refused(where, f"It is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise _refused(where, f"It is not a JSON object but {type(row).__name__}.")
    return row


def _kind(row: dict[str, Any], where: str) -> str:
    if MESSAGES in row or TEXT in row:
        return MESSAGES if MESSAGES in row else TEXT
    raise _refused(where, f"It has neither messages nor text; its keys are {', '.join(map(repr, row)) or 'none'}.")


def _check(row: dict[str, Any], kind: str, where: str) -> None:
    if kind not in row:
        raise _refused(where, f"It has no {kind}, as the lines before it do.")
    if kind == TEXT:
        _check_text(row[TEXT], "text", where)
        return
    messages = row[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise _refused(where, "messages is not a list with one message at least.")
    for index, message in enumerate(messages, start=1):
        _check_message(message, f"message {index}", where)
    if not any(message["role"] == "assistant" for message in messages):
        raise _refused(where, "No message is the assistant's, so there is no answer to learn.")


def _check_message(message: Any, name: str, where: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refused(where, f"{name} is not an object with role and content.")
    if message["role"] not in ROLES:
        raise _refused(where, f"{name} has the role {message['role']!r}; known: {', '.join(ROLES)}.")
    if message.get("content") is None and message["role"] == "assistant" and message.get("tool_calls"):
        return
    may_be_empty = message["role"] != "assistant"
    _check_text(message.get("content"), f"the content of {name}", where, may_be_empty=may_be_empty)


def _check_text(text: Any, name: str, where: str, *, may_be_empty: bool = False) -> None:
    if not isinstance(text, str):
        raise _refused(where, f"{name} is not a string but {type(text).__name__}.")
    if not may_be_empty and not text.strip():
        raise _refused(where, f"{name} is empty.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(where, f"{name} has half of a surrogate pair, which is no character.") from error


def _refused(where: str, found: str, todo: str = _FORM) -> UsageError:
    return UsageError(f"{where} was to be read as training data.", found, todo)
