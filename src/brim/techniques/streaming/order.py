"""Which block comes next: learned from what came, starting from the order of definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class OrderPredictor:
    """Predicts a repeating sequence of block numbers.

    A step repeats, so the block that followed the last two will follow them again; where those two are new, what
    followed the last one; where that is new, the next in definition order. Definition order can be wrong, a block
    can come twice in a step, and an encoder runs once before a decoder loops: all are learned in one pass. What
    came in one order and now comes in the other is a backward pass: that is foreseen in the first one.
    """

    def __init__(self, definition_order: Sequence[int]) -> None:
        order = list(definition_order)
        self._first = order[0] if order else None
        self._defined = dict(zip(order, order[1:] + order[:1], strict=True))
        self._after_one: dict[int, int] = {}
        self._after_two: dict[tuple[int | None, int], int] = {}
        self._before_two: dict[tuple[int, int], int | None] = {}
        self._last: tuple[int | None, int | None] = (None, None)

    def observe(self, block: int) -> None:
        before, last = self._last
        if last is not None:
            self._after_one[last] = block
            self._after_two[before, last] = block
            self._before_two[last, block] = before
        self._last = last, block

    def restart(self) -> None:
        """The sequence was broken off: what comes next does not follow from what came last."""
        self._last = (None, None)

    def upcoming(self, count: int) -> Iterator[int]:
        """The next ``count`` blocks as far as is known."""
        before, last = self._last
        for _ in range(count):
            following = self._first if last is None else self._next(before, last)
            if following is None:
                return
            yield following
            before, last = last, following

    def _next(self, before: int | None, last: int) -> int | None:
        pair = self._after_two.get((before, last))
        if pair is not None:
            return pair
        if before is not None:
            turned = self._before_two.get((last, before))
            if turned is not None:
                return turned
        return self._after_one.get(last, self._defined.get(last))
