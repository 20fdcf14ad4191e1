"""Every error that brim raises on purpose: what was asked, what was found, what to do."""

from __future__ import annotations


class BrimError(Exception):
    """The family of all expected failures. ``exit_code`` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, asked: str, found: str = "", todo: str = "") -> None:
        self.asked, self.found, self.todo = asked, found, todo
        super().__init__(asked, found, todo)

    def __str__(self) -> str:
        return "\n".join(part for part in (self.asked, self.found, self.todo) if part)


class UsageError(BrimError, ValueError):
    """The request itself is wrong: an unknown option, an impossible value."""

    exit_code = 2


class ModelError(BrimError):
    """The model's files are missing, damaged or not what they claim to be."""

    exit_code = 2


class BudgetError(BrimError):
    """Nothing fits the budget that was given; ``smallest_bytes`` says what would, per tier."""

    exit_code = 2

    def __init__(
        self, asked: str, found: str = "", todo: str = "", *, smallest_bytes: dict[str, int] | None = None
    ) -> None:
        super().__init__(asked, found, todo)
        self.smallest_bytes = smallest_bytes or {}


class TransferError(BrimError):
    """Bytes could not be moved between tiers: a disk read failed, a file shrank."""


class UnsupportedError(BrimError):
    """The request is sound, but brim cannot do it with this model or machine."""

    exit_code = 2


class FormatError(BrimError, ValueError):
    """An artefact (plan, trace, snapshot, log) is not of the form its reader accepts."""

    exit_code = 2
