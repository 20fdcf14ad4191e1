"""Kinds of programs under ``brim run``: with a budget that is enough they do what they do plainly, bit for bit; with
one that is not, the same, or one error of brim's and no traceback through it.

The programs are in ``tests/scripts/kinds``: generation in its forms, pipelines, branches on values, TorchScript and
exports, quantized modules, hooks that move things, workers and children, torch.func, autograd functions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.errors import BudgetError
from brim.run.script.script import Program
from support.launching import OWN, SCRIPTS, budgeted, plainly

KINDS = sorted(path.stem for path in (SCRIPTS / "kinds").glob("*.py"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_a_program_of_its_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_SCRATCH", "/dev/shm" if Path("/dev/shm").is_dir() else str(tmp_path))
    what = Program(target=str(SCRIPTS / "kinds" / f"{name}.py"))
    plain = plainly(what, tmp_path, measure=False)
    assert plain.code == 0, plain.err
    ample = budgeted(what, tmp_path, ram="4GiB", device="cpu")
    assert (ample.code, ample.out) == (plain.code, plain.out), ample.err
    assert "fitted" not in ample.err
    tight = budgeted(what, tmp_path, ram="1200KiB", device="cpu")
    assert OWN not in tight.err, "no traceback of brim's"
    if tight.code == BudgetError.exit_code:
        assert "Error: Cannot run " in tight.err
        assert "or more, or --mode off." in tight.err
    else:
        assert (tight.code, tight.out) == (plain.code, plain.out), tight.err
