"""What is planned does not depend on how fast, or how busy, this computer is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import brim

SEARCHES = (
    "planning/solver/search.py", "planning/solver/training.py", "planning/solver/streaming.py",
    "planning/meshes/offload.py", "planning/meshes/search.py", "planning/strategy/search.py",
    "planning/nearest.py", "planning/ranks.py",
)  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_for_a_plan_reads_no_clock(name):
    tree = ast.parse((Path(brim.__file__).parent / name).read_text(encoding="utf-8"))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not {"time", "datetime"} & imported
    assert "time_limit" not in texts  # HiGHS' own
