"""Finds, in a log of any size, the places that may hold an out-of-memory message, and makes each one line of text.

A log is read in blocks; of a block without a telling word nothing is kept. What is around a telling word is kept per
rank, because several ranks write into one log at once, with what was put before each line (colours, timestamps,
ranks, containers) taken off, and lines that a terminal broke put together again.
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
from itertools import accumulate
from typing import BinaryIO

BLOCK_BYTES = 1 << 16  # of short lines, objects of thirty times that are made for a while
LONGEST_LINE = 1 << 16  # characters; of what is longer the rest is cut off
LONGEST_WORD = 300  # characters; where a terminal broke a line inside of a word, there is no longer one
LONGEST_WINDOW = 1 << 16  # characters around one telling word and those that follow it
LINES_BEFORE, LINES_AFTER = 3, 30  # of the same rank, around a telling word
LINES_WAITING = 64  # of all ranks together
MOST_RANKS = 4_096

# In lower case. Wherever a message is broken, one of these is whole in it.
_TELLING = (
    *("of memory", "tried to", "enough memory", "allocate memory", "allowed memory", "video memory", "shared memory"),
    *("capacity of", "capacty of", "reserved by pytorch", "outofmemory", "out_of_", "out of resource", "memoryerror"),
    *("alloc_failed", "alloc_buffer", "allocation of size", "bad_alloc", "memoryallocation", "failed to alloc"),
    *("failed to cuda", "failed to reserve", "unable to alloc", "unable to mmap", "unable to open", "kill process"),
    *("unable to resize", "buffer for kv", "memory on device", "on startup is", "while trying to", "would exceed"),
    *("resource_exhausted", "oom when", "dataloader worker", "kv cache", "cache blocks", "max seq len", "error=2"),
    *("invalid buffer size", "expandablesegmentva", "expandable_segment", "expandable-segment", "mempool returned"),
    *("killed process", "nccl warn cuda", "ncclunhandled", "alloc_conf", "not_initialized when"),
    *("runtime error (2)", "insufficient_resources"),
)
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_STAMP = r"(?:\d{4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|\d\d:\d\d:\d\d(?:[.,]\d+)?"
_LEVEL = r"(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# What loggers, launchers and containers put before a line. `rank` is who wrote it.
_PREFIXES = tuple(
    re.compile(text)
    for text in (
        r"\s*\[(?P<rank>rank ?\d+|default\d+|Rank ?\d+)\]:? ?",
        r"\s*\[\d+,(?P<rank>\d+)\]<(?:stdout|stderr)>:? ?",
        r"\s*\[?\d{1,5}\]?: (?=\S)",  # srun --label; its number is taken in `_taken_off`
        r"\s*\((?P<rank>[^()\n]{0,60}pid=\d+[^()\n]{0,60})\) ?",
        r"\s*\[?(?:" + _STAMP + r")\]? ?[:|-]? ?",
        r"\s*\[?" + _LEVEL + r"\]?(?: *:(?:\w[\w.]*:)?| *\||(?= ))(?! *\S{0,20}Error) ?",
        r"\s*\[[\w.]+\.(?:py|cc|cpp|cu):\d+\]:? ?",
        r"\s*(?P<rank>[\w.-]{1,60})[ \t]+\| ",  # docker compose
        r"\s*[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,60} \S{1,60}\[\d+\]: ",  # syslog, journalctl
        r"\s*\[?[IWEF]\d{3,4} " + r"\d\d:\d\d:\d\d\.\d+ [^\]]{1,120}\] ",  # glog, c10d
        r"\s*[│┃|] ?",  # a frame around a traceback
    )
)
# Words of the messages. A line that ends inside of one was broken by a terminal, not between words.
_WORDS = frozenset(
    re.findall(
        r"\S+",
        "torch cuda torch.outofmemoryerror torch.cuda.outofmemoryerror runtimeerror out of memory tried to allocate "
        "allocated allocation gpu has a total capacity capacty which is free including non-pytorch this process in "
        "use by pytorch and reserved but unallocated if large try setting avoid fragmentation already cached active "
        "current allowed with private pools pytorch_cuda_alloc_conf pytorch_alloc_conf expandable_segments:true "
        "expandable_segments max_split_size_mb currently requested device limit according resource_exhausted while "
        "trying allocating backend other allocations max pool defaultcpuallocator not enough you bytes failed buffer "
        "size dataloader worker killed signal cudamalloc mib gib kib available needed than cache blocks enabled "
        "address virtual custom allocator backing mempool returned nullptr exceeds expandable-segment reserve",
    )
)
_END_OF_LINE = re.compile(r"\r\n|\n|\r")
_PUNCTUATION = ".,;:()[]'\"`"


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a log around telling words, as one line. ``rank`` is who wrote it, "" if lines do not say."""

    rank: str
    text: str


