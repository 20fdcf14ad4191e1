"""docs/reference.md is what the docstrings say now, and they say everything that is public."""

import importlib.util
from pathlib import Path

import pytest

import brim

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say(maker):
    made = maker.text()  # raises ValueError for an argument, a field or a method that no docstring names
    assert made == maker.FILE.read_text(encoding="utf-8"), "Run make reference, and commit docs/reference.md."


def test_every_exported_name_is_in_the_reference(maker):
    listed = {name for module, name, _ in maker._SECTIONS["Functions"] if module == "brim"}
    assert listed == {name for name in brim.__all__ if not name.startswith("_")}


def test_what_a_docstring_leaves_out_is_told(maker):
    def short(first: int, second: int) -> None:
        """Do it.

        Args:
            first: A number.
        """

    missing = []
    list(maker._function(short, missing))
    assert missing == ["short(second)"]
