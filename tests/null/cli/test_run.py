"""``brim run`` as typed and mistyped, and ``import brim.auto``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim.cli import main
from brim.errors import UsageError
from brim.run.script import run as launch


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "Name a script"),
        (["run", "missing.py"], "There is no file 'missing.py'"),
        (["run", "--mode", "fast", __file__], "stream"),
        (["run", "--ram", "3 elephants", __file__], "8GiB"),
        (["run", "--device", "tpu", __file__], "cuda"),
        (["run", "--report", "report.txt", __file__], ".html and .json"),
        (["run", "--report", "/not/there/report.html", __file__], "not a folder"),
        (["run", "--lr", "3", __file__], "--lr"),
        (["run", "-m"], "-m"),
    ],
)
def test_a_wrong_command_line_runs_nothing(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert told in output.err


def test_help_is_brim_s_before_the_script_and_the_script_s_after_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    ours = subprocess.run([sys.executable, "-m", "brim", "run", "--help"], capture_output=True, text=True, check=True)
    assert "SCRIPT" in ours.stdout and "--mode" in ours.stdout
    its = subprocess.run(
        [sys.executable, "-m", "brim", "run", "--mode=off", str(script), "--help", "-m"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert its.stdout == "['--help', '-m']\n"


def test_settings_come_from_the_environment() -> None:
    given = {"BRIM_RAM": "3GiB", "BRIM_MODE": "stream", "BRIM_REPORT": "r.html", "BRIM_VRAM": ""}
    found = launch.Settings.of_environment(given)
    assert found == launch.Settings(ram="3GiB", mode="stream", report=Path("r.html"))
    with pytest.raises(UsageError, match="fast"):
        launch.Settings.of_environment({"BRIM_MODE": "fast"})


def test_brim_auto_does_nothing_under_brim_run_and_a_program_has_one_budget(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, brim.auto\nfrom brim.run.script.run import is_watched\n"
        "print(is_watched(), 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-m", "brim", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BRIM_MODE": "nonsense"})
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


def test_a_setting_that_is_wrong_stops_the_import() -> None:
    command = [sys.executable, "-c", "import brim.auto"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "BRIM_RAM": "much"})
    assert done.returncode == 1
    assert "Cannot read 'much' as an amount of memory" in done.stderr
