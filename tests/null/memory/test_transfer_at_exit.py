"""The end of a process whose bytes are still moving: no thread touches PyTorch any more when Python comes down."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import sys, torch
from brim.core import Timeline
from brim.memory.tiers import cpu_memory

memory = cpu_memory(Timeline("t", measured=True), ram_bytes=64 << 20)
source = torch.arange(256, dtype=torch.uint8)
target = memory.ram.allocate(256, "target")
copy = lambda: memory.engine.copy(source, target, "x", [], ("ram", "vram"))
"""

# A second of copying, asked for in a moment.
MANY = """
source, target = torch.ones(1 << 20, dtype=torch.uint8), memory.ram.allocate(1 << 20, "large")
tickets = [copy() for _ in range(5000)]
"""
LATE = """
import atexit
def late():
    tickets = [copy() for _ in range(1000)]
    tickets[-1].wait()
    print(torch.equal(target.tensor[:256], source), all(ticket.done for ticket in tickets))
atexit.register(late)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -2)])
def test_copies_under_way_do_not_abort_the_process(end: str, code: int) -> None:
    ended = run(f"{PRELUDE}\n{MANY}\n{end}\n")
    assert ended.returncode == code, ended.stderr
    assert "terminate" not in ended.stderr


@pytest.mark.thorough
def test_who_moves_bytes_while_the_process_ends_has_them_moved() -> None:
    """What is registered before brim is imported is called after brim's own end."""
    ended = run(f"{LATE}\n{PRELUDE}\ncopy().wait()\n")
    assert (ended.returncode, ended.stdout) == (0, "True True\n"), ended.stderr
