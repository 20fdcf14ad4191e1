"""How rehearsed programs end: by themselves, by a signal, with processes of their own; and what is said then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brim import cli
from brim.cli.explain.answers import of_snapshot
from brim.cli.explain.source import SNAPSHOT, Source
from brim.cli.rehearse import _lines
from brim.cli.verdict import notes_of
from brim.rehearsal.rehearse import Rehearsal, Request, rehearse_program

if TYPE_CHECKING:
    from conftest import OnDevice

HELD = 4 << 20
PROGRAM = """
import os, signal, sys, torch
held = torch.ones(1 << 20, device="cuda")
{end}
"""
FORKS = """
import os, sys
if os.fork() == 0:
    import torch
    torch.ones(1 << 20, device="cuda")
    raise RuntimeError("the child")
os.wait()
"""
SPAWNS = """
import torch
import torch.multiprocessing as mp

def work(rank):
    torch.ones(1 << 20, device=f"cuda:{rank}")

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
READS_IN_WORKERS = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    data = TensorDataset(torch.randn(64, 8))
    for (rows,) in DataLoader(data, batch_size=32, num_workers=1, multiprocessing_context="fork"):
        held = rows.cuda()
    if os.fork() == 0:
        sys.exit(5)
    os.wait()

main()
"""


def rehearsed(on_device: OnDevice, folder: Path, program: str, gpus: int = 1) -> Rehearsal:
    target = folder / "program.py"
    target.write_text(program)
    request = Request(target=str(target), gpu="RTX 4090", gpus=gpus)
    with (folder / "output.txt").open("w") as output:
        (found,) = rehearse_program(request, on_device.environment, folder, output=output)
    return found


@pytest.mark.parametrize(
    ("end", "ended", "told"),
    [
        ("sys.exit(3)", "failed", "it ended with exit code 3"),
        ("os._exit(0)", "finished", ""),
        ("os._exit(7)", "failed", "it ended with exit code 7"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
    ],
)
def test_what_a_program_held_is_known_however_it_leaves(
    on_device: OnDevice, tmp_path: Path, end: str, ended: str, told: str
) -> None:
    found = rehearsed(on_device, tmp_path, PROGRAM.format(end=end))
    assert (found.ended, found.message) == (ended, told)
    assert [one.allocated_bytes for one in found.devices] == [HELD] and found.snapshot is not None


TOO_MUCH = """
import os, sys, torch

def too_much():
    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

try:
    too_much()
except torch.OutOfMemoryError as error:
    {handling}
{after}
"""


@pytest.mark.parametrize(
    ("handling", "after", "ended", "told"),
    [
        ("sys.exit('no memory')", "", "out of memory", "So the program failed: no memory"),
        ("raise ValueError('cannot train') from error", "", "out of memory", "ValueError: cannot train"),
        ("os._exit(9)", "", "out of memory", "it ended with exit code 9"),
        ("pass", "torch.ones(1, device='cuda')", "finished", ""),
        ("pass", "raise ValueError('another')", "failed", "ValueError: another"),
    ],
    ids=["exits", "raises another", "leaves", "goes on", "fails later"],
)
def test_memory_that_ran_out_is_told_whatever_the_program_makes_of_it(
    on_device: OnDevice, tmp_path: Path, handling: str, after: str, ended: str, told: str
) -> None:
    found = rehearsed(on_device, tmp_path, TOO_MUCH.format(handling=handling, after=after))
    assert found.ended == ended and told in found.message
    assert ("Tried to allocate 32768.00 GiB" in found.message) == (ended == "out of memory")
    assert found.fits == {"out of memory": False, "finished": True, "failed": None}[ended]
    assert found.ran_out == 1 and ("Memory ran out once" in " ".join(notes_of(found))) == (found.fits is not False)


def test_of_a_program_that_was_killed_only_that_is_said(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end="os.kill(os.getpid(), signal.SIGKILL)"))
    options = ["--gpu", "L40S", "--python", str(on_device.environment.python)]
    assert cli.main(["rehearse", *options, str(program)]) == 1
    told = capfd.readouterr().out
    assert "The program failed: its process was ended by SIGKILL" in told and "CUDA" not in told
    assert cli.main(["rehearse", *options, "--json", str(program)]) == 1
    (found,) = json.loads(capfd.readouterr().out)["processes"]
    assert (found["ended"], found["fits"], found["devices"]) == ("failed", None, [])


@pytest.mark.parametrize(("program", "others"), [(FORKS, 1), (SPAWNS, 2)], ids=["forks", "spawns"])
def test_other_processes_on_the_gpu_are_not_taken_for_nothing(
    on_device: OnDevice, tmp_path: Path, program: str, others: int
) -> None:
    """Each has a device of its own here: whether they fit on one is not known, and none writes this one's result."""
    found = rehearsed(on_device, tmp_path, program, gpus=2)
    assert (found.ended, found.fits, found.other_processes) == ("finished", None, others)
    assert "used CUDA, and their memory is not known" in found.message
    assert found.devices == () and found.snapshot is None


