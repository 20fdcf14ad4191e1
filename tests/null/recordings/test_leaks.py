"""A recording shows a leak by what stays in use from one backward pass to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.allocator.blocks import Block
from brim.allocator.out_of_memory import OutOfMemory
from brim.cli import main
from brim.recordings import snapshot
from brim.recordings.leaks import program_line, recorded_leak
from brim.recordings.snapshot import Snapshot
from brim.units import MIB
from support.simulated_recording import Recording

TORCH = "/usr/lib/python3.11/site-packages/torch"
FORWARD = [("linear", f"{TORCH}/nn/modules/linear.py", 134), ("<module>", "/home/me/train.py", 8)]
LAYER = [
    ("forward", "/env/lib/python3.11/site-packages/transformers/llama.py", 5),
    ("<module>", "/home/me/train.py", 9),
]
BACKWARD = [
    ("_make_grads", f"{TORCH}/autograd/__init__.py", 190),
    ("backward", f"{TORCH}/_tensor.py", 650),
    ("<module>", "/home/me/train.py", 11),
]
BUILD = [("__init__", "/home/me/model.py", 3)]
Stack = list[tuple[str, str, int]]


class Run(Recording):
    """A recording whose events name who asked."""

    def take(self, mib: int, stack: Stack) -> Block:
        block = self.malloc(mib * MIB)
        self.events[-1]["frames"] = [{"name": name, "filename": file, "line": line} for name, file, line in stack]
        return block

    def read(self) -> Snapshot:
        return snapshot.parse(self.dump())


def recorded(steps: int, *, kept_steps: range, capacity_bytes: int = 4096 * MIB) -> Run:
    """Steps that each take 16 MiB for an activation, 2 for a gradient, and 3 that stay in ``kept_steps``."""
    run = Run("", capacity_bytes)
    for _ in range(4):
        run.take(10, BUILD)
    for step in range(1, steps + 1):
        activation = run.take(16, FORWARD)
        if step in kept_steps:
            run.take(3, LAYER)
        gradient = run.take(2, BACKWARD)
        run.free(activation)
        run.free(gradient)
    return run


def test_a_leak_is_named_by_the_line_of_the_program() -> None:
    run = recorded(20, kept_steps=range(1, 21)).read()
    leak = recorded_leak(run.devices[0], run.stacks)
    assert leak is not None
    assert (leak.bytes_per_step, leak.unit, leak.full_step) == (3 * MIB, "backward pass", None)
    assert [row.line for row in leak.lines] == ["<module> at /home/me/train.py:9"]


@pytest.mark.parametrize("kept_steps", [range(0), range(1, 4), range(1, 10)])
def test_what_stays_of_the_first_steps_is_no_leak(kept_steps: range) -> None:
    run = recorded(20, kept_steps=kept_steps).read()
    assert recorded_leak(run.devices[0], run.stacks) is None


def test_the_end_of_each_step_may_be_given() -> None:
    run = recorded(20, kept_steps=range(1, 21)).read()
    after = [5 * (20 - step) for step in range(1, 21)]  # three allocations and two requests to free a step
    leak = recorded_leak(run.devices[0], run.stacks, events_after_steps=after, available_bytes=1000 * MIB)
    assert leak is not None
    assert (leak.bytes_per_step, leak.unit, leak.steps) == (3 * MIB, "step", 20)
    assert leak.full_step == 237  # 20 MiB more are taken for every six kept blocks


def test_where_memory_ran_out_of_it_the_explanation_begins_with_the_leak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run("", 160 * MIB)
    with pytest.raises(OutOfMemory):
        for _ in range(100):
            activation = run.take(16, FORWARD)
            run.take(3, LAYER)
            run.free(run.take(2, BACKWARD))
            run.free(activation)
    path = tmp_path / "run.pickle"
    path.write_bytes(run.dump())
    assert main(["explain", str(path)]) == 0
    first, _, line, advice, *_ = capsys.readouterr().out.splitlines()
    assert first == "device 0: Out of memory by a leak: memory in use grows by 3 MiB with each backward pass."
    assert "3 MiB" in line and "train.py:9" in line
    assert "detached copies" in advice


def test_the_line_of_a_program_is_outside_of_packages() -> None:
    package = "forward at /env/lib/python3.11/site-packages/transformers/llama.py:5"
    assert program_line([package, "main at /home/me/train.py:9"]) == "main at /home/me/train.py:9"
    assert program_line([package]) == package
    compiled = "call at /tmp/torchinductor_me/pw/cpwqxgiivhhxlrb7etserclviop4auf3k3o4rewmnzba4ouxyx3n.py:163"
    assert program_line([compiled, package, "main at /home/me/train.py:9"]) == "main at /home/me/train.py:9"
