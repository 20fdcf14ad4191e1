"""``brim rehearse`` without a device: options, and the search of ``--vary``."""

from __future__ import annotations

import pickle
from pathlib import Path

import click
import pytest

from brim import cli
from brim.cli.options import OutputFile
from brim.cli.rehearse import _headline, largest_that_fits, rehearse, with_option
from brim.core.leak import Leak, LeakingLine
from brim.rehearsal.rehearse import DevicePeak, Rehearsal, Request
from brim.units import GIB, MIB

FITS, FAILS = "It fits on RTX 3060", "It does not fit on RTX 3060"


@pytest.mark.parametrize("fitting", range(9))
def test_the_largest_that_fits_is_found_by_halves(fitting: int) -> None:
    values = [str(number) for number in range(8)]
    asked: list[str] = []

    def fits(value: str) -> bool:
        asked.append(value)
        return int(value) < fitting

    assert largest_that_fits(values, fits) == (values[fitting - 1] if fitting else None)
    assert len(asked) <= 4


@pytest.mark.parametrize(
    ("given", "option", "made"),
    [
        ((), "batch", ("--batch", "8")),
        (("--batch", "2", "x"), "batch", ("--batch", "8", "x")),
        (("--batch=2",), "--batch", ("--batch=8",)),
        (("-b", "2"), "-b", ("-b", "8")),
        (("train.batch=2",), "train.batch", ("train.batch=8",)),
    ],
)
def test_an_option_of_the_program_is_set_where_it_is(
    given: tuple[str, ...], option: str, made: tuple[str, ...]
) -> None:
    assert with_option(given, option, "8") == made


def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    assert cli.main(["rehearse", "--gpu", "L40S", str(tmp_path / "none.py")]) == 2
    assert cli.main(["rehearse", "--gpu", "L40S", "--gpus", "2", "--rank", "2", str(program)]) == 2
    assert "There is no rank 2. Ranks are 0 to 1." in " ".join(capsys.readouterr().err.split())
    assert cli.main(["rehearse", "--gpu", "L40S", "--steps", "0", str(program)]) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpus", "8", "--rank", ","], "Ranks are whole numbers"),
        (["--gpus", "8", "--rank", "1,1"], "Name each of them once"),
        (["--gpus", "0"], "At least one GPU is needed"),
        (["--vary", "batch"], "It has no values"),
        (["--vary", "=1,2"], "It has no option"),
        (["--vary", "batch=1,1"], "A value is repeated"),
        (["--vary", "batch=1,8,2"], "Its values are not in order"),
        (["--vary", "batch=1,2", "--html", "page.html"], "with --html"),
        (["--vary", "batch=1,2", "--snapshot", "kept.pickle"], "with --snapshot"),
        (["--vary", "batch=1,2", "--what-if", "best"], "with --what-if"),
        (["--what-if", "nonsense"], "is not of the form key:value"),
        (["--snapshot", "program.py"], "It is program.py, which is an input"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_runs(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from brim.device import environment

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "prepare", lambda *_, **__: pytest.fail("a rehearsal was prepared"))
    Path("program.py").write_text("")
    assert cli.main(["rehearse", "--gpu", "L40S", *options, "program.py"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_a_recording_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """Of each rank its own, as they are written."""
    for name in ("kept.pickle", "kept-rank1.pickle"):
        (tmp_path / name).write_bytes(pickle.dumps({}))
    (tmp_path / "kept-rank2.pickle").write_text("no snapshot")
    option = next(one for one in rehearse.params if one.name == "snapshot")
    assert isinstance(option.type, OutputFile)
    path = option.type.convert(str(tmp_path / "kept.pickle"), option, None)
    beside = list(option.type.further(path, {"ranks": (1, 2)}))
    assert beside == [tmp_path / "kept-rank1.pickle", tmp_path / "kept-rank2.pickle"]
    assert option.type.convert(str(beside[0]), option, None) == beside[0]
    with pytest.raises(click.BadParameter, match="not a memory snapshot"):
        option.type.convert(str(beside[1]), option, None)


def rehearsal(
    process_bytes: int,
    ended: str = "finished",
    *,
    flushes: int = 0,
    full_step: int | None = None,
    message: str = "",
    steps: int = 50,
    grew_until: int = 2,
) -> Rehearsal:
    device = DevicePeak(
        device=0, allocated_bytes=0, reserved_bytes=0, process_bytes=process_bytes, cache_flushes=flushes
    )
    lines = (LeakingLine(line="train.py:8", bytes_per_step=80 * MIB),)
    leak = Leak(bytes_per_step=80 * MIB, lines=lines, steps=50, since_step=24, full_step=full_step)
    return Rehearsal(
        rank=None, ended=ended, message=message, steps=steps, grew_until=grew_until, devices=(device,),
        memory_bytes=12 * GIB, context_bytes=400_000_000, context_source="", seconds=1.0, host_peak_bytes=0,
        snapshot=None, leaks={0: leak} if full_step else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (rehearsal(8 * GIB), f"{FITS}: the program ran to its end."),
        (rehearsal(8 * GIB, "enough"), f"{FITS}: memory grew until step 2, and the rehearsal ended after step 50."),
        (
            rehearsal(12 * GIB),
            f"{FITS}, though the safe upper bound is 377 MiB above the memory: the program ran to its end.",
        ),
        (
            rehearsal(12 * GIB, flushes=3),
            f"{FITS}, though the safe upper bound is 377 MiB above the memory and the allocator had to return "
            "its cache 3 times: the program ran to its end.",
        ),
        (
            rehearsal(8 * GIB, flushes=1),
            f"{FITS}, though the allocator had to return its cache once: the program ran to its end.",
        ),
        (
            rehearsal(8 * GIB, "enough", full_step=134),
            f"{FAILS}: memory in use grows by 80 MiB with each step, and the GPU is full at about step 134.",
        ),
        (
            rehearsal(8 * GIB, full_step=353),
            f"{FAILS}: memory in use grows by 80 MiB with each step, and the GPU is full at about step 353 "
            "(the program ended after step 50).",
        ),
        (
            rehearsal(12 * GIB, "out of memory", full_step=51),
            f"{FAILS}: it ran out of memory in step 51: memory in use grows by 80 MiB with each step.",
        ),
        (
            rehearsal(8 * GIB, "enough", full_step=200_000),
            f"{FITS}: memory grew until step 2, and the rehearsal ended after step 50.",
        ),
        (
            rehearsal(8 * GIB, "failed", message="ValueError: x\nmore", full_step=134),
            "The program failed: ValueError: x",
        ),
    ],
)
def test_the_first_line_is_the_answer(found: Rehearsal, says: str) -> None:
    assert _headline(Request(target="train.py", gpu="RTX 3060"), found) == says
