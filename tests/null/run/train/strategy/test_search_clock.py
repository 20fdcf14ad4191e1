"""What is planned does not depend on how fast, or how busy, this computer is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import brim

SEARCHES = (
    "planner/search.py", "planner/training.py", "planner/streaming.py", "planner/meshes/offload.py",
    "planner/meshes/search.py", "run/train/strategy/search.py", "run/plan/nearest.py", "run/plan/meshes.py",
    "run/plan/meshes_nearest.py",
)  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_for_a_plan_reads_no_clock(name):
    tree = ast.parse((Path(brim.__file__).parent / name).read_text(encoding="utf-8"))
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not {"time", "datetime"} & imported
    assert "time_limit" not in texts  # HiGHS' own
