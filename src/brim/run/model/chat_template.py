"""Chat templates are programs that come with a model: rendered within bounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

_MOST_REPEATED = 1_000_000  # half a second


class _Left(threading.local):
    """How many numbers the ranges of the rendering in this thread may still have; None outside of one."""

    numbers: int | None = None


_left = _Left()


def apply_template(tokenizer: Any, messages: Sequence[Any], **options: Any) -> Any:
    """``tokenizer.apply_chat_template``, whose ranges may have a million numbers in all.

    Raises OverflowError beyond, and whatever the template does.
    """
    from jinja2 import sandbox

    # jinja2's sandbox allows a range 100,000 numbers, and another one for each of them. Its ``safe_range`` makes them
    # by this name; transformers lets nobody give a template a ``range`` of his own.
    vars(sandbox)["range"] = _counted
    _left.numbers = _MOST_REPEATED
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    finally:
        _left.numbers = None


def _counted(*bounds: int) -> range:
    numbers = range(*bounds)
    if _left.numbers is None:
        return numbers
    if len(numbers) > _left.numbers:  # OverflowError itself where no machine word holds the length
        raise OverflowError(f"its ranges have more than {_MOST_REPEATED:,} numbers in all")
    _left.numbers -= len(numbers)
    return numbers
