"""A model of the hub is planned without its weights, and as a folder is where the hub's cache has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.cli import main
from brim.estimation.hub import hub_model
from support.generating import save_words_llama
from support.hub import Hub, hub

__all__ = ["hub"]


@pytest.mark.thorough
def test_a_model_of_the_hub_is_planned_then_fetched_and_planned_by_its_weights(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_words_llama(tmp_path / "llama", layers=2)
    hub.add_folder("org/llama", folder)
    weights_bytes = (folder / "model.safetensors").stat().st_size

    def plan(model: str) -> dict[str, Any]:
        words = ["--task", "generate", "--ram", "2GiB", "--seq", "16", "--new-tokens", "4", "--json"]
        assert main(["plan", model, *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    described = plan("org/llama")
    assert described["plans"] and hub.sent_bytes < weights_bytes
    words = ["--prompt", "a", "--max-new-tokens", "2", "--ram", "2GiB", "--device", "cpu"]
    hub.errors["org/llama"] = 500, ""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between the client's tries
    assert main(["generate", "org/llama", *words]) == 2
    assert "answered with an error (500)" in capsys.readouterr().err  # not: its folder has no weights
    del hub.errors["org/llama"]
    assert main(["generate", "org/llama", *words]) == 0
    assert hub.sent_bytes > weights_bytes
    capsys.readouterr()
    hub_model.cache_clear()
    hub.errors["org/llama"] = 500, ""
    by_weights, of_folder = plan("org/llama"), plan(str(folder))
    differ_bytes = by_weights["plans"][0]["peak_bytes"]["ram"] - of_folder["plans"][0]["peak_bytes"]["ram"]
    assert abs(differ_bytes) < 4 << 20  # what this process holds beside tensors grew between the two
