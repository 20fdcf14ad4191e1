"""Reads the SQLite exports of Nsight Systems (``nsys export --type sqlite``): the same figures as from PyTorch's.

Only there are migrations of managed (unified) memory recorded, each with its cause, and page faults. Schema: "SQLite
Schema Reference" of Nsight Systems' user guide, 2021 to 2025. Tables are made lazily, columns came and went, so each
is looked for. The file is opened read-only and nothing in it is run: only real tables are read, each in one scan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import FormatError, UnsupportedError
from brim.profiles.activity import Activity
from brim.profiles.device import profile_of
from brim.profiles.figures import Profile
from brim.profiles.nsight_rows import Rows

if TYPE_CHECKING:
    import sqlite3

_MAGIC = b"SQLite format 3\0"
_LONGEST_VALUE = 1 << 20  # bytes of one text or row
_STEPS_PER_BYTE = 20  # of SQLite's machine; a row of 60 bytes takes some 30
_FEWEST_BYTES = 12  # that a row of what is read takes in a file
_CACHE_KIB = 2048


def is_sqlite(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def read(path: str | Path) -> Profile:
    """The profile in a file. No device: nothing was recorded on a GPU.

    Raises FormatError if the file is missing, damaged, or no export of Nsight Systems.
    """
    asked = f"Cannot read {path} as an SQLite export of Nsight Systems."
    try:
        path = Path(path).resolve()
        size = path.stat().st_size
        with path.open("rb") as file:
            if not is_sqlite(file.read(len(_MAGIC))):
                raise FormatError(
                    asked, "It is not an SQLite database.", "Export it: nsys export --type sqlite REPORT"
                )
    except OSError as error:
        raise FormatError(asked, f"{error}.") from error
    with contextlib.closing(_open(path, asked, size)) as database:
        return _Export(database, asked, size).profile(str(path))


def _open(path: Path, asked: str, size: int) -> sqlite3.Connection:
    """Read-only, as a file that does not change: no journal, no lock, no other file is looked at."""
    try:
        import sqlite3
    except ImportError as error:  # Pythons are built without it
        raise UnsupportedError(
            asked, f"This Python has no SQLite: {error}.", "Use a Python with the sqlite3 module."
        ) from error
    try:
        database = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise FormatError(asked, f"{error}.") from error
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    database.text_factory = lambda data: data.decode("utf-8", "replace")
    left = [_STEPS_PER_BYTE * size // 10_000 + 100]

    def spent() -> bool:
        """A damaged tree can name one page many times: it would never be done."""
        left[0] -= 1
        return left[0] < 0

    database.set_progress_handler(spent, 10_000)
    return database


class _Export:
    def __init__(self, database: sqlite3.Connection, asked: str, size: int) -> None:
        self.database, self.asked, self.size = database, asked, size
        self.activity = Activity()
        self.count = 0
        self.tables: dict[str, set[str]] = {}
        self.texts: dict[Any, str] = {}

    def profile(self, source: str) -> Profile:
        import sqlite3

        try:
            self.look()
            rows = Rows(self.activity, self.text)
            self.facts()
            for table, columns, take in rows.wanted():
                for row in self.rows(table, columns):
                    take(*row)
            rows.count_faults()
        except FormatError:
            raise
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            reason = f"It is damaged, or not as Nsight Systems writes it: {str(error)[:100]}."
            raise FormatError(self.asked, reason) from error
        return profile_of(self.activity, source=source, kind="nsight", events=self.count, asked=self.asked)

    def look(self) -> None:
        """Real tables only. A view or a virtual table has no page of its own, and could run what its maker wished."""
        for pragma in ("trusted_schema = OFF", f"cache_size = -{_CACHE_KIB}", "mmap_size = 0", "temp_store = MEMORY"):
            self.database.execute(f"PRAGMA {pragma}")
        names = self.database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        ).fetchall()
        for (name,) in names:
            quoted = str(name).replace('"', '""')
            # 0: an ordinary column; generated ones are expressions
            columns = self.database.execute(f'PRAGMA table_xinfo("{quoted}")')
            self.tables[str(name)] = {str(column[1]) for column in columns if column[6] == 0}
        if not {"StringIds", "META_DATA_EXPORT"} & self.tables.keys():
            found_names = ", ".join(sorted(self.tables)[:5])
            raise FormatError(self.asked, f"It has other tables: {found_names[:200] or 'none'}.")

    def rows(self, table: str, columns: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """The rows of a table, if it is there. What has no value, or no column, has the default given."""
        column_names = self.tables.get(table)
        if column_names is None:
            return
        chosen = ", ".join(
            f'ifnull("{name}", {default!r})' if name in column_names and default is not None else
            f'"{name}"' if name in column_names else repr(default).replace("None", "NULL")
            for name, default in columns.items()
        )  # fmt: skip
        limit = self.size // _FEWEST_BYTES
        for number, row in enumerate(self.database.execute(f"SELECT {chosen} FROM {table}")):
            if number > limit:
                raise FormatError(self.asked, f"{table} has more rows than the file's size allows.")
            self.count += 1
            yield row

    def text(self, number: Any) -> str:
        """A text by its number. They are looked up one by one: most texts in a report are of no use here."""
        text = self.texts.get(number)
        if text is None:
            row = None
            if "StringIds" in self.tables and isinstance(number, int):
                row = self.database.execute("SELECT value FROM StringIds WHERE id = ?", (number,)).fetchone()
            text = self.texts[number] = str(row[0]) if row else ""
        return text

    def facts(self) -> None:
        facts = self.activity.facts
        for name, value in self.rows("META_DATA_EXPORT", {"name": "", "value": ""}):
            if name in ("EXPORT_SCHEMA_VERSION", "EXPORT_PRODUCT_VERSION"):
                facts["schema" if "SCHEMA" in name else "version"] = str(value)[:80]
        for (duration_ns,) in self.rows("ANALYSIS_DETAILS", {"duration": 0}):
            facts["recorded_s"] = duration_ns * 1e-9
        for number, name in self.rows("TARGET_INFO_GPU", {"id": None, "name": ""}):
            self.activity.device_names[number] = str(name)[:200]
        self.count = 0
