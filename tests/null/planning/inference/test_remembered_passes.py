"""What a second generation with the same model leaves out: fake passes, the search for cuts, what predicts steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.models.opening import open_model
from brim.models.weights import materialize
from brim.planning.inference import choosing, remembered_passes
from brim.planning.inference.memory import Sizes, cache_shape, watch_generation
from brim.planning.inference.remembered_passes import RememberedPasses
from brim.run.generate.request import Generation, Request, generate
from brim.techniques.blocks import Partition, find_blocks
from support.generating import FAMILIES, save

SIZES = Sizes(prompt=7, total=12, chunk=4)


def refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was not to be called")

    for name in names:
        monkeypatch.setattr(owner, name, never)


def generated(folder: Path, prompt: str = "one more thing") -> Generation:
    return generate(Request(model=folder, prompt=prompt, max_new_tokens=3))


def opened(folder: Path) -> Any:
    made = open_model(folder)
    materialize(made.module, made)
    return made.module


def test_a_second_generation_with_a_model_that_fits_makes_no_fake_pass_and_searches_no_cuts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "llama", "llama")
    first = generated(folder)
    refuse(monkeypatch, remembered_passes, "cache_shape", "watch_generation")
    thresholds: list[int | None] = []

    def watched(*arguments: Any, largest_bytes: int | None = None, **options: Any) -> Partition:
        thresholds.append(largest_bytes)
        return find_blocks(*arguments, largest_bytes=largest_bytes, **options)

    monkeypatch.setattr(choosing, "find_blocks", watched)
    second = generated(folder)
    assert thresholds == [None]  # no finer blocks were sought
    assert second.token_ids == first.token_ids
    assert second.plan.decisions == first.plan.decisions


@pytest.mark.thorough
def test_another_prompts_length_takes_one_pass_and_another_model_both(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "llama", "llama")
    generated(folder)
    with monkeypatch.context() as patch:
        refuse(patch, remembered_passes, "cache_shape")
        generated(folder, "one more thing to go on from")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
        with pytest.raises(AssertionError, match="not to be called"):
            generated(folder)
    generated(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe", "mistral", "jamba", "rwkv", "t5"])
def test_what_is_remembered_is_what_was_seen(name: str, tmp_path: Path, cache: Path) -> None:
    assert name in FAMILIES
    module = opened(save(tmp_path / name, name))
    sizes = [SIZES, Sizes(batch=2, prompt=7, total=12, chunk=7, padded=True, drawn=True)]
    if name in ("jamba", "rwkv", "t5"):
        sizes = sizes[1:]  # their prompts are not cut
    first = RememberedPasses(module)
    seen = [first.watch(each) for each in sizes]
    again = RememberedPasses(module)
    shape = again.shape()
    assert shape == first.shape() == cache_shape(module)
    assert [again.watch(each) for each in sizes] == seen
    assert seen == [watch_generation(module, each, shape) for each in sizes]


@pytest.mark.parametrize("text", ["{", "[]", '{"shape": {"layers": [[1]]}}', '{"seen": {"a": {"step_bytes": 1}}}'])
def test_a_damaged_file_is_told_of_and_made_again(text: str, tmp_path: Path, cache: Path) -> None:
    module = opened(save(tmp_path / "llama", "llama"))
    seen = RememberedPasses(module).watch(SIZES)
    (file,) = (cache / "brim").glob("passes-*.json")
    file.write_text(text)
    with pytest.warns(UserWarning, match="is damaged"):
        passes = RememberedPasses(module)
    assert passes.watch(SIZES) == seen
    assert RememberedPasses(module).watch(SIZES) == seen


def test_only_so_many_sizes_of_a_model_are_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = opened(save(tmp_path / "llama", "llama"))
    monkeypatch.setattr(remembered_passes, "_KEPT", 2)
    for prompt in (3, 4, 5):
        RememberedPasses(module).watch(Sizes(prompt=prompt, total=8, chunk=prompt))
    (file,) = (cache / "brim").glob("passes-*.json")
    found = json.loads(file.read_text())
    assert [json.loads(name)["prompt"] for name in found["seen"]] == [4, 5]
    assert len(found["uses"]) == 1


@pytest.mark.thorough
def test_a_generation_imports_nothing_that_predicts_or_searches_steps_of_other_machines() -> None:
    heavy = "estimate", "simulation", "growth", "depth", "steps"
    code = "import sys, brim.run.generate.request\n"
    code += f"print([name for name in {heavy!r} if f'brim.estimation.{{name}}' in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