def test_processes_that_leave_the_gpu_alone_change_nothing(on_device: OnDevice, tmp_path: Path) -> None:
    found = rehearsed(on_device, tmp_path, READS_IN_WORKERS)
    assert (found.ended, found.fits, found.other_processes) == ("finished", True, 0)
    assert [one.device for one in found.devices] == [0]


def test_a_recording_that_no_disk_takes_is_one_error(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After what was found."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=""))
    options = ["--gpu", "L40S", "--python", str(on_device.environment.python)]
    assert cli.main(["rehearse", *options, "--snapshot", "/dev/full", str(program)]) == 2
    captured = capfd.readouterr()
    assert "It fits on L40S" in captured.out
    assert captured.err.count("Error: ") == 1 and "No space left on device" in captured.err
    for _ in range(2):
        assert cli.main(["rehearse", *options, "--snapshot", str(tmp_path / "kept.pickle"), str(program)]) == 0


def test_a_program_may_come_out_of_a_pipe(on_device: OnDevice, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "brim", "rehearse", "--gpu", "L40S", "--python", on_device.environment.python]
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write("import torch\nprint(torch.ones(1, device='cuda').is_cuda)\n")
    try:
        done = subprocess.run(
            [*command, f"/dev/fd/{reading}"], pass_fds=[reading], capture_output=True, text=True, cwd=tmp_path
        )
    finally:
        os.close(reading)
    assert done.returncode == 0, done.stderr
    assert "True" in done.stderr.split() and "It fits on L40S: the program ran to its end." in done.stdout


def test_a_compiled_program_without_triton_is_told_how_to_get_it(on_device: OnDevice, tmp_path: Path) -> None:
    without = replace(on_device, environment=replace(on_device.environment, compiler=None))
    if without.environment.has_triton:
        pytest.skip("Triton is installed beside this PyTorch")
    program = "import torch\ntorch.compile(torch.nn.Linear(8, 8).cuda())(torch.ones(8, 8, device='cuda'))\n"
    found = rehearsed(without, tmp_path, program)
    assert (found.ended, found.fits) == ("failed", None)
    assert found.snapshot is not None
    explained = of_snapshot(Source(name="rehearsal", kind=SNAPSHOT, path=found.snapshot), ())
    first, *rest = _lines(Request(target="program.py", gpu="RTX 4090"), found, explained)
    assert first.startswith("The program failed: TritonMissing: Cannot find a working triton installation.")
    assert any("rehearse with --compiler, which fetches it" in line for line in rest)
    assert not any("Nothing failed" in line for line in rest)


def test_a_compiled_program_is_rehearsed_with_triton(on_device: OnDevice, tmp_path: Path) -> None:
    if not on_device.environment.has_triton:
        pytest.skip("there is no Triton: run `make rehearsal`")
    program = """
import torch
net = torch.compile(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)).cuda())
optimizer = torch.optim.AdamW(net.parameters())
for step in range(100):
    net(torch.randn(2048, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = rehearsed(on_device, tmp_path, program)
    assert found.ended == "enough" and found.fits is True
    assert found.other_processes == 0


def test_a_program_that_fits_by_giving_the_cache_back_is_told_so(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "program.py"
    target.write_text("""
import torch
for mib in (100, 140, 180, 220):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
""")
    assert cli.main(["rehearse", "--gpu", "RTX 3060", "--vram", "900MiB", str(target)]) == 0
    out = capfd.readouterr().out
    assert out.startswith(
        "It fits on RTX 3060, though the safe upper bound is 278 MiB above the memory and the allocator had to "
        "return its cache once: the program ran to its end."
    )
    assert "safe upper bound: 1.15 GiB" in out
    assert cli.main(["rehearse", "--gpu", "RTX 3060", str(target)]) == 0
    assert capfd.readouterr().out.startswith("It fits on RTX 3060: the program ran to its end.")


LOOP = """
import torch
net, late = torch.nn.Linear(512, 512, device="cuda"), torch.nn.Linear(2048, 2048, device="cuda")
data = torch.randn(64, 512, device="cuda")
optimizer, later = torch.optim.SGD(net.parameters(), 0.1), torch.optim.AdamW(late.parameters())
for step in range(40):
{step}
"""
RESETS = """
    torch.cuda.reset_peak_memory_stats()
    if step == 0:
        late(torch.randn(512, 2048, device="cuda")).sum().backward()
    for one in (optimizer, later):
        one.step()
        one.zero_grad()
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
LATE = """
    net(data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 6 == 5:
        late(torch.randn(512, 2048, device="cuda")).sum().backward()
        later.step()
        later.zero_grad()
"""
SWALLOWS = """
    try:
        for one in (optimizer, later):
            one.step()
    except:
        data = torch.cat([data, data])
"""
CAPTURES = """
    del later
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(4):
            net(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = net(data.repeat(64, 1)).sum()
        loss.backward()
        optimizer.step()
    while True:
        graph.replay()
"""


def whole(on_device: OnDevice, folder: Path, program: str, steps: int = 1000) -> Rehearsal:
    """A rehearsal that does not end before the program does."""
    target = folder / "program.py"
    target.write_text(program)
    with (folder / "output.txt").open("w") as output:
        (found,) = rehearse_program(
            Request(target=str(target), gpu="RTX 4090", steps=steps), on_device.environment, folder, output=output
        )
    return found


def test_peaks_that_the_program_resets_are_kept(on_device: OnDevice, tmp_path: Path) -> None:
    found = whole(on_device, tmp_path, LOOP.format(step=RESETS))
    first = (tmp_path / "output.txt").read_text().splitlines()[0]
    (device,) = found.devices
    assert f"{device.allocated_bytes} {device.reserved_bytes}" == first
    assert rehearsed(on_device, tmp_path, LOOP.format(step=RESETS)).devices == found.devices


def test_a_rehearsal_waits_for_the_first_step_of_every_optimizer(on_device: OnDevice, tmp_path: Path) -> None:
    found = rehearsed(on_device, tmp_path, LOOP.format(step=LATE))
    assert found.ended == "enough" and found.steps < 12
    assert found.devices == whole(on_device, tmp_path, LOOP.format(step=LATE)).devices
    assert any(f"after step {found.steps}" in note for note in notes_of(found))


def test_a_rehearsal_ends_though_the_program_handles_every_exception(on_device: OnDevice, tmp_path: Path) -> None:
    found = rehearsed(on_device, tmp_path, LOOP.format(step=SWALLOWS))
    assert (found.ended, found.steps) == ("enough", 3)
    assert found.devices[0].allocated_bytes < 32 << 20


def test_a_captured_step_is_rehearsed_and_its_replays_are_steps(on_device: OnDevice, tmp_path: Path) -> None:
    found = rehearsed(on_device, tmp_path, LOOP.format(step=CAPTURES))
    assert found.ended == "enough" and found.steps > 4
    assert found.devices[0].allocated_bytes > 64 * 64 * 512 * 4
