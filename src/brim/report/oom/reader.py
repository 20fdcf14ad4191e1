"""A reader of out-of-memory messages: kind, device, every number in bytes, the true cause, and advice."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any, BinaryIO

from brim.errors import FormatError
from brim.report.oom import log as oom_log
from brim.report.oom.advice import advise
from brim.report.oom.cause import UNSET_BYTES, Cause, find_cause
from brim.report.oom.formats import (
    FORMATS,
    PROCESS,
    SEVERAL_LINES,
    SIZE,
    SIZE_PATTERN,
    Format,
    device_of,
    named_by_words,
    tensor_bytes,
    to_bytes,
    unknown_of,
)
from brim.report.oom.programs import SHARES, program_of, server_in
from brim.report.phase import Advice, phase_of

__all__ = ["Advice", "Cause", "OomMessage", "primary", "read_oom"]

_LONGEST = 4_000  # characters of a message
_LONGEST_TABLE = 16_000  # with XLA's table of buffers
_XLA_BUFFER = re.compile(rf"\bBuffer ([0-9]{{1,3}}): *Size: {SIZE}")
_WEAK = ("killed", "other")  # any other message says more
_MAY_BE_UNKNOWN = re.compile(r"(?<!\w)(?:N/A|n/a|\[?Not Supported|[Uu]nknown|[Nn]a[Nn]|inf|-1)(?!\w)")
_MOST_REPEATED = 16  # of a number in a message, by other processes or later states
_LONGEST_OTHER = 600  # characters of a message of no known kind
_WORDS_BEFORE, _WORDS_AFTER = 60, 30  # characters shown around a size without a name
MOST_SIZES = 8  # without a name
_LAST_LINES = 40  # of a window without a message
_MOST_DIGITS = 20  # longer numbers are no byte counts
MOST_MESSAGES = 1_000  # of a log
MOST_SEEN = 10_000  # distinct texts whose repetitions are skipped unread
_SETTINGS = re.compile(
    r"(?<!try setting )\bPYTORCH_(?:CUDA_|HIP_|NPU_)?ALLOC_CONF['\"]?\]? ?[=:,] ?['\"]?(\w+:[\w:,.\[\]>-]+)"
)


@dataclass(frozen=True, kw_only=True)
class OomMessage:
    """A message. ``numbers_bytes`` has its numbers by name (``tried``, ``total``, ``free``, ``allocated``,
    ``reserved``, ``unallocated``, ``process``, ``process_<pid>``, ...). ``why`` is a sentence about the cause.

    ``unknown`` names numbers that the program printed without knowing them; ``not_read`` are further sizes of the
    message, each with the words around it. ``program`` is the one that ran out and ``phase`` its activity, if the log
    shows them.
    """

    family: str
    device: str
    numbers_bytes: Mapping[str, int]
    cause: Cause
    why: str
    advice: tuple[Advice, ...]
    text: str
    rank: str = ""  # its writer, if known
    unknown: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    program: str = ""
    phase: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_oom(source: str | BinaryIO) -> tuple[OomMessage, ...]:
    """Read all out-of-memory messages of a text, or of a log of any size open for reading bytes, in order.

    Messages may be wrapped, cut, coloured, prefixed, chained, or of several ranks at once. Repetitions by the same
    rank are dropped, as are messages after the first 1,000. Raises FormatError without any.
    """
    reader = _Reader()
    for window in oom_log.of_text(source) if isinstance(source, str) else oom_log.windows(source):
        reader.window(window)
    if not reader.messages:
        sizes = "".join(f"\n  {size}" for size in list(reader.sizes)[:MOST_SIZES])
        raise FormatError(
            "Cannot read an out-of-memory message.",
            f"It has none of the {len({form.family for form in FORMATS})} known forms."
            + (f" Sizes in lines about memory:{sizes}" if sizes else ""),
            "Give the whole message, starting with the name of the exception.",
        )
    return tuple(reader.messages.values())


class _Reader:
    """Collects messages, and the allocator settings and the program in the log."""

    def __init__(self) -> None:
        self.messages: dict[tuple[Any, ...], OomMessage] = {}
        self.seen: set[int] = set()  # hashes of messages: a log may repeat one a million times
        self.settings = ""
        self.shares: dict[str, str] = {}  # of the device, in the log's words
        self.server = ""
        self.sizes: dict[str, None] = {}  # sizes outside messages, with the words around them

    def window(self, window: oom_log.Window) -> None:
        text = window.text
        if match := _SETTINGS.search(text):
            self.settings = match[1]
        if len(self.messages) >= MOST_MESSAGES:
            return
        self.shares |= {match[1].lower(): match[0] for match in SHARES.finditer(text)}
        self.server = server_in(text) or server_in(window.rank) or self.server
        places = _places(text, window.starts)
        lines = list(oom_log.frames_of(window)) if places else []
        if not places:
            self.remember_sizes(window)
        for (start, form), (end, _) in pairwise([*places, (len(text), None)]):
            assert form is not None, "only the end of the text has none"
            longest = _LONGEST_TABLE if form.family == "jax" else _LONGEST
            frames = [line for at, line in reversed(lines) if at <= start][: oom_log.FRAME_LINES]
            self.take(text[start : min(end, start + longest)], form, window.rank, [*frames, *window.frames])

    def remember_sizes(self, window: oom_log.Window) -> None:
        """Remember the first size of each of the last lines, for a log without a message."""
        for end, start in islice(pairwise([len(window.text), *reversed(window.starts)]), _LAST_LINES):
            line = window.text[start : min(end, start + _LONGEST_OTHER)].rstrip()
            self.sizes |= dict.fromkeys(_around(line, islice(SIZE_PATTERN.finditer(line), 1)))
        self.sizes = dict.fromkeys(list(self.sizes)[-MOST_SIZES:])

    def take(self, text: str, form: Format, rank: str, frames: list[str]) -> None:
        mark = hash((text, form.family, rank, self.settings))
        if mark in self.seen or len(self.messages) >= MOST_MESSAGES:
            return
        if len(self.seen) < MOST_SEEN:
            self.seen.add(mark)
        message = self.read(text, form, rank, frames)
        key = (message.rank, message.family, message.device, *message.numbers_bytes.items())
        self.messages.setdefault(key, message)

    def read(self, text: str, form: Format, rank: str, frames: list[str]) -> OomMessage:
        numbers, unknown, not_read = _numbers(text, form)
        device = device_of(text, form)
        cause, why = find_cause(form.family, numbers, " ".join([text, *frames]), device)
        program = program_of(form.family, frames, f"{rank} {text}", self.server)
        phase = phase_of(frames) if form.family.startswith("torch-") else None
        settings = " ".join([self.settings, *self.shares.values()])
        advice = advise(form.family, cause, numbers, text, settings, program=program, frames=frames, device=device)
        return OomMessage(
            family=form.family,
            device=device,
            numbers_bytes=numbers,
            cause=cause,
            why=why,
            advice=advice,
            text=text,
            rank=rank,
            unknown=unknown,
            not_read=not_read,
            program=program,
            phase=phase or "",
        )


def primary(messages: tuple[OomMessage, ...]) -> OomMessage:
    """Return the message to explain: the first with most numbers. Later ones are usually its consequences."""
    return max(messages, key=lambda message: (message.family not in _WEAK, len(message.numbers_bytes)))


def _places(flat: str, starts: Sequence[int]) -> list[tuple[int, Format]]:
    """Return position and format of each message; a match inside another's is none.

    ``starts`` are the positions at which lines of the log begin.
    """
    matches: list[tuple[int, int, Format]] = []  # start, end; sorted and disjoint
    for form in FORMATS:
        if not any(word in flat for word in form.words):
            continue
        for match in form.start.finditer(flat):
            if form.own_line and not _is_line(match, flat, starts):
                continue
            at = bisect_left(matches, match.start(), key=itemgetter(0))
            free_before = at == 0 or matches[at - 1][1] <= match.start()
            if free_before and (at == len(matches) or match.end() <= matches[at][0]):
                matches.insert(at, (match.start(), match.end(), form))
    places: list[tuple[int, Format]] = []
    special = [start for start, _, form in matches if not form.general]
    memories: set[bool] = set()  # of special messages so far: on the host
    last = -_LONGEST_OTHER
    for start, _, form in matches:
        on_host = form.device == "cpu"
        if form.general:
            at = bisect_left(special, start)
            near = [last, *special[max(at - 1, 0) : at + 1]]
            is_known = on_host in memories or (form.family == "other" and memories)
            if is_known or any(abs(start - other) < _LONGEST_OTHER for other in near):
                continue
        else:
            memories.add(on_host)
        last = start
        if not places or form.family not in SEVERAL_LINES or places[-1][1].family != form.family:
            places.append((start, form))
    return places


def _is_line(match: re.Match[str], flat: str, starts: Sequence[int]) -> bool:
    at = bisect_left(starts, match.start())
    begins = at < len(starts) and starts[at] == match.start()
    return begins and (match.end() == len(flat) or (at + 1 < len(starts) and starts[at + 1] == match.end() + 1))


def _numbers(text: str, form: Format) -> tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]:
    """Return numbers by name, names of unknown numbers, and sizes without a name."""
    numbers: dict[str, int] = {}
    unknown: dict[str, None] = {}
    read: set[int] = set()  # positions of the digits of named numbers
    for name, pattern in form.fields:
        match = pattern.search(text)
        if match and len(match[1]) <= _MOST_DIGITS:
            read |= {again.start(1) for again in islice(pattern.finditer(text), _MOST_REPEATED)}
            numbers[name] = to_bytes(match[1], match[2])
        elif match is None and _MAY_BE_UNKNOWN.search(text) and unknown_of(pattern).search(text):
            unknown[name] = None
    for name, pattern in form.plain:
        if (match := pattern.search(text)) and len(match[1]) <= _MOST_DIGITS:
            read.add(match.start(1))
            count = int(match[1].replace(",", ""))
            numbers[name.removesuffix("_kib")] = count * 1024 if name.endswith("_kib") else count
    for match in PROCESS.finditer(text):
        read.add(match.start(2))
        numbers[f"process_{match[1]}"] = to_bytes(match[2], match[3])
    if form.family == "jax":
        for match in _XLA_BUFFER.finditer(text):
            read.add(match.start(2))
            numbers[f"buffer_{match[1]}"] = to_bytes(match[2], match[3])
    if form.family == "other":
        for match in SIZE_PATTERN.finditer(text[:_LONGEST_OTHER]):
            if len(match[1]) <= _MOST_DIGITS:
                read.add(match.start(1))
                numbers.setdefault(
                    named_by_words(text, match.start(), match.end(), numbers), to_bytes(*match.groups())
                )
    tensor_size = tensor_bytes(text) if form.family == "tensorflow" else None
    if tensor_size is not None and tensor_size < 10**_MOST_DIGITS:
        numbers.setdefault("tried", tensor_size)
    # A driver's "not available" is printed as 2^64; a device of 0 bytes has an unknown size.
    absent = [name for name, count in numbers.items() if count >= UNSET_BYTES and not name.startswith("tried")]
    if numbers.get("process") == 0 and numbers.get("allocated"):
        absent.append("process")  # in a container, whose processes have other numbers
    if numbers.get("total") == 0:
        absent += [name for name in ("total", "free") if numbers.get(name) == 0]
    for name in absent:
        unknown[name] = None
        del numbers[name]
    others = (match for match in SIZE_PATTERN.finditer(text) if match.start(1) not in read)
    return numbers, tuple(unknown), tuple(dict.fromkeys(_around(text, others)))


def _around(text: str, matches: Iterable[re.Match[str]]) -> list[str]:
    """Return sizes with the words around them, at most ``MOST_SIZES``."""
    around: list[str] = []
    for match in matches:
        if len(around) >= MOST_SIZES:
            break
        if len(match[2]) > 1 and len(match[1]) <= _MOST_DIGITS and 0 < to_bytes(*match.groups()) < UNSET_BYTES:
            before = text[max(0, match.start() - _WORDS_BEFORE) : match.start()]
            after = text[match.end() : match.end() + _WORDS_AFTER]
            start = before.find(" ") + 1 if match.start() > _WORDS_BEFORE else 0
            if len(after) == _WORDS_AFTER and " " in after:  # no half of a word
                after = after.rpartition(" ")[0]
            around.append(f"{before[start:]}{match[0]}{after}".strip())
    return around
