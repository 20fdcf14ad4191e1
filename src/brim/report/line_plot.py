"""Lines as an SVG picture: text that a browser shows, and nothing to install."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 40, 50
_COLOURS = ("#0072B2", "#D55E00", "#555555", "#009E73", "#CC79A7")  # told apart by colour-blind eyes too (Okabe, Ito)

Line = Sequence[tuple[float, float | None]]


def picture(title: str, lines: Mapping[str, Line], *, x_label: str, y_label: str, unit: str) -> str:
    """``lines``: name -> points (x, y); None breaks a line. The y axis is logarithmic, its numbers in ``unit``."""
    frame = _Frame([point for line in lines.values() for point in line], unit)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *frame.axes(x_label, y_label),
    ]
    for index, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        parts += frame.drawn(line, colour)
        y = _TOP + 18 * (index + 1)
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 14}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 34}" y="{y - 3}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Frame:
    """Maps points to positions in the picture."""

    def __init__(self, points: Line, unit: str) -> None:
        self._unit = unit
        xs = [x for x, y in points if y]
        ys = [math.log10(y) for _, y in points if y]
        self._x = (min(xs, default=1.0), max(xs, default=2.0))
        self._y = (
            math.floor(min(ys, default=0.0)),
            max(math.ceil(max(ys, default=1.0)), math.floor(min(ys, default=0.0)) + 1),
        )

    def x(self, value: float) -> float:
        first, last = self._x
        return _LEFT + (value - first) / ((last - first) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        first, last = self._y
        return _HEIGHT - _BOTTOM - (math.log10(value) - first) / (last - first) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str, y_label: str) -> Iterator[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for power in range(self._y[0], self._y[1] + 1):
            y = self.y(10.0**power)
            yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {self._unit}</text>'
        first, last = self._x
        steps = 6
        for step in range(steps + 1):
            value = first + (last - first) * step / steps
            x = self.x(value)
            yield f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="black"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{value:.3g}</text>'
        yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>'
        yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
        middle = (_TOP + bottom) / 2
        yield f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'

    def drawn(self, line: Line, colour: str) -> Iterator[str]:
        runs: list[list[str]] = [[]]
        for x, y in line:
            if y:
                runs[-1].append(f"{self.x(x):.1f},{self.y(y):.1f}")
            elif runs[-1]:
                runs.append([])
        for run in runs:
            if run:
                points = " ".join(run)
                yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            if len(run) == 1:  # a line of one point is invisible
                across, down = run[0].split(",")
                yield f'<circle cx="{across}" cy="{down}" r="4" fill="{colour}"/>'
