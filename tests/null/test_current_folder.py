"""Nothing that lies in the current folder is imported, by brim or by any process that it starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from brim.processes import bound, python_command
from support.planted import plant_modules
from support.tiny_model import save_llama

ROOT = Path(__file__).parents[2]
TREES = ("src/brim", "bench", "examples", "docs")  # what users run; tests run in this repository
THE_PLACE = ROOT / "src/brim/processes.py"
_INTERPRETER = re.compile(r"\b(?:\w*python[\d.]*|(?:sys\.)?executable)\b", re.IGNORECASE)
# Their children begin with `python -c`, or with whatever a shell is told.
_STARTS_BY_CODE = re.compile(
    r"(?:.*\.)?(?:ProcessPoolExecutor|forkserver|get_context|set_start_method|spawn)|os\.(?:popen|system)"
)
BRIM = [str(Path(sys.executable).with_name("brim"))]
NEIGHBOUR = "import neighbour, os\nprint(neighbour.VALUE, os.getcwd())\n"


def elements(node: ast.AST) -> list[ast.expr]:
    """Words that could be a command: what a list holds, or what a call that starts a program is given."""
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    if isinstance(node, ast.Call) and re.match(r"subprocess\.|os\.(?:exec|spawn|posix)", ast.unparse(node.func)):
        return node.args
    return []


def names_interpreter(node: ast.expr) -> bool:
    """A name, an attribute or the word itself, also inside of ``str(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        return names_interpreter(node.args[0])
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.fullmatch(r"(?:.*/)?python[\d.]*", node.value))
    return isinstance(node, ast.Name | ast.Attribute) and bool(_INTERPRETER.search(ast.unparse(node)))


def is_safe(node: ast.expr) -> bool:
    """``-P``, or a file of a program: Python puts that file's own folder first."""
    if isinstance(node, ast.Constant) and node.value == "-P":
        return True
    return not isinstance(node, ast.Starred) and not (isinstance(node, ast.Constant) and str(node.value)[:1] == "-")


def unsafe_starts(source: str) -> Iterator[int]:
    """Lines that start Python so that it imports from the current folder first."""
    for node in ast.walk(ast.parse(source)):
        words = elements(node)
        for word, following in zip_longest(words, words[1:]):
            if names_interpreter(word) and (following is None or not is_safe(following)):
                yield node.lineno  # type: ignore[attr-defined]  # expressions have one
        if isinstance(node, ast.Call) and _STARTS_BY_CODE.fullmatch(ast.unparse(node.func)):
            yield node.lineno
        if isinstance(node, ast.keyword) and node.arg == "shell":
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run([sys.executable, '-m', 'brim'])", "subprocess.run([environment.python, '-c', CODE])",
        "command = [str(python), '-W', 'ignore', '-c', code]", "os.execv(sys.executable, words)[0], [python, *words]",
        "words = [sys.executable]\nwords += ['-m', 'brim']", "subprocess.Popen(['python3', '-m', 'pip'])",
        "multiprocessing.get_context('spawn').Process(target=f)", "torch.multiprocessing.spawn(f)",
        "os.system('python -m brim')",
    ],
)  # fmt: skip
def test_the_search_finds(source: str) -> None:
    assert list(unsafe_starts(source))


@pytest.mark.parametrize(
    "source",
    [
        "[sys.executable, str(HERE / 'worker.py')]",
        "python_command('-m', 'brim')",
        "[sys.executable, '-P', '-m', 'x']",
    ],
)
def test_the_search_leaves(source: str) -> None:
    assert not list(unsafe_starts(source))


@pytest.mark.thorough
@pytest.mark.parametrize("tree", TREES)
def test_every_place_that_starts_python_keeps_the_current_folder_out(tree: str) -> None:
    files = [path for path in sorted((ROOT / tree).rglob("*.py")) if path != THE_PLACE]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in unsafe_starts(file.read_text("utf-8"))]
    assert not found, "start it by brim.processes.python_command"


def test_modules_and_code_find_nothing_in_the_current_folder(tmp_path: Path) -> None:
    marker = plant_modules(tmp_path)
    look = "import json, statistics; print('here')"
    for command in (python_command("-c", look), bound(python_command("-S", "-c", look))):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("here\n", "")
    done = subprocess.run([*BRIM, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("brim ") and not marker.exists()


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NEIGHBOUR)
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    command = python_command(tmp_path / "script.py")
    assert subprocess.run(command, cwd="/", capture_output=True, text=True).stdout == "7 /\n"


def test_python_m_brim_imports_little_from_the_current_folder(tmp_path: Path) -> None:
    """Python itself imports brim by the current folder then; what brim needs comes from where it is installed."""
    for name in ("click", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "brim", "explain", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "imported" not in done.stderr and done.returncode == 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), hidden=64)


PROGRAM = """
import neighbour, torch
print('ran with', neighbour.WIDTH)
def build():
    return torch.nn.Linear(neighbour.WIDTH, 8), torch.ones(2, neighbour.WIDTH)
model = torch.nn.Linear(neighbour.WIDTH, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, neighbour.WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script that imports its neighbour."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "neighbour.py").write_text("WIDTH = 16\n")
    (folder / "script.py").write_text(PROGRAM)
    return folder / "script.py"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        "estimate gpt2 --seq 64", "estimate STEP", "plan MODEL --seq 16 --ram 900MiB",
        "generate MODEL --prompt hi --max-new-tokens 2", "generate MODEL --gpus 2 --prompt hi --max-new-tokens 2",
        "train MODEL --data TEXT --output OUT --seq 16 --batch 1 --steps 2", "run --ram 4GiB SCRIPT", "probe",
        "explain TEXT", "estimate gpt2 --gpus 2 --gpu H100 --seq 64",
    ],
)  # fmt: skip
def test_commands_run_nothing_of_the_current_folder(
    words: str, llama: Path, program: Path, tmp_path: Path, probed_home: Path
) -> None:
    here, text = tmp_path / "here", tmp_path / "text.txt"
    here.mkdir()
    marker = plant_modules(here)
    text.write_text("some text to learn, and nothing more. " * 30)
    names = {"MODEL": llama, "SCRIPT": program, "STEP": f"{program}:build", "TEXT": text, "OUT": tmp_path / "out"}
    command = [*BRIM, *(str(names.get(word, word)) for word in words.split())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=250)
    assert not marker.exists(), f"{marker.read_text()} was imported\n{done.stderr}"
    assert done.returncode == (2 if words == "explain TEXT" else 0), done.stderr
    if "SCRIPT" in words:
        assert "ran with 16" in done.stdout + done.stderr
