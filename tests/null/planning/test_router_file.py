"""Router statistics: made by a short run, kept in a file, and what a plan makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import FormatError, UsageError
from brim.planning.generation import propose
from brim.planning.opening import Subjects
from brim.planning.request import Request, machine_of
from brim.planning.router_file import Routers
from brim.run.plan import search as router_recording
from brim.run.plan.search import routers_of
from brim.techniques.experts.router_statistics import RouterStatistics
from brim.techniques.experts.technique import EXPERT_SLOTS, find_experts
from support.families import make
from support.tiny_model import save_tokenizer

WIDE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "vocab_size": 300,
    "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "mixture"
    make("qwen3-moe", num_hidden_layers=2, num_experts=16, vocab_size=300).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(WIDE))
    return path


@pytest.mark.thorough
def test_a_short_run_is_made_once_and_kept(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, path = Request(model=mixture, batch=2), tmp_path / "new" / "routers.json"
    made = routers_of(asked, str(path))
    assert len(made) == 2
    for layer in made.values():
        assert layer.count == 16
        assert len(layer.visits) >= 30  # one call for each token
        assert 2 <= layer.distinct <= 4  # two sequences that ask for two experts each
        assert all(sum(visit.values()) == pytest.approx(1, abs=0.01) or len(visit) for visit in layer.visits)
    monkeypatch.setattr(router_recording, "load", None)  # it is not run again
    assert routers_of(asked, str(path)) == made
    with pytest.raises(UsageError, match="--batch 1"):
        routers_of(Request(model=mixture), str(path))


@pytest.mark.thorough
def test_auto_keeps_them_for_this_very_model(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = routers_of(Request(model=mixture), "auto")
    (kept,) = (tmp_path / "brim").glob("routers-*.json")
    monkeypatch.setattr(router_recording, "load", None)
    assert routers_of(Request(model=mixture), "auto") == made
    assert json.loads(kept.read_text())["kind"] == "RouterFile"


def test_what_is_no_file_of_statistics_is_refused(mixture: Path, tmp_path: Path) -> None:
    path = tmp_path / "routers.json"
    path.write_text("{}")
    with pytest.raises(FormatError, match="router statistics"):
        routers_of(Request(model=mixture), str(path))
    layer = {"count": 4, "visits": [{"9": 1.0}]}
    document = {"kind": "RouterFile", "version": 1, "model": "m", "batch": 1, "layers": {"a": layer}}
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="does not have"):
        routers_of(Request(model=mixture), str(path))
    with pytest.raises(UsageError, match="needs the model's weights"):
        routers_of(Request(model="mixtral-8x7b"), str(tmp_path / "other.json"))


def found(wide: Path, routers: Routers) -> Any:
    asked = Request(model=wide, gpu="RTX 3060", vram="160MiB", ram="8GiB", seq=16, new_tokens=4)
    return propose(Subjects(wide, routers).open(asked, machine_of(asked)))


@pytest.mark.thorough
def test_a_router_with_favourites_makes_a_faster_plan_of_the_same_memory(wide: Path) -> None:
    plain = found(wide, {})
    paths = [layer.path for layer in find_experts(plain.subject.module)]
    favourites = RouterStatistics(count=32, visits=tuple({0: 0.5, 1: 0.5} for _ in range(16)))
    told = found(wide, dict.fromkeys(paths, favourites))
    assert told.plan.settings[EXPERT_SLOTS] >= 2
    assert told.plan.promise.step_s < 0.9 * plain.plan.promise.step_s


def test_statistics_of_another_model_are_refused(wide: Path) -> None:
    other = RouterStatistics(count=8, visits=({0: 1.0},))
    with pytest.raises(UsageError, match="router statistics"):
        found(wide, {"model.layers.0.mlp.experts": other})
