"""Compare a kind of block in several precisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kind of block in a precision, per token's pass."""

    bytes: int
    move_s: float
    compute_s: float

    @property
    def streamed_s(self) -> float:
        """Seconds in the steady state, where moves overlap with computation."""
        return max(self.move_s, self.compute_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """``count`` blocks of a ``kind`` in each precision; ``streamed`` and ``resident`` name the faster one."""

    kind: str
    count: int
    forms: Mapping[str, Form]

    @property
    def streamed(self) -> str:
        return min(self.forms, key=lambda name: self.forms[name].streamed_s)

    @property
    def resident(self) -> str:
        return min(self.forms, key=lambda name: self.forms[name].compute_s)

    def to_json(self) -> dict[str, Any]:
        forms = {
            name: {"bytes": form.bytes, "move_s": form.move_s, "compute_s": form.compute_s}
            for name, form in self.forms.items()
        }
        return {
            "kind": self.kind,
            "count": self.count,
            "forms": forms,
            "streamed": self.streamed,
            "resident": self.resident,
        }
