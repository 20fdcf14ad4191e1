"""Plausible numbers for values that the rehearsal device did not compute, and a record of where programs read
them."""

from __future__ import annotations

import linecache
import math
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from brim.rehearsal.branches import branches_of

PLAUSIBLE = 1.0  # values.cpp fills floats with it

_ONE_OF = frozenset(
    """argmax argmin multinomial max min median mode kthvalue cummax cummin nanmedian""".split()  # noqa: SIM905
)
_SEVERAL_OF = frozenset(["topk", "sort", "argsort"])
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "lt": lambda left, right: left < right,
    "le": lambda left, right: left <= right,
    "gt": lambda left, right: left > right,
    "ge": lambda left, right: left >= right,
}
_UNREAD = frozenset(["native_dropout", "_fused_dropout", "max_pool2d_with_indices", "max_pool3d_with_indices"])


def fill(
    name: str,
    inputs: Sequence[torch.Tensor],
    integers: Sequence[int],
    number: float | None,
    results: Sequence[torch.Tensor],
) -> None:
    """Put plausible integers and booleans into results that were not computed. All tensors are on the host.

    ``name``: of the operator; ``inputs``: its first two tensors; ``integers``: its integer arguments, dimensions
    included; ``number``: its last number.
    """
    with torch._C.DisableTorchFunction():
        for result in results:
            if name not in _UNREAD:
                _fill_result(name.rstrip("_"), inputs, integers, number, result)


def _fill_result(
    base: str, inputs: Sequence[torch.Tensor], integers: Sequence[int], number: float | None, result: torch.Tensor
) -> None:
    if result.dtype == torch.int64 and base in _ONE_OF | _SEVERAL_OF and inputs:
        _fill_indices(base, inputs[0], integers, result)
    elif base in _COMPARED:
        result.fill_(_compared(base, inputs, number))
    elif base in ("any", "all", "isfinite"):
        result.fill_(True)
    elif result.numel() <= 1 << 16:
        result.zero_()


def _fill_indices(base: str, source: torch.Tensor, integers: Sequence[int], result: torch.Tensor) -> None:
    """Indices into a dimension of the input: all valid, and spread over it as evenly as possible."""
    dims = {"topk": integers[1:2], "kthvalue": integers[1:2], "multinomial": []}.get(base, integers[:1])
    if base in ("argmax", "argmin") and not dims:
        size = source.numel()
    else:
        size = source.shape[dims[0] if dims else -1] if source.dim() else 1
    count = torch.arange(result.numel(), device="cpu")
    if base in _SEVERAL_OF:  # distinct along the dimension; each row continues where the last one ended
        moved = result.movedim(dims[0] if dims else -1, -1) if result.dim() else result
        several = moved.shape[-1] if moved.dim() else 1
        # After a full cycle over all indices, shift by 1: otherwise an entire row would always have the same order.
        rounds = count // several // (size // math.gcd(several, size))
        moved.copy_(((count + rounds) % size).view(moved.shape))
    else:
        result.copy_(((count + size // 2) % size).view(result.shape))


def _compared(base: str, inputs: Sequence[torch.Tensor], number: float | None) -> bool:
    if len(inputs) > 1:
        left, right = inputs
        if left.data_ptr() == right.data_ptr() and left.shape == right.shape:
            return base in ("eq", "le", "ge")
        return base in ("ne", "le", "ge")
    if base in ("eq", "ne") or number is None:
        return base == "ne"
    return bool(_COMPARED[base](PLAUSIBLE, number))


@dataclass(frozen=True, kw_only=True)
class Read:
    """A made-up number that a program read, or (``decides``) a branch or a size that depends on it.

    ``line`` and ``file`` are the program's own if its stack has any, else "" (in a backward pass). ``what`` names
    the number; for a branch in another line, also where it was read.
    """

    file: str
    line: int
    function: str
    what: str
    decides: bool
    source: str


class Reads:
    """Counts the reads of made-up numbers."""

    def __init__(self) -> None:
        self.counts: Counter[Read] = Counter()
        self._lock = threading.Lock()

    def note(self, what: str, is_integer: bool) -> None:
        """Record that the running code read a number. ``is_integer``: an integer or a boolean."""
        own, inner = _frames(sys._getframe().f_back)  # None in a backward pass, whose threads run no Python
        file, line, function = ("", 0, "") if own is None else _place(own)
        branches = branches_of(inner)
        here = {
            branch
            for branch in branches_of(own)
            if branch.reads and (branch.file, branch.function) == (file, function)
        }
        reads = [_read(file, line, function, what, is_integer or bool(here))]
        of = f"{what} of line {line}"
        reads += [
            _read(branch.file, branch.line, branch.function, of, True) for branch in branches if branch not in here
        ]
        with self._lock:
            self.counts.update(reads)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "file": read.file,
                "line": read.line,
                "function": read.function,
                "what": read.what,
                "decides": read.decides,
                "source": read.source,
                "times": times,
            }
            for read, times in sorted(self.counts.items(), key=lambda item: (not item[0].decides, -item[1]))
        ]


_LIBRARIES = tuple(
    str(Path(path))
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = str(Path(__file__).parents[1])


def _frames(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """(innermost frame of the program, or of a library other than PyTorch; innermost frame of either)."""
    inner: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        main = frame.f_globals.get("__name__") == "__main__"
        if (main or not file.startswith("<")) and not file.startswith(_OWN):
            is_program = not file.startswith(_LIBRARIES) and "site-packages" not in file
            if inner is None and (is_program or ("/torch/" not in file and "site-packages" in file)):
                inner = frame
            if is_program:
                return frame, inner
        frame = frame.f_back
    return inner, inner


def _place(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname


def _read(file: str, line: int, function: str, what: str, decides: bool) -> Read:
    source = linecache.getline(file, line).strip() if file else ""
    return Read(file=file, line=line, function=function, what=what, decides=decides, source=source)
