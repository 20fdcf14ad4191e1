"""Reads out-of-memory messages: what kind, which device, every number in bytes, the true cause, and what helps."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from brim.errors import FormatError
from brim.report.oom_advice import Advice, advise
from brim.report.oom_cause import Cause, find_cause
from brim.report.oom_formats import FORMATS, PROCESS, Format, device_of, to_bytes

__all__ = ["Advice", "Cause", "OomMessage", "read_oom"]

_LONGEST = 4_000  # characters that one message may take
_SEVERAL_LINES = ("llama.cpp", "jax")  # one failure is told in several messages
_NOISE = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]|^\[rank[0-9]+\]: ?|^\([^()\n]{1,40} pid=[0-9]+[^()\n]{0,60}\) ?", re.MULTILINE
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_oom(text: str) -> tuple[OomMessage, ...]:
    """Every out-of-memory message in ``text``, which may be a whole log, wrapped or cut, in order.

    Raises FormatError if there is none.
    """
    flat = re.sub(r"\s+", " ", _NOISE.sub("", text))
    places = _places(flat)
    if not places:
        raise FormatError(
            "An out-of-memory message was to be read.",
            f"None of {len({form.family for form in FORMATS})} known kinds is in the {len(text)} characters given.",
            "Give the whole message, from the exception's name on.",
        )
    ends = [start for start, _ in places[1:]] + [len(flat)]
    found: list[OomMessage] = []
    for (start, form), end in zip(places, ends, strict=True):
        message = _read(flat[start : min(end, start + _LONGEST)], form)
        if not found or (message.family, message.numbers_bytes) != (found[-1].family, found[-1].numbers_bytes):
            found.append(message)  # a traceback often prints its message twice
    return tuple(found)


def primary(messages: tuple[OomMessage, ...]) -> OomMessage:
    """The message to explain: the first of those that say most. What follows it is usually its consequence."""
    return max(messages, key=lambda message: len(message.numbers_bytes))


def _places(flat: str) -> list[tuple[int, Format]]:
    """Where messages start, and of which kind. What lies inside another's start is not one of its own."""
    taken: list[tuple[int, int, Format]] = []  # start, end; in order, apart from each other
    for form in FORMATS:
        for match in form.start.finditer(flat):
            at = bisect_left(taken, match.start(), key=itemgetter(0))
            free_before = at == 0 or taken[at - 1][1] <= match.start()
            if free_before and (at == len(taken) or match.end() <= taken[at][0]):
                taken.insert(at, (match.start(), match.end(), form))
    places: list[tuple[int, Format]] = []
    for start, _, form in taken:
        if not places or form.family not in _SEVERAL_LINES or places[-1][1].family != form.family:
            places.append((start, form))
    return places


def _read(text: str, form: Format) -> OomMessage:
    numbers: dict[str, int] = {}
    for name, pattern in form.fields:
        if match := pattern.search(text):
            numbers[name] = to_bytes(match[1], match[2])
    for name, pattern in form.plain:
        if match := pattern.search(text):
            numbers[name] = int(match[1])
    for match in PROCESS.finditer(text):
        numbers[f"process_{match[1]}"] = to_bytes(match[2], match[3])
    device = device_of(text, form.device)
    cause, why = find_cause(form.family, numbers)
    return OomMessage(
        family=form.family,
        device=device,
        numbers_bytes=numbers,
        cause=cause,
        why=why,
        advice=advise(form.family, cause, numbers, text),
        text=text,
    )
