"""Size and shape of the package: lines, tokens, folders, imports, docstrings and names, each with its limit.

    python bench/size_and_shape.py [--list docstrings|names|pairs|cycles|single-importer]

It ends with 1 where a count is above its limit. A limit is the count of the last change: a change that lowers a count
lowers the limit with it, and none raises one. What each shall become is in the column beside it.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src"
VAGUE_OPENINGS = ("What", "Whether", "One", "Of", "Where", "Which")
VAGUE_NAMES = ("told", "asked", "found", "made", "kept", "held", "whole", "one", "way")
_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass(frozen=True)
class Limit:
    most: int
    goal: int


LIMITS = {
    "lines": Limit(86_323, 66_000),
    "tokens": Limit(646_767, 490_000),
    "modules in the largest folder": Limit(18, 20),
    "pairs of folders that import each other": Limit(0, 0),
    "modules in import cycles": Limit(0, 0),
    "modules with exactly one importer": Limit(59, 60),
    "docstrings with a vague opening": Limit(0, 100),
    "vague names": Limit(0, 0),
}


@dataclass(frozen=True)
class Module:
    """A source file; ``name`` is dotted, that of a package without its ``__init__``."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(root: Path) -> list[Module]:
    result = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        result.append(Module(name, path, ast.parse(path.read_text(), str(path))))
    return result


def tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type in _TOKENS for token in tokenize.tokenize(file.readline))


def imports(module: Module, names: set[str]) -> set[str]:
    """The modules of the package that ``module`` imports, late imports and those for types included."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names) or {node.module}
    return (found & names) - {module.name}


def cyclic(graph: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        queue = list(graph[start])
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                queue += graph[name]
        reached[start] = seen
    return {name for name in graph if name in reached[name]}


def mutual_folders(all_modules: list[Module], graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of folders, neither inside the other, with imports both ways."""
    folder_of = {module.name: module.folder for module in all_modules}
    arrows = {(folder_of[name], folder_of[other]) for name in graph for other in graph[name]}
    folders = sorted(set(folder_of.values()))
    apart = [(a, b) for a, b in combinations(folders, 2) if not f"{b}.".startswith(f"{a}.")]
    return [(a, b) for a, b in apart if (a, b) in arrows and (b, a) in arrows]


def vague_docstrings(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if text.partition(" ")[0].rstrip(",.:;") in VAGUE_OPENINGS:
                yield f"{module.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def vague_names(module: Module) -> Iterator[str]:
    """Functions, classes, parameters and attributes that have one of the names."""
    for node in ast.walk(module.tree):
        name, line = None, getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
            yield from _vague_fields(module, node)
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name is not None and name.strip("_").lower() in VAGUE_NAMES:
            yield f"{module.path.relative_to(ROOT)}:{line}: {name}"


def _vague_fields(module: Module, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        for line in node.body:
            target = line.target if isinstance(line, ast.AnnAssign) else None
            if isinstance(target, ast.Name) and target.id.strip("_") in VAGUE_NAMES:
                yield f"{module.path.relative_to(ROOT)}:{line.lineno}: {target.id}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", choices=["docstrings", "names", "pairs", "cycles", "single-importer"])
    listed = parser.parse_args().list
    all_modules = modules(ROOT)
    names = {module.name for module in all_modules}
    graph = {module.name: imports(module, names) for module in all_modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            importers[other].add(name)
    files = [module for module in all_modules if module.path.name != "__init__.py"]
    lists = {
        "docstrings": [line for module in all_modules for line in vague_docstrings(module)],
        "names": [line for module in all_modules for line in vague_names(module)],
        "pairs": [" <-> ".join(pair) for pair in mutual_folders(all_modules, graph)],
        "cycles": sorted(cyclic(graph)),
        "single-importer": [
            f"{m.name} <- {next(iter(importers[m.name]))}" for m in files if len(importers[m.name]) == 1
        ],
    }
    if listed:
        print("\n".join(lists[listed]))
        return 0
    counts = {
        "lines": sum(len(module.path.read_text().splitlines()) for module in all_modules),
        "tokens": sum(tokens(module.path) for module in all_modules),
        "modules in the largest folder": max(Counter(module.folder for module in files).values()),
        "pairs of folders that import each other": len(lists["pairs"]),
        "modules in import cycles": len(lists["cycles"]),
        "modules with exactly one importer": len(lists["single-importer"]),
        "docstrings with a vague opening": len(lists["docstrings"]),
        "vague names": len(lists["names"]),
    }
    print(f"{'':40} {'now':>8} {'limit':>8} {'goal':>8}")
    for name, limit in LIMITS.items():
        print(f"{name:40} {counts[name]:8,} {limit.most:8,} {limit.goal:8,}")
    over = [name for name, limit in LIMITS.items() if counts[name] > limit.most]
    if over:
        print(f"above the limit: {', '.join(over)}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
