"""Standard streams that are closed, full or of few letters: no traceback, and no success where nothing was told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    words = " ".join(f"'{word}'" for word in (sys.executable, "-m", "brim", *arguments))
    return subprocess.run(
        ["/bin/sh", "-c", f"exec {words} {redirection}"], capture_output=True, env=environment, timeout=60
    )


@pytest.mark.parametrize(("redirection", "reason"), [(">&-", b"Bad file"), (">/dev/full", b"No space left")])
def test_an_output_that_cannot_be_written_is_an_error(redirection: str, reason: bytes) -> None:
    done = run(redirection, "--version")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1 and reason in done.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&-"])
def test_other_streams_may_be_missing(redirection: str) -> None:
    done = run(redirection, "--version")
    assert (done.returncode, done.stdout.startswith(b"brim ")) == (0, True)


@pytest.mark.parametrize("redirection", [">&- 2>&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_with_nobody_to_tell_the_exit_code_tells(redirection: str) -> None:
    assert run(redirection, "--version").returncode == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii", "LC_ALL": "C.UTF-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_letters_that_an_encoding_has_not_are_told_all_the_same(variables: dict[str, str]) -> None:
    done = run("", "explain", "schr\N{LATIN SMALL LETTER O WITH DIAERESIS}dinger-\N{SNOWMAN}", **variables)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert b"dinger-" in done.stderr  # click writes UTF-8 where it is told that there is ASCII alone


def test_a_file_s_name_may_be_of_any_bytes(tmp_path: Path) -> None:
    done = run("", "explain", str(tmp_path / "\udcff"), LC_ALL="C.UTF-8")
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
