"""Plans for other engines are read back by the engines' own functions, and their bytes add up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils.modeling import check_device_map
from transformers import AutoConfig, AutoModelForCausalLM

from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UnsupportedError, UsageError
from brim.planning.engines.answer import EnginePlan, first_that_fits
from brim.planning.engines.inference import accelerate
from brim.planning.request import machine_of
from brim.requests.plan import MeshRequest
from support.planned import LLAMA
from support.recorded_cases import MOE
from support.tiny_model import save_llama

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 512, "n_layer": 6, "n_head": 8,
        "vocab_size": 5000, "dtype": "float32"}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "tied": TIED, "moe": MOE, "gpt2": GPT2}
BUDGETS = (("12GiB", "8GiB"), ("200MiB", "8GiB"), ("170MiB", "350MiB"))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(MODELS[request.param]))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def planned(engine: Callable[..., Any], model: object, **settings: Any) -> EnginePlan:
    request = MeshRequest(model=str(model), **{"gpu": "RTX 3060", "seq": 64, "new_tokens": 16, **settings})
    plan: EnginePlan = first_that_fits(engine(request, machine_of(request)))
    for tier, count in plan.peak_bytes.items():
        assert 0 <= count <= plan.machine.budget_bytes[tier]
    return plan


def weights(plan: EnginePlan) -> dict[str, int]:
    return {tier: parts["weights"] for tier, parts in plan.bytes.items() if "weights" in parts}


def on_meta(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).to(config.dtype)  # buffers too


def distinct_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


# -- accelerate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vram", "ram"), BUDGETS)
def test_accelerate_reads_the_device_map_and_counts_the_same_bytes(model: Path, vram: str, ram: str) -> None:
    plan = planned(accelerate, model, vram=vram, ram=ram)
    device_map, module = json.loads(plan.file), on_meta(model)
    check_device_map(module, device_map)
    for tier, device in ((VRAM, 0), (RAM, "cpu"), (DISK, "disk")):
        tensors = [t for path, where in device_map.items() if where == device for t in tensors_of(module, path)]
        assert distinct_bytes(tensors) == weights(plan)[tier]
    assert sum(weights(plan).values()) == distinct_bytes([*module.parameters(), *module.buffers()])


def tensors_of(module: Any, path: str) -> list[torch.Tensor]:
    owner = module.get_submodule(path)
    return [*owner.parameters(), *owner.buffers()]


def test_accelerates_own_map_takes_no_more_of_the_gpu_with_the_same_max_memory(llama: Path) -> None:
    plan, module = planned(accelerate, llama, vram="200MiB", ram="8GiB"), on_meta(llama)
    own = infer_auto_device_map(module, plan.settings["max_memory"], no_split_module_classes=module._no_split_modules)
    theirs = distinct_bytes([t for path, where in own.items() if where == 0 for t in tensors_of(module, path)])
    assert 0 < theirs <= plan.settings["max_memory"][0]
    assert theirs <= weights(plan)[VRAM] <= plan.settings["max_memory"][0]


def test_a_decoder_layer_is_never_divided_and_shared_weights_are_together(model: Path) -> None:
    device_map = json.loads(planned(accelerate, model, vram="200MiB", ram="8GiB").file)
    numbered = [path for path in device_map if any(part.isdecimal() for part in path.split("."))]
    assert numbered and all(path.rpartition(".")[2].isdecimal() for path in numbered)
    module = on_meta(model)
    users: dict[int, set[object]] = {}
    for path, where in device_map.items():
        for tensor in tensors_of(module, path):
            users.setdefault(id(tensor), set()).add(where)
    assert all(len(places) == 1 for places in users.values())


@pytest.mark.thorough
def test_a_model_loaded_by_the_map_from_ram_and_disk_has_equal_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(tmp_path / "llama", hidden=64, layers=4)
    request = MeshRequest(model=str(folder), seq=8, new_tokens=8, ram="300MiB")
    machine = machine_of(request)
    plans = list(accelerate(request, machine))
    plan = next(p for p in plans if 0 < p.bytes[DISK]["weights"] < sum(weights(p).values()))
    device_map = json.loads(plan.file)
    assert set(device_map.values()) == {"cpu", "disk"}
    ids = torch.arange(8)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    offloaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, offloaded(ids).logits)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"task": "train"}, UsageError, "Add --task generate"),
        ({"gpus": 2}, UsageError, "one GPU"),
        ({"precision": "int4"}, UsageError, "brim's own"),
        ({"seq": 5000}, UsageError, "at most 4096 tokens"),
        ({"vram": "5MiB", "ram": "100MiB"}, BudgetError, "of VRAM and"),
    ],
)
def test_accelerate_refuses(llama: Path, settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        planned(accelerate, llama, **settings)


def test_the_least_budget_of_a_refusal_is_enough(llama: Path) -> None:
    with pytest.raises(BudgetError) as refused:
        planned(accelerate, llama, vram="5MiB", ram="8GiB")
    assert planned(accelerate, llama, vram=refused.value.smallest_bytes[VRAM], ram="8GiB")


def test_packed_weights_are_not_placed_by_a_device_map(tmp_path: Path) -> None:
    packed = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    with pytest.raises(UnsupportedError, match="packed weights"):
        planned(accelerate, tmp_path)
