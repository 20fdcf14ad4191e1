"""Some of the attacks of ``bench/attacks.py``, a few of each kind: all of them take half an hour."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ATTACKS = Path(__file__).parents[3] / "bench" / "attacks.py"


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="attacks are forked, and mounts are theirs alone")
@pytest.mark.parametrize("which", [("--each-kind", "1"), ("--only", "--batch 1e")])
def test_some_attacks_of_every_kind_hold(which: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ATTACKS), *which], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    kinds = {"arguments", "files", "plans", "data", "templates", "sizes", "streams", "signals", "disks", "machines"}
    tried = set(re.findall(r"^\| ([a-z ]+) \| [1-9]\d* \|", done.stdout, re.M)) - {"all"}
    assert tried == ({"sizes"} if which[0] == "--only" else kinds | {"clocks and locales"})


@pytest.mark.thorough
def test_no_attack_holds_against_a_program_that_does_nothing(tmp_path: Path) -> None:
    """Nor against one that prints its own name, or an error that names nothing."""
    attacks = loaded()
    attacks.make_world(tmp_path)
    offered = list(attacks.attacks(tmp_path))
    assert len(offered) > 800
    for attack in offered:
        for code in (0, 1, 2, 3, 130, 143, -9):
            for text in ("", "brim\n", "Error: Something went wrong.\n"):
                assert attacks.judged(attack, code, text), (attack, code, text)


def test_an_attack_that_may_be_refused_says_what_the_error_names() -> None:
    attacks = loaded()
    with pytest.raises(ValueError, match="does not say what the error must name"):
        attacks.Attack(kind="files", name="any", arguments=["plan"], codes=(2,))


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attacks", ATTACKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attacks"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module
