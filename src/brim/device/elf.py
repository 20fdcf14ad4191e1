"""Imports and exports of a shared library, read from its ELF file without binutils.

It supports the parts that the rehearsal needs: 64-bit little-endian files (x86-64, aarch64), their dynamic section,
their symbol tables with versions, and the positions of their sections.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from brim.errors import FormatError

SYMTAB, DYNAMIC, DYNSYM, VERNEED, VERSYM = 2, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
NEEDED, SONAME = 1, 14
UNDEFINED, LOCAL = 0, 0  # a section index; a binding
NO_BITS = 8

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section: its name, its place in the file in bytes, and the number of its string table."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A global symbol of a symbol table; ``version`` is the version node that it is bound to, "" where it has
    none."""

    name: str
    version: str
    defined: bool


class ElfFile:
    """An ELF file that is open for reading. Raises FormatError for another kind of file or a damaged one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            if path.stat().st_size < _HEADER.size:
                raise self._damaged("it is too short")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:6] != b"\x7fELF\x02\x01":
            raise self._damaged("it is not a 64-bit little-endian ELF file")
        try:
            self.sections = tuple(self._read_sections())
        except (struct.error, IndexError, OverflowError) as error:
            raise self._damaged("it ends early") from error

    def __enter__(self) -> ElfFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._data.close()

    def needed(self) -> tuple[str, ...]:
        """The names of the libraries that are loaded with this one."""
        return tuple(text for tag, text in self._dynamic_texts() if tag == NEEDED)

    def symbols(self) -> Iterator[Symbol]:
        """The global symbols: of a library its exports and imports, of an object file all."""
        for kind in (DYNSYM, SYMTAB):
            table = self._section(kind)
            if table:
                yield from self._symbols_of(table)
                return

    def _read_sections(self) -> Iterator[Section]:
        fields = _HEADER.unpack_from(self._data)
        table, entry_bytes, count, names = fields[6], fields[11], fields[12], fields[13]
        raw = [_SECTION.unpack_from(self._data, table + i * entry_bytes) for i in range(count)]
        for name, kind, _, _, offset, size, link, *_ in raw:
            text = self._text(raw[names][4] + name)
            yield Section(name=text, kind=kind, offset=offset, size=0 if kind == NO_BITS else size, link=link)

    def _section(self, kind: int) -> Section | None:
        return next((section for section in self.sections if section.kind == kind), None)

    def _text(self, offset: int) -> str:
        return self._data[offset : self._data.find(b"\0", offset)].decode("utf-8", "replace")

    def _dynamic_texts(self) -> Iterator[tuple[int, str]]:
        section = self._section(DYNAMIC)
        if section:
            strings = self.sections[section.link].offset
            for tag, value in struct.iter_unpack("<qQ", self._bytes(section)):
                if tag in (NEEDED, SONAME):
                    yield tag, self._text(strings + value)

    def _symbols_of(self, table: Section) -> Iterator[Symbol]:
        strings, versions = self.sections[table.link].offset, self._versions()
        numbers = self._section(VERSYM) if table.kind == DYNSYM else None
        indices = struct.unpack(f"<{numbers.size // 2}H", self._bytes(numbers)) if numbers else ()
        for i, (name, info, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(self._bytes(table))):
            if name and info >> 4 != LOCAL:
                version = versions.get(indices[i] & 0x7FFF, "") if indices else ""
                yield Symbol(name=self._text(strings + name), version=version, defined=section != UNDEFINED)

    def _versions(self) -> dict[int, str]:
        """Version nodes of other libraries that symbols here are bound to, by number."""
        section, versions = self._section(VERNEED), {}
        at = section.offset if section else None
        while section and at is not None:
            _, count, _, first, to_next = _VERNEED.unpack_from(self._data, at)
            auxiliary = at + first
            for _ in range(count):
                _, _, number, name, step = _VERNAUX.unpack_from(self._data, auxiliary)
                versions[number] = self._text(self.sections[section.link].offset + name)
                auxiliary += step
            at = at + to_next if to_next else None
        return versions

    def _bytes(self, section: Section) -> bytes:
        return self._data[section.offset : section.offset + section.size]

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"Cannot read {self.path} as a shared library.", f"Found: {what}.")
