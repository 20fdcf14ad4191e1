"""Memory that grows with every step is what a rehearsal answers, and growth that ends is none of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brim import cli
from brim.rehearsal.rehearse import Rehearsal, Request, rehearse_program
from support.leaking import LEAKS, MIB, NO_LEAKS

if TYPE_CHECKING:
    from conftest import OnDevice


def rehearsed(on_device: OnDevice, folder: Path, text: str, **asked: int) -> Rehearsal:
    target = folder / "train.py"
    target.write_text(text)
    with (folder / "output.txt").open("w") as output:
        request = Request(target=str(target), gpu="RTX 3060", **asked)
        (found,) = rehearse_program(request, on_device.environment, folder, output=output)
    return found


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_does_not_fit(on_device: OnDevice, tmp_path: Path, name: str) -> None:
    found = rehearsed(on_device, tmp_path, LEAKS[name].text)
    assert found.leak is not None and found.fits is False
    assert found.leak.bytes_per_step == pytest.approx(LEAKS[name].bytes_per_step, rel=0.1)
    assert found.leak.lines[0].line.endswith(f"train.py:{LEAKS[name].line_number}")


@pytest.mark.parametrize("name", NO_LEAKS)
def test_growth_that_ends_fits(on_device: OnDevice, tmp_path: Path, name: str) -> None:
    found = rehearsed(on_device, tmp_path, NO_LEAKS[name].text)
    assert found.leak is None
    assert found.fits is True


@pytest.mark.parametrize("name", ["graphs of losses", "outputs"])
def test_the_card_is_full_in_the_step_that_was_named(on_device: OnDevice, tmp_path: Path, name: str) -> None:
    text, memory_bytes = LEAKS[name].text, 1500 * MIB
    leak = rehearsed(on_device, tmp_path, text, memory_bytes=memory_bytes).leak
    assert leak is not None and leak.full_step is not None
    longer = text.replace("range(60)", "range(1000)")
    found = rehearsed(on_device, tmp_path, longer, memory_bytes=memory_bytes, steps=1000)
    assert found.ended == "out of memory"
    assert leak.full_step == pytest.approx(found.steps + 1, rel=0.03)
    assert found.leak is not None
    assert found.leak.full_step == found.steps + 1


def test_the_answer_begins_with_the_leak_and_ends_with_exit_code_3(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LEAKS["outputs"].text)
    assert cli.main(["rehearse", "--gpu", "RTX 3060", "--snapshot", "run.pickle", "train.py"]) == 3
    first, *rest = capfd.readouterr().out.splitlines()
    grows = "memory in use grows by 4 MiB with each"
    assert first.startswith(f"It does not fit on RTX 3060: {grows} step, and the GPU is full at about step ")
    assert "No allocation failed." not in "\n".join(rest)
    assert any(f"kept by train.py:{LEAKS['outputs'].line_number}: kept.append(" in line for line in rest)
    assert cli.main(["explain", "run.pickle"]) == 0
    first, _, line, *_ = capfd.readouterr().out.splitlines()
    assert first == f"device 0: No allocation failed, but {grows} backward pass."
    assert "4 MiB" in line and f"train.py:{LEAKS['outputs'].line_number}" in line


def test_an_estimate_by_rehearsal_says_the_same(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "train.py"
    target.write_text(LEAKS["outputs"].text)
    cli.main(["estimate", "--gpu", "RTX 3060", str(target)])
    out = capfd.readouterr().out
    assert out.startswith("Does not fit: memory in use grows by 4 MiB with each step, and the GPU is full at about ")
    assert "\ntrain.py on NVIDIA GeForce RTX 3060: as it is, by rehearsal\n" in out
    assert f"train.py:{LEAKS['outputs'].line_number}" in out


def test_a_card_that_is_full_after_more_steps_than_programs_run_is_a_note(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "train.py"
    target.write_text(LEAKS["outputs"].text.replace("kept.append(net(x).detach())", "kept.append(x[:32] + 1)"))
    assert cli.main(["rehearse", "--gpu", "RTX 3060", str(target)]) == 0
    out = capfd.readouterr().out
    assert out.startswith("It fits on RTX 3060")
    assert "note: Memory in use grows by 64 KiB with each step, and the GPU is full at about step " in out


def test_without_an_optimizer_of_pytorch_backward_passes_are_looked_at(
    on_device: OnDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = LEAKS["outputs"].text.replace("    optimizer.step()\n    optimizer.zero_grad()\n", "    net.zero_grad()\n")
    target = tmp_path / "train.py"
    target.write_text(text)
    assert cli.main(["rehearse", "--gpu", "RTX 3060", str(target)]) == 3
    out = capfd.readouterr().out
    assert out.startswith("It does not fit on RTX 3060: memory in use grows by 4 MiB with each backward pass, and ")
    assert "(the program ended after backward pass 60)." in out
