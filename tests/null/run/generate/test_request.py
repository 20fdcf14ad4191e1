"""Generation from many prompts and from long ones: the tokens that each prompt gives alone, inside the budget."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.core.hardware import RAM, VRAM
from brim.errors import BudgetError, ModelError, UnsupportedError, UsageError
from brim.measure.token_clock import Clock
from brim.planning.inference.memory import Sizes
from brim.run.generate.request import Answer, Generation, Request, Throughput, generate, generate_many
from brim.techniques.kv_offload import cache as kv_cache
from support.generating import FAMILIES, alone, save

PROMPTS = ["hi", "one more thing to go on from", "a b c", "The rain in Spain", "x"]
LONG = "A long prompt, word by word. " * 6
NEW = 7
MIB = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a family's model, made once."""
    root, made = tmp_path_factory.mktemp("families"), dict[str, Path]()

    def of(name: str) -> Path:
        if name not in made:
            made[name] = save(root / name, name)
        return made[name]

    return of


def many(folder: Path, prompts: list[str], **options: Any) -> tuple[list[Answer], Throughput]:
    answers: list[Answer] = []
    request = Request(model=folder, prompt=prompts, max_new_tokens=options.pop("count", NEW), **options)
    result = generate_many(request, on_answer=answers.append)
    return answers, result


def choice_of_cache(result: Throughput | Generation) -> str:
    return result.plan.choices(kv_cache.NAME)[""]


BATCHED = [name for name in FAMILIES if name not in ("rwkv", "long")]


@pytest.mark.thorough
@pytest.mark.parametrize("name", BATCHED)
def test_each_sequence_of_a_batch_gets_the_tokens_that_it_gets_alone(name: str, saved: Any) -> None:
    folder = saved(name)
    answers, result = many(folder, PROMPTS, batch=3)  # the last batch is a smaller one
    assert [answer.token_ids for answer in answers] == alone(folder, PROMPTS, NEW)
    assert [answer.index for answer in answers] == list(range(len(PROMPTS)))
    assert (result.batch, result.tokens) == (3, NEW * len(PROMPTS))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "mistral", "qwen3-moe", "t5") else pytest.param(name, marks=pytest.mark.slow)
        for name in BATCHED
    ],
)
def test_one_prompt_gives_the_tokens_of_transformers(name: str, saved: Any) -> None:
    result = generate(Request(model=saved(name), prompt=LONG, max_new_tokens=NEW))
    assert [result.token_ids] == alone(saved(name), [LONG], NEW)


@pytest.mark.thorough
@pytest.mark.parametrize("prompts", [PROMPTS, ["one", "two", "six"]], ids=["padded", "one length"])
def test_a_family_that_cannot_be_batched_exactly_says_so(prompts: list[str], saved: Any) -> None:
    with pytest.raises(UnsupportedError, match="standard deviations"):
        many(saved("rwkv"), prompts, batch=2)
    assert len(many(saved("rwkv"), prompts[:2], batch=1)[0]) == 2


