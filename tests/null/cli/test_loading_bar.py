"""What a terminal shows while weights are loaded, and what hears of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from brim.cli.loading import loading_bar
from brim.run.generate.request import Request, generate
from support.generating import save

GIB = 1 << 30


@pytest.mark.parametrize(("terminal", "told"), [(True, True), (False, True), (True, False)])
def test_a_bar_in_bytes_on_a_terminal_only(terminal: bool, told: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100, color_system=None)
    with console.status("starting") as status:
        show = loading_bar(status, enabled=told)
        show(GIB // 2, 2 * GIB)
        show(3 * GIB // 2, 2 * GIB)
    assert ("1.5 GiB of 2 GiB" in shown.getvalue()) is (terminal and told)


def test_every_byte_that_is_loaded_is_told_of(tmp_path: Path, cache: Path) -> None:
    folder = save(tmp_path / "llama", "llama")
    heard: list[tuple[int, int]] = []
    generate(Request(model=folder, prompt="hi", max_new_tokens=2), on_loaded=lambda *told: heard.append(told))
    done = [count for count, _ in heard]
    assert heard and done == sorted(done)
    assert {total for _, total in heard} == {done[-1]}, "at last all of it is there"
