"""``brim rehearse`` without a device: options, and the search of ``--vary``."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim import cli
from brim.cli.rehearse import largest_that_fits, with_option


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
