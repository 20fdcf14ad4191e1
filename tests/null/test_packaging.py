"""What an installation that is not editable has to hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

import brim

PACKAGE = Path(brim.__file__).parent
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_every_file_of_the_package_is_installed_with_it() -> None:
    """setuptools takes Python files of packages, and what ``package-data`` names."""
    named = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["brim"]
    data = {path for pattern in named for path in PACKAGE.glob(pattern)}
    for path in PACKAGE.rglob("*"):
        is_module = path.suffix == ".py" and (path.parent / "__init__.py").exists()
        if path.is_file() and "__pycache__" not in path.parts and not is_module:
            assert path in data, f"{path.relative_to(PACKAGE)} is in no pattern of package-data"


def test_the_licence_that_is_claimed_is_there() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    (file,) = project["license-files"]
    assert "Version 2.0, January 2004" in (PROJECT.parent / file).read_text(encoding="utf-8")
