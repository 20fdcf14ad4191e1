"""Pieces cut out of a few slabs."""

from __future__ import annotations

import random

import pytest
import torch

from brim.core import Timeline
from brim.core.hardware import RAM
from brim.errors import BudgetError
from brim.memory.pool import Arena, HostSource, Piece, Pool
from brim.memory.recorder import Recorder

PAGE = 4096


def make_pool(pages: int) -> Pool:
    return Pool(RAM, pages * PAGE, HostSource(), Recorder(Timeline("run", measured=True)))


def test_many_pieces_take_few_allocations_and_the_next_round_takes_none() -> None:
    pool = make_pool(64)
    arena = Arena(pool, "pieces", slab_bytes=16 * PAGE)
    for _ in range(3):
        pieces = [arena.take(3 * PAGE - 5) for _ in range(9)]
        assert pool.held_bytes == pool.peak_bytes == 32 * PAGE  # five to a slab
        assert all(piece.tensor.data_ptr() % PAGE == 0 and piece.bytes == 3 * PAGE for piece in pieces)
        for piece in reversed(pieces):
            piece.free()
            piece.free()
        assert arena.used_bytes == 0
    arena.trim()
    assert pool.held_bytes == 0


def test_pieces_never_overlap_and_holes_close() -> None:
    pool = make_pool(512)
    arena = Arena(pool, "pieces", slab_bytes=32 * PAGE)
    draw, held = random.Random(0), []
    for number in range(400):
        if held and draw.random() < 0.5:
            piece, mark = held.pop(draw.randrange(len(held)))
            assert torch.all(piece.tensor == mark)
            piece.free()
        elif arena.used_bytes < 100 * PAGE:
            piece = arena.take(draw.randrange(1, 12 * PAGE))
            piece.tensor.fill_(number % 251)
            held.append((piece, number % 251))
    for piece, mark in held:
        assert torch.all(piece.tensor == mark)
        piece.free()
    whole: list[Piece] = [arena.take(32 * PAGE) for _ in range(pool.held_bytes // (32 * PAGE))]
    assert pool.held_bytes == pool.peak_bytes  # no slab was needed: each is one hole again
    assert len(whole) >= 2


def test_a_budget_that_lacks_a_slab_gives_what_is_asked_and_then_says_no() -> None:
    pool = make_pool(10)
    arena = Arena(pool, "pieces", slab_bytes=8 * PAGE)
    arena.take(8 * PAGE)
    last = arena.take(2 * PAGE)
    assert pool.held_bytes == 10 * PAGE
    with pytest.raises(BudgetError, match="pieces"):
        arena.take(1)
    last.free()
    arena.take(PAGE)