@dataclass(slots=True)
class _Rank:
    """What is kept of one rank: its last lines, or the lines of a window that is open."""

    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    length: int = 0
    left: int = 0  # lines that the window still takes; 0: it is closed


def windows(stream: BinaryIO) -> Iterator[Window]:
    """The windows of a log, in the order in which they end. Holds a few at a time, whatever the log's size."""
    log = _Log()
    for text in _blocks(stream):
        if not log.open and not _is_telling(text.replace("\n", " ")):
            log.waiting.extend(_END_OF_LINE.split(text[-LONGEST_LINE:])[-LINES_WAITING:])
            continue
        lines = _END_OF_LINE.split(text)
        at = 0
        for hit in [*_telling_lines(lines), len(lines)]:
            while at < hit and log.open:
                yield from log.sorted(lines[at])
                at += 1
            if at <= hit < len(lines):
                log.waiting.extend(lines[max(at, hit - LINES_WAITING) : hit])
                yield from log.start(lines[hit])
                at = hit + 1
        log.waiting.extend(lines[max(at, len(lines) - LINES_WAITING) :])
    yield from log.end()


def _telling_lines(lines: list[str]) -> list[int]:
    """The indices of the lines in which a telling word begins; it may end in the next."""
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
    """The windows of a text that is in memory already."""
    return windows(io.BytesIO(text.encode("utf-8", "replace")))


class _Log:
    """Puts lines into windows. While no window is open, lines are only remembered."""

    def __init__(self) -> None:
        self.ranks: dict[str, _Rank] = {}
        self.open = 0
        self.last = ""  # who wrote the last line
        self.waiting: deque[str] = deque(maxlen=LINES_WAITING)  # as they were read

    def start(self, line: str) -> Iterator[Window]:
        """A line with a telling word, after those that wait."""
        waiting = [*self.waiting, line]
        self.waiting.clear()
        for window in waiting:
            yield from self.sorted(window)

    def sorted(self, line: str) -> Iterator[Window]:
        """Gives a line to who wrote it."""
        name, text = _taken_off(line[:LONGEST_LINE])
        if not name and self.last in self.ranks and self.ranks[self.last].left:
            name = self.last  # loggers name the writer of several lines once
        if name not in self.ranks and len(self.ranks) >= MOST_RANKS:
            name = ""
        self.last = name
        rank = self.ranks.setdefault(name, _Rank())
        before = rank.before[-1] if rank.before else ""
        telling = _is_telling(text) or _is_telling(f"{before[-200:].rstrip()} {text[:200].lstrip()}")
        if telling and not rank.left:
            rank.lines = list(rank.before)
            rank.length = sum(map(len, rank.lines))
            self.open += 1
        if telling:
            rank.left = LINES_AFTER
        rank.before = [*rank.before[1 - LINES_BEFORE :], text]
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


def _closed(rank: _Rank, name: str) -> Window:
    lines, rank.lines, rank.length, rank.left = rank.lines, [], 0, 0
    return Window(name, joined(lines))


def _blocks(stream: BinaryIO) -> Iterator[str]:
    """The log in pieces of whole lines. UTF-16 is recognised by its mark, or by its zero bytes.

    Zero bytes are not text: a log that was emptied while a program wrote to it begins with as many as it had bytes.
    """
    decoder: codecs.IncrementalDecoder | None = None
    rest = ""
    while block := stream.read(BLOCK_BYTES):
        if decoder is None:
            zeros = len(block) - len(block.lstrip(b"\0"))
            if zeros == len(block):
                continue
            block = block[zeros & ~1 :]  # of UTF-16 whole characters
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


def _taken_off(line: str) -> tuple[str, str]:
    """Who wrote a line, and the line without what was put before it."""
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


def joined(lines: Iterable[str]) -> str:
    """Lines as one, with single spaces: words and numbers that were broken in the middle are whole again."""
    text = ""
    for line in lines:
        text += line if not text or _is_broken(text[-LONGEST_WORD:], line) else f" {line}"
    return " ".join(text.split())


def _is_broken(left: str, right: str) -> bool:
    """Whether a terminal broke the line inside of a word or number."""
    if not left or not right or left[-1].isspace() or right[0].isspace():
        return False
    before, after = left.rsplit(None, 1)[-1], right.split(None, 1)[0]
    if re.search(r"(?:^|[( ])\d+\.\d?$", before) and after[0].isdigit():
        return True
    if re.search(r"(?:^|[( ])\d+$", before) and re.match(r"\d*\.\d\d\b", after):
        return True
    word, first, second = ((part.strip(_PUNCTUATION).lower()) for part in (before + after, before, after))
    return word in _WORDS and not (first in _WORDS and second in _WORDS) and before[-1] not in _PUNCTUATION
