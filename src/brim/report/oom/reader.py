"""Reads out-of-memory messages: what kind, which device, every number in bytes, the true cause, and what helps."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, BinaryIO

from brim.errors import FormatError
from brim.report.oom import log as oom_log
from brim.report.oom.advice import Advice, advise
from brim.report.oom.cause import Cause, find_cause
from brim.report.oom.formats import (
    FORMATS,
    PROCESS,
    SIZE,
    Format,
    device_of,
    tensor_bytes,
    to_bytes,
)

__all__ = ["Advice", "Cause", "OomMessage", "primary", "read_oom"]

_LONGEST = 4_000  # characters that one message may take
_LONGEST_TABLE = 16_000  # with XLA's table of what the program holds
_XLA_BUFFER = re.compile(rf"\bBuffer ([0-9]{{1,3}}): *Size: {SIZE}")
_SEVERAL_LINES = ("llama.cpp", "jax")  # they report one failure in several messages
_MOST_DIGITS = 20  # longer numbers cannot be byte counts, and are ignored
MOST_MESSAGES = 1_000  # of a log; what follows is left out
MOST_SEEN = 10_000  # different texts whose repetition is recognised before it is read
_SETTINGS = re.compile(
    r"(?<!try setting )\bPYTORCH_(?:CUDA_|HIP_|NPU_)?ALLOC_CONF['\"]?\]? ?[=:,] ?['\"]?(\w+:[\w:,.\[\]>-]+)"
)


@dataclass(frozen=True, kw_only=True)
class OomMessage:
    """One message. ``numbers_bytes`` is keyed by what a number is (``tried``, ``total``, ``free``, ``allocated``,
    ``reserved``, ``unallocated``, ``process``, ``process_<pid>``, ...). ``why`` tells the cause in a sentence."""

    family: str
    device: str
    numbers_bytes: Mapping[str, int]
    cause: Cause
    why: str
    advice: tuple[Advice, ...]
    text: str
    rank: str = ""  # who wrote it, where a log says

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_oom(source: str | BinaryIO) -> tuple[OomMessage, ...]:
    """Every out-of-memory message in a text, or in a log of any size that is open for reading bytes, in order.

    Messages may be wrapped, cut, coloured, prefixed, chained, or of several ranks at once. What repeats another of
    the same rank is left out, as is what comes after the first 1,000. Raises FormatError if there is none.
    """
    reader = _Reader()
    for window in oom_log.of_text(source) if isinstance(source, str) else oom_log.windows(source):
        reader.window(window)
    if not reader.found:
        raise FormatError(
            "Cannot read an out-of-memory message.",
            f"It is none of the {len({form.family for form in FORMATS})} known kinds.",
            "Give the whole message, starting with the name of the exception.",
        )
    return tuple(reader.found.values())


class _Reader:
    """Collects messages; remembers the allocator settings that the log shows."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], OomMessage] = {}
        self.seen: set[int] = set()  # hashes of the messages that were read: a log may repeat one a million times
        self.settings = ""

    def window(self, window: oom_log.Window) -> None:
        text = window.text
        if match := _SETTINGS.search(text):
            self.settings = match[1]
        if len(self.found) >= MOST_MESSAGES:
            return
        places = _places(text)
        for (start, form), (end, _) in pairwise([*places, (len(text), None)]):
            assert form is not None, "only the end of the text has none"
            longest = _LONGEST_TABLE if form.family == "jax" else _LONGEST
            self.take(text[start : min(end, start + longest)], form, window.rank)

    def take(self, text: str, form: Format, rank: str) -> None:
        mark = hash((text, form.family, rank, self.settings))
        if mark in self.seen or len(self.found) >= MOST_MESSAGES:
            return
        if len(self.seen) < MOST_SEEN:
            self.seen.add(mark)
        message = self.read(text, form, rank)
        key = (message.rank, message.family, message.device, *message.numbers_bytes.items())
        self.found.setdefault(key, message)

    def read(self, text: str, form: Format, rank: str) -> OomMessage:
        numbers = _numbers(text, form)
        cause, why = find_cause(form.family, numbers, text)
        return OomMessage(
            family=form.family,
            device=device_of(text, form.device),
            numbers_bytes=numbers,
            cause=cause,
            why=why,
            advice=advise(form.family, cause, numbers, text, self.settings),
            text=text,
            rank=rank,
        )


def primary(messages: tuple[OomMessage, ...]) -> OomMessage:
    """The message to explain: the first of those that say most. What follows it is usually its consequence."""
    return max(messages, key=lambda message: len(message.numbers_bytes))


def _places(flat: str) -> list[tuple[int, Format]]:
    """Where messages start, and of which kind. What lies inside another's start is not one of its own."""
    found_places: list[tuple[int, int, Format]] = []  # start, end; in order, apart from each other
    for form in FORMATS:
        if not any(word in flat for word in form.words):
            continue
        for match in form.start.finditer(flat):
            at = bisect_left(found_places, match.start(), key=itemgetter(0))
            free_before = at == 0 or found_places[at - 1][1] <= match.start()
            if free_before and (at == len(found_places) or match.end() <= found_places[at][0]):
                found_places.insert(at, (match.start(), match.end(), form))
    places: list[tuple[int, Format]] = []
    for start, _, form in found_places:
        if not places or form.family not in _SEVERAL_LINES or places[-1][1].family != form.family:
            places.append((start, form))
    return places


def _numbers(text: str, form: Format) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name, pattern in form.fields:
        if (match := pattern.search(text)) and len(match[1]) <= _MOST_DIGITS:
            numbers[name] = to_bytes(match[1], match[2])
    for name, pattern in form.plain:
        if (match := pattern.search(text)) and len(match[1]) <= _MOST_DIGITS:
            numbers[name] = int(match[1])
    for match in PROCESS.finditer(text):
        numbers[f"process_{match[1]}"] = to_bytes(match[2], match[3])
    if form.family == "jax":
        for match in _XLA_BUFFER.finditer(text):
            numbers[f"buffer_{match[1]}"] = to_bytes(match[2], match[3])
    tensor_size = tensor_bytes(text) if form.family == "tensorflow" else None
    if tensor_size is not None and tensor_size < 10**_MOST_DIGITS:
        numbers.setdefault("tried", tensor_size)
    return numbers
