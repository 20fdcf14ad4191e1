"""``brim rehearse`` interrupted, killed and twice at once: programs end with it, and no folder stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

# Tells in a file when it is within its second step, and goes on in it for a minute.
PROGRAM = """
import os, pathlib, time, torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(2):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    if step:
        pathlib.Path("within").write_text(f"{os.getpid()}.")
        time.sleep(60)
    optimizer.step()
"""


class Command:
    """``brim rehearse`` of that program in a process group of its own, as a shell starts it."""

    def __init__(self, on_device: OnDevice, folder: Path) -> None:
        self._folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        program = folder / "program.py"
        program.write_text(PROGRAM)
        options = ["--gpu", "L40S", "--python", str(on_device.environment.python)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "brim", "rehearse", *options, str(program)],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def program(self) -> int:
        """Its process, once it is within its second step."""
        told = self._folder / "within"
        while not (told.exists() and told.read_text().endswith(".")):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        pid = int(told.read_text()[:-1])
        told.unlink()
        return pid

    def folders(self) -> list[Path]:
        return sorted(self.temporary.glob("brim-rehearsal-*"))


def ends(pid: int, within_s: float = 20) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "Interrupted."), (signal.SIGTERM, 143, "Terminated.")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_in_a_step_ends_both_and_leaves_nothing(
    on_device: OnDevice, tmp_path: Path, number: signal.Signals, code: int, told: str
) -> None:
    """Ctrl-C goes to the whole group, ``kill`` to the command alone."""
    command = Command(on_device, tmp_path)
    program = command.program()
    if number == signal.SIGINT:
        os.killpg(command.process.pid, number)
    else:
        command.process.send_signal(number)
    _, errors = command.process.communicate(timeout=60)
    assert command.process.returncode == code, errors
    assert errors.splitlines()[-1] == told
    assert ends(program) and command.folders() == []


def test_when_it_is_killed_its_program_ends_and_the_next_one_clears_up(on_device: OnDevice, tmp_path: Path) -> None:
    killed = Command(on_device, tmp_path)
    program = killed.program()
    killed.process.kill()
    killed.process.communicate()
    assert ends(program), "the program went on without the rehearsal"
    (left,) = killed.folders()

    first = Command(on_device, tmp_path)
    first_program = first.program()
    (in_use,) = first.folders()
    assert in_use != left, "what the killed one left is still there"
    second = Command(on_device, tmp_path)
    second.program()
    assert in_use in first.folders() and len(first.folders()) == 2, "one that is in use was cleared up"
    for one in (first, second):
        os.killpg(one.process.pid, signal.SIGINT)
        one.process.communicate(timeout=60)
    assert ends(first_program) and first.folders() == []
