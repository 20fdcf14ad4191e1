"""Modules are where readers look for them: few in a folder, named once, and what texts call by name is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import brim

PACKAGE = Path(brim.__file__).parent
ROOT = Path(__file__).parents[2]
MOST = 21  # modules of a folder, its __init__.py not counted
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
TREES = ("src", "tests", "bench", "examples", "docs")

_PATH = re.compile(r"[\w./-]*\w\.py\b")
_DOTTED = re.compile(r"(?<![\w./@-])[a-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/])")
_FILE = re.compile(r"\.(?:brim|c|cpp|cu|gz|h|html|jsonl?|md|pickle|py|rst|safetensors|txt|yaml)$")
_URL = re.compile(r"https?://\S+")
# Where a path of this repository begins. Others are of libraries: sources are cited by path.
_OURS = {*TREES, "brim", *(path.name for path in PACKAGE.iterdir() if path.is_dir())}
# Files that are named without a folder and are not here: of users, and of libraries that a text cites.
_ELSEWHERE = {
    "file.py", "model.py", "train.py", "_attention.py", "_fsdp_collectives.py", "ce_chunked_output_loss.py",
    "coverage.py", "float8_ops.py", "moe_utils.py", "rendezvous.py", "schedules.py", "stage.py",
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_has_few_modules_and_they_do_not_repeat_its_name(folder: Path) -> None:
    names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(names) <= MOST
    assert not [name for name in names if name.startswith(f"{folder.name}_")]


@pytest.mark.thorough
@pytest.mark.parametrize("tree", ["src/brim", "tests", "bench", "examples"])
def test_files_that_docstrings_and_comments_name_are_there(tree: str) -> None:
    anywhere = _ELSEWHERE | {path.name for name in TREES for path in (ROOT / name).rglob("*.py")}
    missing = []
    for file in sorted((ROOT / tree).rglob("*.py")):
        tops = (ROOT, ROOT / "src", PACKAGE, file.parent)
        for path in (path for text in texts(file) for path in _PATH.findall(text)):
            first, slash, _ = path.partition("/")
            there = (
                path in anywhere if not slash else first not in _OURS or any((top / path).exists() for top in tops)
            )
            if not there:
                missing.append(f"{file.relative_to(ROOT)}: {path}")
    assert not missing


@pytest.mark.thorough
def test_modules_that_docstrings_and_comments_name_are_there() -> None:
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in (name for text in texts(file) for name in gone(text, file)):
            missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert not missing


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
)
def test_modules_that_pages_name_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [name for span in re.findall(r"`[^`]+`", text) for name in gone(span)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("as ``brim.planning.solver.search`` does", []),
        ("as ``brim.planning.solver.searching`` does", ["brim.planning.solver.searching"]),
        ("``planning.solver.search.Solution``, ``planning.solver.search``", []),
        (
            "``planning.solver.search.Row``, ``planning.solver.seek``",
            ["planning.solver.search.Row", "planning.solver.seek"],
        ),
        ("``searching_ways.best``", ["searching_ways.best"]),
        ("``peak_bytes.allocated`` of ``torch.cuda.memory_stats()`` in model.json", []),
    ],
)
def test_what_is_gone_is_found(text: str, found: list[str]) -> None:
    assert list(gone(text)) == found


def texts(file: Path) -> Iterator[str]:
    """The docstrings and the comments of a file. A path may go over the end of a line."""
    source = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"/\n *", "/", ast.get_docstring(node) or "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def gone(text: str, file: Path | None = None) -> Iterator[str]:
    """Dotted names in ``text`` that lead to no module of brim and to nothing else that its code names.

    A name that begins with a package of brim's must be that of a module or of what stands in one, unless
    code in ``file`` calls something else by its first word. One that begins with words joined by underscores must
    begin with a module's name or with one that code defines.
    """
    own = names_of(file) if file else frozenset()
    for name in _DOTTED.findall(_URL.sub("", text)):
        first = name.partition(".")[0]
        if _FILE.search(name) or first in own:
            continue
        if first == "brim" or f"brim.{first}" in modules():
            if not leads_somewhere(name if first == "brim" else f"brim.{name}"):
                yield name
        elif "_" in first.strip("_") and first not in defined_names():
            yield name


def leads_somewhere(name: str) -> bool:
    """Whether ``name`` is a module, a part of one, or one of brim's public names and what belongs to it."""
    if name in modules():
        return True
    module = name
    while module not in modules():
        module, _, part = module.rpartition(".")
    return part in brim.__all__ if module == "brim" else part in modules()[module]


@cache
def modules() -> dict[str, frozenset[str]]:
    """Every module of brim by name, and what stands at its top level."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = frozenset().union(*map(names_given, tree.body))
    return found


@cache
def defined_names() -> frozenset[str]:
    """What code of brim defines anywhere, and the last word of every module's name."""
    last = {name.rpartition(".")[2] for name in modules()}
    return frozenset(last.union(*(names_of(path, imports=False) for path in PACKAGE.rglob("*.py"))))


@cache
def names_of(file: Path, *, imports: bool = True) -> frozenset[str]:
    """Names that code in ``file`` gives to anything; with ``imports``, to what it imports too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif imports or not isinstance(node, ast.Import | ast.ImportFrom):
            found |= names_given(node)
    return frozenset(found)


def names_given(node: ast.AST) -> set[str]:
    """Names that a statement gives to what it defines, assigns or imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With | ast.NamedExpr | ast.comprehension):
        return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return set()
