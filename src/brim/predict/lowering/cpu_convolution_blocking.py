"""The part of an image that oneDNN makes columns of at a time in a forward convolution through matrix products.

Follows ``init_conf`` of gemm_convolution_utils.cpp: candidates for the blocks of output channels and points are rated
by how evenly threads share the work, how much of the cache they fill and how often memory is read; the best is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

import torch

from brim.predict.lowering.cpu_convolution_direct import Direct
from brim.predict.lowering.cpu_convolution_shape import Convolution, lanes, padded

_LEAST_CHANNELS = 8  # of a block
_LINE = 48  # points that products are fastest with
_OUT_OF_CACHE = 20  # times the cost
_STRIDED_COPY = 8  # times the cost
_USUAL_CACHE_BYTES = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Candidate blocks of output channels, points and input channels."""

    outputs: int
    points: int
    inputs: int


def forward_columns_bytes(conv: Convolution) -> int:
    """Columns of all threads together."""
    threads = torch.get_num_threads()
    images = conv.batch * conv.groups
    points = prod(Direct.of(conv).result)
    small = images * points < threads * lanes() and points >= images
    if len(conv.sides) == 3 or small:
        return conv.columns(threads)
    best = _Search.of(conv).best()
    return threads * best.inputs * conv.window * best.points * 4


@dataclass(frozen=True, kw_only=True)
class _Search:
    inputs: int  # of a group, as all that follows
    outputs: int
    window: int
    points: int  # of an image
    all_points: int  # of all images and groups
    stride: int  # along the rows, and along both
    strides: int
    threads: int
    lanes: int
    cache: int  # floats

    @staticmethod
    def of(conv: Convolution) -> _Search:
        direct = Direct.of(conv)
        points = prod(direct.result)
        return _Search(
            inputs=direct.inputs, outputs=direct.outputs, window=direct.window, points=points,
            all_points=conv.batch * conv.groups * points, stride=direct.stride[-1], strides=prod(direct.stride[1:]),
            threads=torch.get_num_threads(), lanes=lanes(), cache=_cache_bytes() // 4,
        )  # fmt: skip

    def best(self) -> _Blocks:
        found, rating = _Blocks(outputs=1, points=1, inputs=self.inputs), 0.0
        for parts in range(1, self.threads + 1):
            outputs, points = -(-self.outputs // parts), -(-self.all_points // (self.threads // parts))
            whole, rated = self._rated(parts, outputs, points)
            if rated > rating:
                found, rating = whole, rated
            if found == _Blocks(outputs=outputs, points=points, inputs=self.inputs):
                continue
            for one, other in self._candidates(outputs, points):
                for tried in self._rounded(one, other):
                    blocks, rated = self._rated(parts, *tried)
                    if rated > rating:
                        found, rating = blocks, rated
        return found

    def _candidates(self, outputs: int, points: int) -> Iterator[tuple[int, int]]:
        """All input channels at once; as many as halve the cache; all output channels at once."""
        lanes, cache, inputs = self.lanes, self.cache, self.inputs
        per_point, per_input = self.strides + self.window, self.window * outputs
        some = _within(_LEAST_CHANNELS, outputs, (cache - per_point * inputs * lanes - per_input * inputs) // lanes)
        yield some, _within(lanes, points, (cache - per_input * inputs) // (per_point * inputs + some))
        most = max(1, cache // (2 * _LEAST_CHANNELS * per_point + 2 * per_input))
        if most < inputs:
            few = inputs // max(1, inputs // most)
            line = max(1, (cache - 2 * per_input * few) // (2 * few * per_point))
            some = cache // 2 // line
            if some > outputs:
                some = outputs
                line = _within(lanes, points, (cache - per_input * few) // (per_point * few + some))
            elif line > points:
                line = points
                some = _within(_LEAST_CHANNELS, outputs, (cache - per_point * few * line - per_input * few) // line)
            yield some, line
        room = (cache - per_input * inputs) // (per_point * inputs + outputs)
        yield outputs, max(lanes, room // lanes * lanes)

    def _rounded(self, outputs: int, points: int) -> Iterator[tuple[int, int]]:
        eights, more = outputs // 8 * 8, padded(outputs, 8)
        line = points // _LINE * _LINE
        yield from ((outputs, points), (eights, line), (more, line), (more, padded(points, self.lanes)))
        yield more, padded(points, _LINE)

    def _rated(self, parts: int, outputs: int, points: int) -> tuple[_Blocks, float]:
        """``try_cfg``: the blocks as they would be, and how good they are."""
        each, share = -(-self.outputs // parts), -(-self.all_points // (self.threads // parts))
        outputs = min(each, _within(_LEAST_CHANNELS, each, outputs))
        most = min(self.points, share)
        points = min(most, _within(self.lanes, share, points))
        room = self._room(outputs, points, each, share)
        cost = _OUT_OF_CACHE if room < 1 else 1
        inputs = max(1, self.inputs // -(-self.inputs // max(1, room)))
        found = _Blocks(outputs=outputs, points=points, inputs=inputs)
        depth, k, line = inputs * self.window, self.inputs * self.window, padded(points, self.lanes)
        read = self.window * self.inputs * padded(share * self.strides, self.lanes)
        copied = int(2 * read * line / points) * (_STRIDED_COPY if self.stride != 1 else 1)
        written = each * padded(share, self.lanes) * (2 * -(-self.inputs // inputs) - 1)
        moved = cost * (read + copied + each * padded(k, self.lanes) + written)
        even = each / padded(each, outputs) * most / padded(most, points) * self.inputs / padded(self.inputs, inputs)
        deep = padded(depth, self.lanes)
        product = points / self.lanes * outputs * depth / (line * depth + outputs * deep + outputs * line)
        rating = (
            self._balance(parts) ** 8 * even * points / padded(points, 3 * self.lanes)
            * share / self.lanes * each * k / moved * sqrt(points * outputs * depth / (each * share * k)) * product
        )  # fmt: skip
        return found, rating

    def _room(self, outputs: int, points: int, each: int, share: int) -> int:
        """``calc_max_icb``: input channels whose columns fit into the cache."""
        block, row, column = outputs * points, self.strides * points, self.window * points
        if points < share:
            room = (self.cache - block) // (row + column + self.window * each)
        else:
            room = self.cache // (row + column)
            if outputs < each:
                room = min(room, (self.cache - block) // (column + self.window * outputs))
        if room < self.inputs:
            room = (self.cache - block) // (row + column + self.window * each)
        return room

    def _balance(self, parts: int) -> float:
        """The least work of a thread by the most."""
        most, least = -(-self.outputs // parts), max(1, self.outputs // parts)
        rows = -(-self.threads // parts)
        wide, narrow = -(-self.all_points // (self.threads // parts)), -(-self.all_points // rows)
        uneven = self.outputs % parts > self.threads % parts
        largest = most * wide if uneven else max(most * narrow, least * wide)
        short = max(1, self.all_points // rows)
        if self.threads % parts > self.outputs % parts:
            return least * short / largest
        return min(most * short, least * (self.all_points // (self.threads // parts))) / largest


def _within(low: int, high: int, value: int) -> int:
    return max(low, min(high, value))


def _cache_bytes() -> int:
    """A core's second-level cache, as the operating system tells it."""
    known = os.sysconf("SC_LEVEL2_CACHE_SIZE") if "SC_LEVEL2_CACHE_SIZE" in getattr(os, "sysconf_names", ()) else 0
    return known if known > 0 else _USUAL_CACHE_BYTES
