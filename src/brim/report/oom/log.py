"""The pieces of a log of any size that may hold an out-of-memory message, each as a line of text.

A log is read in blocks; a block without a telling word is dropped. Lines around a telling word are collected per
rank, because several ranks write into a log at the same time. Prefixes of lines (colours, timestamps, ranks,
containers) are removed, and lines that a terminal broke are rejoined.
"""

from __future__ import annotations

import codecs
import io
import re
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import BinaryIO

from brim.report import read_table

BLOCK_BYTES = 1 << 16  # short lines make objects of thirty times as many
LONGEST_LINE = 1 << 16  # characters; the rest is dropped
LONGEST_WORD = 300  # characters at a line's end or beginning that may be a broken word
LONGEST_WINDOW = 1 << 16  # characters around telling words
LINES_BEFORE, LINES_AFTER = 3, 30  # of the same rank, around a telling word
LINES_WAITING = 256  # of all ranks together
FRAME_LINES = 120  # of a rank's last traceback; a frame has two or three
LONGEST_FRAME = 200  # characters
MOST_RANKS = 4_096

_TABLE = read_table("oom/log.toml")
_TELLING = tuple(_TABLE["telling"])
_PREFIXES = tuple(
    re.compile(text.replace("{stamp}", _TABLE["parts"]["stamp"]).replace("{level}", _TABLE["parts"]["level"]))
    for text in _TABLE["prefixes"]
)
_WORDS = frozenset(_TABLE["words"].split())
_BEGINS = "Traceback (most recent call last)"
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_END_OF_LINE = re.compile(r"\r\n|\n|\r")
_PUNCTUATION = ".,;:()[]'\"`"


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a log around telling words, as a line. ``rank`` is its writer, "" if not known.

    ``starts`` are the positions in ``text`` at which lines of the log begin. ``frames`` are the last lines of an
    earlier traceback, the innermost first.
    """

    rank: str
    text: str
    starts: tuple[int, ...] = ()
    frames: tuple[str, ...] = ()


@dataclass(slots=True)
class _Rank:
    """The last lines and frames of a rank, and the lines of its open window."""

    before: list[str] = field(default_factory=list)
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=FRAME_LINES))
    in_frame: bool = False  # the last line named a source file
    frames_at_start: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    length: int = 0
    left: int = 0  # lines until the window closes; 0: it is closed


def windows(stream: BinaryIO) -> Iterator[Window]:
    """Yield the windows of a log by their ends, with a few in memory at a time."""
    log = _Log()
    for text in _blocks(stream):
        if not log.open and not _is_telling(text.replace("\n", " ")):
            log.waiting.extend(_END_OF_LINE.split(text[-LONGEST_LINE:])[-LINES_WAITING:])
            continue
        lines = _END_OF_LINE.split(text)
        at = 0
        for hit in [*_telling_lines(lines), len(lines)]:
            while at < hit and log.open:
                yield from log.add(lines[at])
                at += 1
            if at <= hit < len(lines):
                log.waiting.extend(lines[max(at, hit - LINES_WAITING) : hit])
                yield from log.start(lines[hit])
                at = hit + 1
        log.waiting.extend(lines[max(at, len(lines) - LINES_WAITING) :])
    yield from log.end()
    text, starts = joined(line[:LONGEST_FRAME] for line in log.waiting)
    yield Window("", text, starts)  # the end of the log, for messages of no known kind


def _telling_lines(lines: list[str]) -> list[int]:
    """Return the indices of lines in which a telling word begins; it may end in the next."""
    joined_lines = " ".join(lines)
    text = joined_lines.lower()
    if len(text) != len(joined_lines):  # "İ" becomes two characters: then lines begin elsewhere
        lines = [line.lower() for line in lines]
        text = " ".join(lines)
    starts = array("q", accumulate((len(line) + 1 for line in lines), initial=0))
    indices = set()
    for word in _TELLING:
        at = text.find(word)
        while at >= 0:
            index = bisect_right(starts, at) - 1
            indices.add(index)
            at = text.find(word, starts[index + 1])
    return sorted(indices)


def of_text(text: str) -> Iterator[Window]:
    return windows(io.BytesIO(text.encode("utf-8", "replace")))


class _Log:
    """Puts lines into windows. Without an open window, lines only wait."""

    def __init__(self) -> None:
        self.ranks: dict[str, _Rank] = {}
        self.open = 0
        self.last = ""  # writer of the last line
        self.waiting: deque[str] = deque(maxlen=LINES_WAITING)

    def start(self, line: str) -> Iterator[Window]:
        """Take in a line with a telling word, after the waiting lines."""
        waiting = [*self.waiting, line]
        self.waiting.clear()
        for waiting_line in waiting:
            yield from self.add(waiting_line)

    def add(self, line: str) -> Iterator[Window]:
        """Give a line to its writer."""
        name, text = _without_prefix(line[:LONGEST_LINE])
        if not name and self.last in self.ranks and self.ranks[self.last].left:
            name = self.last  # loggers name the writer of several lines once
        if name not in self.ranks and len(self.ranks) >= MOST_RANKS:
            name = ""
        self.last = name
        rank = self.ranks.setdefault(name, _Rank())
        before = rank.before[-1] if rank.before else ""
        telling = _is_telling(text) or _is_telling(f"{before[-200:].rstrip()} {text[:200].lstrip()}")
        if telling and not rank.left:
            rank.frames_at_start = tuple(reversed(rank.frames))
            rank.lines = list(rank.before)
            rank.length = sum(map(len, rank.lines))
            self.open += 1
        if telling:
            rank.left = LINES_AFTER
        rank.before = [*rank.before[1 - LINES_BEFORE :], text]
        _remember_frame(rank, text)
        if rank.left:
            rank.lines.append(text)
            rank.length += len(text)
            rank.left -= not telling
            if not rank.left or rank.length > LONGEST_WINDOW:
                self.open -= 1
                yield _closed(rank, name)

    def end(self) -> Iterator[Window]:
        for name, rank in self.ranks.items():
            if rank.left:
                yield _closed(rank, name)


def _is_telling(text: str) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in _TELLING)


def _remember_frame(rank: _Rank, text: str) -> None:
    """Keep a line that names a source file, and the source line below it."""
    if _BEGINS in text:
        rank.frames.clear()
    is_frame = ".py" in text
    if is_frame or rank.in_frame:
        rank.frames.append(text[:LONGEST_FRAME])
    rank.in_frame = is_frame


def frames_of(window: Window) -> Iterator[tuple[int, str]]:
    """Yield lines that name a source file, and the source line below each, with their positions."""
    in_frame = False
    for start, end in pairwise([*window.starts, len(window.text)]):
        line = window.text[start : min(end, start + LONGEST_FRAME)]
        is_frame = ".py" in line
        if is_frame or in_frame:
            yield start, line.strip()
        in_frame = is_frame


def _closed(rank: _Rank, name: str) -> Window:
    lines, rank.lines, rank.length, rank.left = rank.lines, [], 0, 0
    text, starts = joined(lines)
    return Window(name, text, starts, rank.frames_at_start)


def _blocks(stream: BinaryIO) -> Iterator[str]:
    """Yield the log in pieces of complete lines. UTF-16 is recognised by its mark, or by its zero bytes.

    Zero bytes are dropped: a log that is truncated while a program writes to it begins with them.
    """
    decoder: codecs.IncrementalDecoder | None = None
    rest = ""
    while block := stream.read(BLOCK_BYTES):
        if decoder is None:
            zeros = len(block) - len(block.lstrip(b"\0"))
            if zeros == len(block):
                continue
            block = block[zeros & ~1 :]  # UTF-16 has two bytes a character
            decoder = codecs.getincrementaldecoder(_encoding(block))("replace")
        text = (rest + decoder.decode(block)).replace("\0", "")
        end = max(text.rfind("\n"), text.rfind("\r") if len(text) > LONGEST_LINE else -1)
        end = len(text) if end < 0 and len(text) > 2 * BLOCK_BYTES else end
        if end >= 0:
            yield text[:end]
        rest = text[end + 1 :]
    if rest:
        yield rest


def _encoding(block: bytes) -> str:
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if block.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    head = block[:4096]
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > len(head) // 4 > 8 * min(even, odd):  # what PowerShell writes without a mark
        return "utf-16-le" if odd > even else "utf-16-be"
    return "utf-8"


def _without_prefix(line: str) -> tuple[str, str]:
    """Return a line's writer, and the line without its prefix."""
    text = _ANSI.sub("", line)
    rank = ""
    start = 0
    for _ in range(6):
        for prefix in _PREFIXES:
            if (match := prefix.match(text, start)) and match.end() > start:
                prefix_rank = match.groupdict().get("rank") or ""
                if not prefix_rank and prefix is _PREFIXES[2]:
                    prefix_rank = match[0].strip(" []:")
                rank = rank or prefix_rank
                start = match.end()
                break
        else:
            break
    return rank, text[start:] if start else text


