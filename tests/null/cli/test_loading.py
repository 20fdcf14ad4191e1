"""Commands load PyTorch once, load no more than they need, and search for no garbage in what it made."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_model import save_llama

CYCLE = """
class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("collected")
"""


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=64, layers=2)


def test_garbage_is_looked_for_in_what_comes_after_loading_only():
    code = f"""{CYCLE}
import gc
from brim.cli.loading import load
before = Cycle()
load("brim.core")
del before
gc.collect()
print("loaded", gc.isenabled())
after = Cycle()
del after
gc.collect()
"""
    assert child(code).split() == ["loaded", "True", "collected"]


def test_garbage_from_before_is_freed_first():
    code = f"""{CYCLE}
import gc
from brim.cli.loading import load
gc.disable()
Cycle()
load("brim.core")
print("loaded")
"""
    assert child(code).split() == ["collected", "loaded"]


def test_at_the_exit_functions_run_and_nothing_is_looked_through():
    code = f"""{CYCLE}
import atexit
from brim.cli.loading import load
load("brim.core")
atexit.register(print, "closed")
kept = Cycle()
"""
    assert child(code).split() == ["closed"]


def test_a_module_that_cannot_be_loaded_leaves_collections_on():
    code = """
import gc
from brim.cli.loading import load
try:
    load("brim.nothing")
except ModuleNotFoundError as error:
    print(error.name, gc.isenabled())
"""
    assert child(code).split() == ["brim.nothing", "True"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "needless"),
    [
        (
            ["plan", "--gpu", "RTX 3060", "--seq", "16", "--new-tokens", "4"],
            {"peft", "scipy", "brim.estimation.ranks.estimate"},
        ),
        (
            ["estimate", "--seq", "16"],
            {
                "peft",
                "scipy",
                "highspy",
                "brim.planning.inference.machine",
                "brim.planning.request",
                "brim.planning.solver",
            },
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_what_it_needs_and_freezes_it(llama, command, needless):
    code = f"""
import gc, sys
from brim.cli import main
main([{command[0]!r}, {str(llama)!r}, *{command[1:]!r}, "--json"])
print()
print(sorted({needless!r} & set(sys.modules)), gc.get_freeze_count() > 500_000, gc.isenabled())
"""
    assert child(code).splitlines()[-1] == "[] True True"
