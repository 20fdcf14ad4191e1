"""Results of the Python functions read as the commands print them."""

from __future__ import annotations

import pytest

import brim
from brim.cli import main


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", [{}, {"gpu": "RTX 3060"}])
def test_an_estimate_reads_as_the_command_prints_it(gpu, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = [word for name, value in gpu.items() for word in (f"--{name}", value)]
    estimate = brim.estimate("gpt2", batch=2, seq=64, **gpu)
    assert main(["estimate", "gpt2", "--batch", "2", "--seq", "64", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = estimate.summary().splitlines()
    assert not capsys.readouterr().out
    assert lines[1:3] == printed[1:3]
    assert lines[0].removesuffix(".") in printed[0]  # the command also solves for the largest batch
    assert {line for line in lines[3:] if line.strip()} <= set(printed)
    assert repr(estimate) == ("<Estimate: gpt2 on NVIDIA GeForce RTX 3060>" if gpu else "<Estimate: gpt2>")


@pytest.mark.thorough
def test_plans_read_as_the_command_prints_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    answer = brim.plan("gpt2", gpu="RTX 3060", seq=64)
    assert main(["plan", "gpt2", "--gpu", "RTX 3060", "--seq", "64"]) == 0
    printed = capsys.readouterr().out.splitlines()
    summary = answer.summary().splitlines()
    assert summary[:2] == printed[:2]
    assert repr(answer).startswith("<Answer: gpt2: generate on ")
    assert answer._repr_html_().startswith("<pre>Fits with ")