def joined(lines: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """Join lines with single spaces, and rejoin broken ones. Return the text and each line's beginning."""
    parts: list[str] = []
    starts: list[int] = []
    length, left = 0, ""
    for line in lines:
        if not (words := " ".join(line.split())):
            left = ""
            continue
        if left and _is_broken(left, line):
            left = (left + line)[-LONGEST_WORD:]
        else:
            if parts:
                parts.append(" ")
                length += 1
            starts.append(length)
            left = line[-LONGEST_WORD:]
        parts.append(words)
        length += len(words)
    return "".join(parts), tuple(starts)


_CUT_IN_DECIMALS = re.compile(r"(?:^|[( ])\d+\.(\d?)$")
_CUT_IN_NUMBER = re.compile(r"(?:^|[( ])(\d+)$")
_REST_OF_NUMBER = re.compile(r"(\d*)\.\d\d(?: ?[KMGT]i?B| ?bytes|\s|$)")
_BEFORE_A_SIZE = re.compile(r"\b(?:allocate|of|which|process|has|memory|with|and|Tried to) \(?\d+$|[(:;] ?\d+$")
_MOST_DIGITS_BEFORE_POINT = 4  # 1023.99 MiB; larger numbers get the next unit


def _is_broken(left: str, right: str) -> bool:
    """Return whether a terminal broke the line inside a word or number.

    A number must have a size's unit or decimals: the next line may begin with a timestamp.
    """
    if not left or not right or left[-1].isspace() or right[0].isspace():
        return False
    before, after = left.rsplit(None, 1)[-1], right.split(None, 1)[0]
    if cut := _CUT_IN_DECIMALS.search(before):
        return re.match(rf"\d{{{2 - len(cut[1])}}}(?: ?[KMGT]i?B| ?bytes|\s|$)", right) is not None
    if (cut := _CUT_IN_NUMBER.search(before)) and (rest := _REST_OF_NUMBER.match(right)):
        digits = cut[1] + rest[1]
        return (
            len(digits) <= _MOST_DIGITS_BEFORE_POINT
            and str(int(digits)) == digits
            and _BEFORE_A_SIZE.search(left) is not None
        )
    word, first, second = ((part.strip(_PUNCTUATION).lower()) for part in (before + after, before, after))
    return word in _WORDS and not (first in _WORDS and second in _WORDS) and before[-1] not in _PUNCTUATION
