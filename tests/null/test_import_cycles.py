"""No module imports itself by way of others, wherever the imports stand: on top, in functions, or for types only."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import brim

PACKAGE = Path(brim.__file__).parent


def test_no_module_is_in_an_import_cycle() -> None:
    import_cycles = cycles(imports_of_each_module(PACKAGE))
    assert not import_cycles, "\n".join(
        f"These modules import each other: {', '.join(cycle)}." for cycle in import_cycles
    )


@pytest.mark.parametrize(
    "line",
    [
        "import package.other",
        "from package.other import name",
        "from package import other",
        "from .other import name",
        "from . import other",
        "def function():\n    from package.other import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.other import name",
    ],
)
def test_an_import_counts_wherever_it_stands(tmp_path: Path, line: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(line)
    (package / "other.py").write_text("from package.third import name")
    (package / "third.py").write_text("import package.one")
    imports = imports_of_each_module(package)
    assert imports["package.one"] == {"package.other"}
    assert cycles(imports) == [["package.one", "package.other", "package.third"]]


def test_a_package_that_imports_its_module_is_in_no_cycle_until_that_imports_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.one import name")
    (package / "one.py").write_text("")
    assert cycles(imports_of_each_module(package)) == []
    (package / "one.py").write_text("from package import version")
    assert cycles(imports_of_each_module(package)) == [["package", "package.one"]]


def imports_of_each_module(package: Path) -> dict[str, set[str]]:
    """The modules that each module of ``package``, a folder, names in its import statements."""
    paths = {module_name(package, path): path for path in sorted(package.rglob("*.py"))}
    return {name: set(imported(name, path, paths)) for name, path in paths.items()}


def module_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules among ``modules`` that the module ``name`` imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute_origin(name, path, node)
            for alias in node.names:
                # ``from package import x`` names the module x where there is one, or else something in the package.
                target = f"{origin}.{alias.name}"
                yield from [m for m in (target if target in modules else origin,) if m in modules]


def absolute_origin(name: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    base = parents[: len(parents) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that all reach each other, sorted: strongly connected components, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(imports[module]):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1 or module in imports[module]:
                components.append(sorted(component))

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return sorted(components)
