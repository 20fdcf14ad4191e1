"""Imports and exports of a shared library, read from its ELF file without binutils."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.errors import FormatError

_NUMBER = 0x7FFF  # of a version node; the highest bit hides the symbol


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """A global symbol of a symbol table; ``version`` is the version node that it is bound to, "" where it has
    none."""

    name: str
    version: str
    defined: bool


def needed(path: Path) -> list[str]:
    """Return the names of the libraries that are loaded with this one. Raises FormatError."""
    with _elf_file(path) as elf:
        return [tag.needed for part in elf.iter_segments("PT_DYNAMIC") for tag in part.iter_tags("DT_NEEDED")]


def symbols(path: Path) -> list[Symbol]:
    """Return the global symbols: of a library its exports and imports, of an object file all. Raises FormatError."""
    with _elf_file(path) as elf:
        table = elf.get_section_by_name(".dynsym") or elf.get_section_by_name(".symtab")
        nodes, numbers = (elf.get_section_by_name(name) for name in (".gnu.version_r", ".gnu.version"))
        names = (
            {node["vna_other"]: node.name for _, group in nodes.iter_versions() for node in group} if nodes else {}
        )
        versions = array("H", numbers.data()) if names else ()
        return [
            Symbol(
                name=symbol.name,
                version=names.get(versions[index] & _NUMBER, "") if names else "",
                defined=symbol["st_shndx"] != "SHN_UNDEF",
            )
            for index, symbol in enumerate(table.iter_symbols() if table else ())
            if symbol.name and symbol["st_info"]["bind"] != "STB_LOCAL"
        ]


def section_places(path: Path, name: str) -> list[tuple[int, int]]:
    """Return the places in the file of the sections with this name, as (offset, bytes). Raises FormatError."""
    with _elf_file(path) as elf:
        parts = [part for part in elf.iter_sections() if part.name == name and part["sh_type"] != "SHT_NOBITS"]
        return [(part["sh_offset"], part["sh_size"]) for part in parts if part["sh_size"]]


@contextmanager
def _elf_file(path: Path) -> Iterator[Any]:
    """Open a 64-bit little-endian ELF file (x86-64, aarch64). Raises FormatError for another kind of file."""
    from elftools.elf.elffile import ELFFile

    with open(path, "rb") as file:
        try:
            elf = ELFFile(file)
            if elf.elfclass != 64 or not elf.little_endian:
                raise ValueError("it is not a 64-bit little-endian file")
            yield elf
        except Exception as error:  # damage shows as any error of the parser
            raise FormatError(f"Cannot read {path} as a shared library.", f"Found: {error}.") from error