def test_padding_that_changes_what_is_computed_is_found(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    prepare = LlamaForCausalLM.prepare_inputs_for_generation

    def without_mask(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", without_mask)
    with pytest.raises(UnsupportedError, match="standard deviations"):
        many(saved("llama"), PROMPTS, batch=2)


def test_a_penalty_that_reads_the_prompt_is_not_given_padding(saved: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    folder = save(tmp_path / "penalty", "llama")
    GenerationConfig(repetition_penalty=1.3, pad_token_id=2).save_pretrained(folder)
    with pytest.raises(UnsupportedError, match="repetition_penalty"):
        many(folder, PROMPTS, batch=2)
    answers, _ = many(folder, PROMPTS, batch=1)
    assert [answer.token_ids for answer in answers] == alone(folder, PROMPTS, NEW)


def test_sequences_that_end_keep_nothing_of_what_follows(saved: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    folder = save(tmp_path / "ends", "llama")
    free = alone(folder, PROMPTS, NEW)
    ends = [free[0][1], free[3][4]]  # two of them end somewhere in between
    GenerationConfig(eos_token_id=ends, pad_token_id=2).save_pretrained(folder)
    answers, result = many(folder, PROMPTS, batch=5)
    expected = alone(folder, PROMPTS, NEW)
    assert [answer.token_ids for answer in answers] == expected
    assert min(len(row) for row in expected) < NEW == max(len(row) for row in expected)
    assert result.tokens == sum(len(row) for row in expected)


# -- what fits


def least_bytes(folder: Path, prompts: list[str], **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        many(folder, prompts, ram=1, **options)
    return caught.value.smallest_bytes[RAM]


@pytest.mark.slow
def test_auto_takes_as_many_prompts_as_fit(saved: Any) -> None:
    folder, prompts = saved("llama"), ["word " * 95] * 12
    few, lots = (least_bytes(folder, prompts, count=2, batch=batch) for batch in (1, 12))
    budget = few + (lots - few) // 2 + MIB
    answers, result = many(folder, prompts, count=2, ram=budget)
    assert 1 < result.batch < 12
    assert result.promised_bytes[RAM] <= budget
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(alone(folder, prompts[:1], 2)[0])}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "bloom", "qwen3-moe"])
def test_a_prompt_in_chunks_gives_the_same_tokens(name: str, saved: Any) -> None:
    for chunk in (50, 1000):
        result = generate(Request(model=saved(name), prompt=LONG, max_new_tokens=NEW, prefill_chunk=chunk))
        assert [result.token_ids] == alone(saved(name), [LONG], NEW)
        assert result.plan.settings["prefill_chunk"] == min(chunk, result.plan.settings["prompt_tokens"])


def test_batches_of_several_lengths_go_in_chunks_too(saved: Any) -> None:
    answers, _ = many(saved("llama"), [*PROMPTS, LONG], batch=6, prefill_chunk=20)
    assert [answer.token_ids for answer in answers] == alone(saved("llama"), [*PROMPTS, LONG], NEW)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mamba", "jamba", "t5"])
def test_a_cache_that_cannot_be_gone_on_from_is_not_given_chunks(name: str, saved: Any) -> None:
    with pytest.raises(UnsupportedError, match="--prefill-chunk"):
        generate(Request(model=saved(name), prompt=LONG, max_new_tokens=NEW, prefill_chunk=8))
    assert generate(Request(model=saved(name), prompt=LONG, max_new_tokens=NEW)).token_ids


@pytest.mark.thorough
def test_auto_takes_the_largest_chunk_that_fits(saved: Any) -> None:
    folder, prompt = saved("long"), "word " * 300
    options: dict[str, Any] = {"model": folder, "prompt": prompt, "max_new_tokens": 3}
    needs = {}
    for chunk in (93, 1500):
        with pytest.raises(BudgetError) as caught:
            generate(Request(**options, ram=1, prefill_chunk=chunk))
        needs[chunk] = caught.value.smallest_bytes[RAM]
    assert needs[1500] > needs[93] + 10 * MIB
    budget = (needs[93] + needs[1500]) // 2 + 3 * MIB
    result = generate(Request(**options, ram=budget))
    assert 93 < result.plan.settings["prefill_chunk"] < result.plan.settings["prompt_tokens"]
    assert result.promised_bytes[RAM] <= budget
    assert [result.token_ids] == alone(folder, [prompt], 3)


@pytest.mark.thorough
def test_where_vram_is_short_the_older_part_of_the_cache_rests_in_ram(saved: Any) -> None:
    folder, prompts = saved("llama"), ["word " * 80] * 6
    options: dict[str, Any] = {"count": 20, "batch": 6, "device": "emulated"}
    with pytest.raises(BudgetError) as caught:
        many(folder, prompts, vram=1, **options)
    needs = caught.value.smallest_bytes[VRAM]
    answers, result = many(folder, prompts, vram=needs, **options)
    assert choice_of_cache(result) == kv_cache.OLDER_IN_RAM
    assert result.plan.settings[kv_cache.RESTING_TOKENS] > 0
    assert result.timeline.facts[f"held_bytes.{VRAM}"] <= result.promised_bytes[VRAM] <= needs
    assert result.timeline.copied_bytes(RAM, VRAM) > 0
    free, roomy = many(folder, prompts, vram=1 << 30, **options)
    assert choice_of_cache(roomy) == kv_cache.RESIDENT
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in free]


def test_precision_converts_once_and_says_what_is_wrong(saved: Any) -> None:
    folder = saved("llama")
    result = generate(Request(model=folder, prompt="hi", max_new_tokens=NEW, precision="bf16"))
    whole = generate(Request(model=folder, prompt="hi", max_new_tokens=NEW))
    held = [sum(d.bytes for d in r.plan.decisions if d.technique == "weight_streaming") for r in (result, whole)]
    assert 1.7 < held[1] / held[0] < 2.1  # whole pages of small files
    assert [result.token_ids] == alone(_in_bf16(folder), ["hi"], NEW)
    with pytest.raises(UsageError, match="fp32"):
        generate(Request(model=folder, prompt="hi", precision="fp7"))


def _in_bf16(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = folder.parent / "bf16"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


# -- misuse


def test_requests_that_cannot_be_meant_are_refused(saved: Any) -> None:
    folder = saved("llama")
    for options, words in (
        ({"prompt": []}, "no prompts"),
        ({"prompt": ["hi"], "batch": 0}, "--batch 0"),
        ({"prompt": ["hi"], "prefill_chunk": -1}, "--prefill-chunk"),
        ({"prompt": ["hi"], "max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"prompt": ["hi", LONG * 5]}, "of prompt 2"),
        ({"prompt": ["hi"], "max_new_tokens": 600}, "made for 512"),
        ({"prompt": ["hi"], "plan": "some.json", "ram": "1GiB"}, "The plan decides that"),
    ):
        with pytest.raises(UsageError, match=words):
            generate_many(Request(model=folder, **options))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="generate_many"):
        generate(Request(model=folder, prompt=["hi"]))


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.generating import FAMILIES as families
    from support.tiny_model import save_tokenizer

    LlamaForCausalLM(LlamaConfig(vocab_size=20, **families["llama"][2])).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="knows 20 tokens"):
        many(tmp_path, ["a", "zz"])


def test_passes_are_those_of_a_generation() -> None:
    for prompt, chunk, new in itertools.product((1, 7, 12), (1, 3, 4, 12), (1, 2, 9)):
        sizes = Sizes(prompt=prompt, total=prompt + new, chunk=min(chunk, prompt))
        passes = list(sizes.passes())
        assert sum(tokens for tokens, _ in passes) == sizes.cached == prompt + new - 1
        counted = {tokens for tokens, counts in passes if counts}
        pieces = {min(chunk, prompt - begin) for begin in range(0, prompt, chunk)}
        assert counted == pieces | ({1} if new > 1 else set())


def test_the_median_forgives_a_first_token_that_the_mean_has() -> None:
    clock = Clock(times_s=[1.0, 6.0, 7.0, 8.0])
    assert clock.s_per_step() == pytest.approx(7 / 3)
    assert clock.steady_s_per_step() == 1.0
    assert Clock(times_s=[1.0]).steady_s_per_step() is None


@pytest.mark.thorough
def test_a_generation_imports_nothing_that_predicts_or_searches_steps_of_other_machines() -> None:
    heavy = "estimate", "simulation", "growth", "depth", "steps"
    code = "import sys, brim.run.generate.request\n"
    code += f"print([name for name in {heavy!r} if f'brim.estimation.{{name}}' in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
