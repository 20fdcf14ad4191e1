"""No generation makes PyTorch reserve more of a GPU than was promised, nor promises more than the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import brim
from brim.errors import BudgetError, UsageError
from brim.estimation.step_memory import Inputs
from brim.planning import file as plan_file
from brim.planning.request import Request as Planning
from brim.requests.sampling import Sampling
from brim.run.generate.request import Request, generate, generate_many
from brim.run.plan.search import answer_to
from support.generating import save_words_llama
from support.tiny_model import save_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 1 << 20
IDS: dict[str, Any] = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def _saved(folder: Path, kind: str, configuration: str, **values: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, configuration)(**IDS | SIZES | values)
    getattr(transformers, kind)(config).save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder


def _windows(folder: Path) -> Path:
    return _saved(folder, "Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=64)


def _experts(folder: Path) -> Path:
    experts = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
    return _saved(folder, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **experts)


def _words(folder: Path) -> Path:
    return _saved(folder, "LlamaForCausalLM", "LlamaConfig", vocab_size=16_000)


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: save_words_llama(folder, layers=12),
    "windows": _windows,
    "experts": _experts,
    "many words": _words,
    "many keys": lambda folder: _saved(
        folder, "LlamaForCausalLM", "LlamaConfig", num_hidden_layers=6, num_key_value_heads=8
    ),
}
WORDS = ["one", "more", "thing", "to", "go", "on", "from"]
# model, words of the prompt, new tokens, RAM, what else is asked
CASES: dict[str, tuple[str, int, int, str, dict[str, Any]]] = {
    "llama": ("llama", 7, 5, "2GiB", {}),
    "llama, no help": ("llama", 7, 5, "2GiB", {"host_compute": False}),
    "long": ("llama", 250, 60, "2GiB", {}),
    "long, no help": ("llama", 250, 60, "2GiB", {"host_compute": False}),
    "disk": ("llama", 40, 5, "200MiB", {}),
    "windows": ("windows", 200, 40, "2GiB", {}),
    "experts": ("experts", 40, 5, "2GiB", {}),
    "drawn": ("llama", 40, 5, "2GiB", {"sampling": Sampling(temperature=0.9, seed=1)}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def _clear() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they count too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def said(words: int) -> str:
    return " ".join((WORDS * words)[:words])


def _least(attempt: Callable[[int], object]) -> int:
    """The smallest budget of VRAM, as the error of one that is too small says it."""
    with pytest.raises(BudgetError) as refused:
        attempt(34 * MIB)
    return refused.value.smallest_bytes["vram"]


@pytest.mark.parametrize("case", CASES)
def test_a_generation_keeps_its_promise(case: str, folders: Callable[[str], Path]) -> None:
    name, words, new, ram, asked = CASES[case]
    folder, text = folders(name), said(words)

    def run(vram: int) -> Any:
        request = Request(model=folder, prompt=text, max_new_tokens=new, vram=vram, ram=ram, device="cuda", **asked)
        return generate(request)

    least = _least(run)
    for budget in (least, least + 27 * MIB):
        before = _clear()
        made = run(budget)
        assert len(made.token_ids) == new
        reserved = torch.cuda.max_memory_reserved() - before
        assert reserved <= made.promised_bytes["vram"] <= budget


@pytest.mark.parametrize("batch", [4, "auto"])
def test_many_prompts_keep_the_promise(batch: Any, folders: Callable[[str], Path]) -> None:
    """For 4 of them there is so little that older tokens' keys and values are in RAM."""
    folder, prompts = folders("many keys"), [said(words) for words in (150, 150, 120, 150, 130, 20)]

    def run(vram: int) -> Any:
        request = Request(
            model=folder, prompt=prompts, max_new_tokens=12, batch=batch, vram=vram, ram="2GiB", device="cuda",
            host_compute=False,
        )  # fmt: skip
        return generate_many(request)

    least = _least(run)
    for budget in (least, least + 10 * MIB):
        before = _clear()
        made = run(budget)
        assert made.tokens == 12 * len(prompts)
        assert batch == "auto" or made.plan.settings["kv_resting_tokens"] > 0
        reserved = torch.cuda.max_memory_reserved() - before
        assert reserved <= made.promised_bytes["vram"] <= budget


def test_a_plan_file_is_what_runs(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, file = folders("llama"), tmp_path / "plan.json"
    answer = answer_to(Planning(model=folder, vram=110 * MIB, ram="2GiB", seq=64, new_tokens=5))
    place, best = next((n, one) for n, one in enumerate(answer.proposals) if "vram" in one.plan.budget_bytes)
    plan_file.write(file, answer, place)
    before = _clear()
    made = generate(Request(model=folder, prompt=said(7), max_new_tokens=5, plan=file, device="cuda"))
    reserved = torch.cuda.max_memory_reserved() - before
    assert made.plan.decisions == best.plan.decisions
    assert reserved <= made.promised_bytes["vram"] <= 110 * MIB


def test_a_plan_for_the_processor_is_followed_there(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder, file = folders("llama"), tmp_path / "plan.json"
    answer = answer_to(Planning(model=folder, vram=110 * MIB, ram="2GiB", seq=64, new_tokens=5))
    place = next(n for n, one in enumerate(answer.proposals) if "vram" not in one.plan.budget_bytes)
    plan_file.write(file, answer, place)
    before = _clear()
    made = generate(Request(model=folder, prompt=said(7), max_new_tokens=5, plan=file))
    assert len(made.token_ids) == 5 and torch.cuda.max_memory_reserved() == before
    with pytest.raises(UsageError, match="Cannot use the plan"):
        generate(Request(model=folder, prompt=said(7), max_new_tokens=5, plan=file, device="cuda"))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_loaded_model_keeps_its_promise(name: str, folders: Callable[[str], Path]) -> None:
    folder, inputs = folders(name), Inputs(batch=2, prompt=120, total=160)

    def load(vram: int) -> Any:
        return brim.load(folder, vram=vram, ram="2GiB", device="cuda", inputs=inputs)

    ids = torch.arange(240, device="cuda").view(2, 120) % 300
    least = _least(load)
    for budget in (least, least + 27 * MIB):
        before = _clear()
        model = load(budget)
        model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=2)
        for _ in range(2):
            output = model(ids)
        del output
        reserved = torch.cuda.max_memory_reserved() - before
        promised = model.brim.plan.promise.peak_bytes["vram"]
        model.brim.remove()
        del model
        assert reserved <= promised <= budget
