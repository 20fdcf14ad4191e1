"""Examples in a JSONL or JSON file: all checked when the file is opened, then read one at a time."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brim.core.files import regular
from brim.errors import UsageError
from brim.units import MIB

MESSAGES, TEXT = "messages", "text"
FORMS = (
    'Each example is {"messages": [{"role": "user", "content": "..."}, ...]}, {"text": "..."}, '
    '{"instruction": "...", "input": "...", "output": "..."} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}.'
)
_INSTRUCTION, _CONVERSATIONS = "instruction", "conversations"
# Speaker, as ShareGPT's exports and their descendants write it -> role of chat templates.
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool",
}  # fmt: skip


def as_messages(row: dict[str, Any], refuse: Callable[[str], Exception]) -> dict[str, Any]:
    """``row`` with another known form converted to ``messages``; rows with ``messages`` or ``text``, and rows of an
    unknown form, are returned unchanged. Raises ``refuse(problem)``."""
    if MESSAGES in row or isinstance(row.get(TEXT), str):
        return row
    if _CONVERSATIONS in row:
        return {MESSAGES: _of_conversation(row[_CONVERSATIONS], refuse)}
    return {MESSAGES: _of_instruction(row, refuse)} if _INSTRUCTION in row else row


def _of_instruction(row: dict[str, Any], refuse: Callable[[str], Exception]) -> list[dict[str, Any]]:
    """Alpaca: an instruction, optionally its input, and the answer."""
    texts = {name: row.get(name) or "" for name in ("system", _INSTRUCTION, "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise refuse(f"{name} is not a string but {type(text).__name__}.")
    if not texts["output"].strip():
        raise refuse("It has an instruction but no output.")
    question = "\n\n".join(text for text in (texts[_INSTRUCTION], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]


def _of_conversation(turns: Any, refuse: Callable[[str], Exception]) -> list[dict[str, Any]]:
    """ShareGPT: ``from`` and ``value``; some exports have ``role`` and ``content`` here too."""
    if not isinstance(turns, list) or not turns:
        raise refuse("conversations is not a list of one or more messages.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise refuse(f"message {number} is not an object with from and value.")
        speaker = turn.get("from", turn.get("role"))
        role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise refuse(f"message {number} is from {speaker!r}; known: {', '.join(_SPEAKERS)}.")
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return messages


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_LINE_BYTES = 16 * MIB  # a line and its tokens are in memory
_BOM = b"\xef\xbb\xbf"
_READ_BYTES = 1 << 20
# A string (complete, or cut off at the end of the bytes), or a bracket or comma that changes or ends a level. The
# quantifiers are possessive: otherwise the matcher stores a position to backtrack to for every character.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{},]', re.DOTALL)


class Lines:
    """Index of a JSONL file's lines that are not blank, or of the elements of a ``.json`` file that is a list (one
    with an object in each line is read as JSONL). It takes 24 bytes of memory a line.

    ``kind`` is MESSAGES or TEXT, as in the first line; ``digest`` is of the content. Other forms (``rows``) become
    MESSAGES. Raises UsageError with file and line number for the first line of another form.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kind = ""
        self._offsets, self._sizes, self._numbers = array("q"), array("q"), array("q")
        self._counted = "line"
        digest = hashlib.blake2b(digest_size=16)
        pieces = _read_lines(path)
        if path.suffix.lower() == ".json" and _is_list(path):
            self._counted, pieces = "element", _read_elements(path)
        for number, (offset, raw) in enumerate(pieces, start=1):
            digest.update(raw)
            if raw.strip() and raw != _BOM:
                row = _parse(raw, self._where(number))
                self.kind = self.kind or _kind(row, self._where(number))
                _check(row, self.kind, self._where(number))
                for values, value in ((self._offsets, offset), (self._sizes, len(raw)), (self._numbers, number)):
                    values.append(value)
        self.digest = digest.hexdigest()
        if not self._offsets:
            raise UsageError(f"{path} was given as training data.", "It is empty.", FORMS)

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        """The line's name in errors."""
        return self._where(self._numbers[index])

    def _where(self, number: int) -> str:
        return f"{self.path}, {self._counted} {number}"

    def row(self, index: int) -> dict[str, Any]:
        with open(self.path, "rb") as file:
            file.seek(self._offsets[index])
            row = _parse(file.read(self._sizes[index]), self.where(index))
        _check(row, self.kind, self.where(index))  # the file may have changed since it was opened
        return row


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each line."""
    try:
        with regular(path).open("rb") as file:
            number, offset = 0, 0
            while raw := file.readline(_MAX_LINE_BYTES):
                number += 1
                if len(raw) == _MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    raise _too_long(f"{path}, line {number}")
                yield offset, raw
                offset += len(raw)
    except OSError as error:
        raise UsageError(f"{path} was given as training data.", f"{error.strerror}.") from error


def _is_list(path: Path) -> bool:
    """True for a ``.json`` file that is a single list; one with an object in each line is JSONL."""
    try:
        with regular(path).open("rb") as file:
            while (raw := file.read(_READ_BYTES)) and not raw.strip(_BOM + b" \t\r\n"):
                pass
    except OSError as error:
        raise UsageError(f"{path} was given as training data.", f"{error.strerror}.") from error
    return raw.lstrip(_BOM + b" \t\r\n").startswith(b"[")


def _read_elements(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each element of a JSON list, not parsed yet."""
    buffer, base, at, depth, begin = b"", 0, 0, 0, 0
    number, ended = 0, False
    try:
        with regular(path).open("rb") as file:
            while True:
                match = _TOKEN.search(buffer, at)
                if match is None or (match[0].startswith(b'"') and match.end() == len(buffer) and not ended):
                    if ended:
                        break
                    at = len(buffer) if match is None else match.start()
                    base, buffer, at, begin = base + begin, buffer[begin:], at - begin, 0
                    if len(buffer) > _MAX_LINE_BYTES:
                        raise _too_long(f"{path}, element {number + 1}")
                    more = file.read(_READ_BYTES)
                    buffer, ended = buffer + more, not more
                    continue
                at, token = match.end(), match[0]
                depth += (token in b"[{") - (token in b"]}") if len(token) == 1 else 0
                if token == b"[" and depth == 1:
                    begin = at
                elif (token == b"," and depth == 1) or (token == b"]" and depth == 0):
                    raw = buffer[begin : match.start()]
                    number += 1
                    if raw.strip() or token == b"," or number > 1:
                        yield base + begin, raw if raw.strip() else b"?"
                    begin = at
                    if depth == 0:
                        break
            if depth or (buffer[at:] + file.read(_READ_BYTES)).strip():
                raise _refused(f"{path}, after element {number}", "The list does not end, or something follows it.")
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
    return as_messages(row, lambda problem: _refused(where, problem))


def _kind(row: dict[str, Any], where: str) -> str:
    if MESSAGES in row or TEXT in row:
        return MESSAGES if MESSAGES in row else TEXT
    keys = ", ".join(map(repr, row)) or "none"
    raise _refused(where, f"It has neither messages, text, instruction nor conversations; its keys are {keys}.")


def _check(row: dict[str, Any], kind: str, where: str) -> None:
    if kind not in row:
        raise _refused(where, f"It has no {kind}, as the lines before it do.")
    if kind == TEXT:
        _check_text(row[TEXT], "text", where)
        return
    messages = row[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise _refused(where, "messages is not a list of one or more messages.")
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
        raise _refused(where, f"{name} has an unpaired surrogate, which is not a character.") from error


def _too_long(where: str) -> UsageError:
    return UsageError(
        f"Cannot read {where}.", f"It is longer than {_MAX_LINE_BYTES // MIB} MiB.", "Split it into several examples."
    )


def _refused(where: str, problem: str, todo: str = FORMS) -> UsageError:
    return UsageError(f"Cannot read {where} as training data.", problem, todo)
