"""Decoding by CUDA graphs: the tokens of transformers' own loop, by a few launches, in the promised memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import brim
from brim import device
from brim.errors import UnsupportedError
from brim.estimation.step_memory import Inputs
from brim.run.generate.request import Answer, Request, chat, generate_many
from brim.techniques import decoding_graphs
from support.generating import DECODER, FAMILIES, WINDOW
from support.tiny_model import save_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WORDS, NEW = 300, 14
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER | {"rope_parameters": None}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | WINDOW),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 8, "initializer_range": 0.2},
    ),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.2},
    ),
}  # fmt: skip
CAPTURED = (
    "llama", "multi-query", "qwen2", "qwen3", "qwen3-moe", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "opt",
    "bloom", "gpt-neox",
)  # fmt: skip
REFUSED = {
    "falcon": "Cannot copy between CPU and CUDA",
    "gpt-neo": "Cannot copy between CPU and CUDA",
    "mamba": "type LinearAttentionLayer",
    "t5": "type EncoderDecoderCache",
}


def save(folder: Path, name: str, **values: Any) -> Path:
    kind, configuration, more = (MORE | FAMILIES)[name]
    torch.manual_seed(0)
    ids: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2}
    config = getattr(transformers, configuration)(**ids | more | values)
    getattr(transformers, kind)(config).save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = save(tmp_path_factory.mktemp(name), name)
        return saved[name]

    return folder


def inputs(batch: int) -> dict[str, torch.Tensor]:
    """Prompts of several lengths, padded on the left."""
    ids = (torch.arange(batch * 16).view(batch, 16) * 7) % (WORDS - 3) + 3
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : row % 5] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 2).cuda(), "attention_mask": mask.cuda()}


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


def tokens(model: Any, batch: int, sampled: bool, new: int = NEW) -> list[list[int]]:
    torch.manual_seed(5)
    options = SAMPLED if sampled else {"do_sample": False}
    out = model.generate(**inputs(batch), max_new_tokens=new, min_new_tokens=new, **options)
    rows: list[list[int]] = out[:, 16:].tolist()
    return rows


def load(folder: Path, **options: Any) -> Any:
    return brim.load(folder, **{"device": "cuda", "vram": "1GiB", "ram": "2GiB"} | options)


def replays(model: Any) -> int:
    return int(model.brim.timeline().facts.get("graph_replays", 0))


@pytest.mark.parametrize("family", CAPTURED)
def test_tokens_are_those_of_a_loop_without_graphs(family: str, folders: Callable[[str], Path]) -> None:
    folder = folders(family)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    model = load(folder, inputs=Inputs(batch=8, prompt=16, total=16 + NEW))
    try:
        for batch in (1, 8):
            for sampled in (False, True):
                before = replays(model)
                assert tokens(model, batch, sampled) == tokens(plain, batch, sampled)
                assert replays(model) - before == NEW - 4  # after the prompt's pass, and three that are compared
    finally:
        model.brim.remove()


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_captured_is_decoded_as_before(family: str, folders: Callable[[str], Path]) -> None:
    folder = folders(family)
    kind = (MORE | FAMILIES)[family][0]
    plain = getattr(transformers, kind).from_pretrained(folder).cuda().eval()
    model = load(folder, inputs=Inputs(batch=1, prompt=16, total=16 + NEW))
    expected = tokens(plain, 1, sampled=True)
    with pytest.warns(UserWarning, match=f"without CUDA graphs: .*{REFUSED[family]}"):
        assert tokens(model, 1, sampled=True) == expected
    assert tokens(model, 1, sampled=True) == expected  # and said once
    assert replays(model) == 0
    model.brim.remove()


def test_a_token_of_a_deep_model_takes_few_launches(tmp_path: Path) -> None:
    try:
        rehearsed = device.loaded()
    except UnsupportedError:
        pytest.skip("only the rehearsal device counts launches")
    folder = save(tmp_path, "llama", num_hidden_layers=36)
    launches: dict[str, list[int]] = {}
    for name, graphs in (("plain", False), ("graphs", True)):
        model = load(folder, cuda_graphs=graphs)
        for sampled in (False, True):
            each = launches[f"{name} {sampled}"] = []

            class Counted:
                def put(self, value: torch.Tensor, each: list[int] = each) -> None:
                    each.append(rehearsed.host_launches())
                    rehearsed.reset()

                def end(self) -> None:
                    pass

            options = SAMPLED if sampled else {"do_sample": False}
            model.generate(**inputs(1), max_new_tokens=NEW, min_new_tokens=NEW, streamer=Counted(), **options)
        model.brim.remove()
    assert min(launches["plain False"][-5:]) > 500
    assert max(launches["graphs False"][-5:]) <= 30
    assert max(launches["graphs True"][-5:]) <= 60


def test_a_cache_that_is_full_grows(folders: Callable[[str], Path]) -> None:
    folder = folders("mistral")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    model = load(folder, inputs=Inputs(batch=2, prompt=16, total=26))
    assert tokens(model, 2, sampled=False, new=300) == tokens(plain, 2, sampled=False, new=300)
    assert replays(model) == 299 - 1 - 3 * 2  # each of three caches is compared in two passes
    model.brim.remove()


def streamed(folder: Path) -> Any:
    """A model of which a part is streamed from RAM; its blocks are graphs, in more VRAM than the budget."""
    model = load(folder, vram="92MiB", host_compute=False)
    plan = model.brim.plan
    assert "stream:ram" in plan.choices("weight_streaming").values()
    model.brim.plan = replace(plan, settings=plan.settings | {"graph_bytes": 256 << 20})
    decoding_graphs.apply(model.brim)
    return model


@pytest.mark.parametrize(("family", "batch"), [("llama", 8), ("gemma3", 1), ("gpt2", 1), ("gpt-neox", 1)])
def test_streamed_blocks_are_graphs_too(family: str, batch: int, tmp_path: Path) -> None:
    """A graph for each slot that a block is loaded into; the copy of the next block is beside it."""
    wide = {"n_embd": 512, "n_head": 8} if family == "gpt2" else {"hidden_size": 512, "intermediate_size": 1408}
    folder = save(tmp_path, family, **wide | ({"n_layer": 8} if family == "gpt2" else {"num_hidden_layers": 8}))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    expected = [tokens(plain, batch, sampled) for sampled in (False, True)]
    del plain
    model = streamed(folder)
    assert [tokens(model, batch, sampled) for sampled in (False, True)] == expected
    assert not vars(model)["generate"].graphs.refused
    assert replays(model) > 4 * 8
    model.brim.remove()


def test_a_refused_pass_is_continued_plainly(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("llama")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    monkeypatch.setattr(decoding_graphs, "_agree", lambda plain, other: False)
    model = load(folder)
    with pytest.warns(UserWarning, match="depend on unused tokens"):
        assert tokens(model, 8, sampled=False) == tokens(plain, 8, sampled=False)
    model.brim.remove()


def clear() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # they count too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_loaded_model_keeps_its_promise(family: str, batch: int, folders: Callable[[str], Path]) -> None:
    before = clear()
    model = load(folders(family), inputs=Inputs(batch=batch, prompt=16, total=200))
    promised = model.brim.plan.promise.peak_bytes["vram"]
    for _ in range(2):
        tokens(model, batch, sampled=True, new=184)
    assert replays(model) == 2 * 180
    reserved = torch.cuda.max_memory_reserved() - before
    model.brim.remove()
    assert reserved <= promised <= 1 << 30


@pytest.mark.parametrize("room_bytes", [1 << 20, 24 << 20], ids=["the cache", "the workspace of the capture"])
def test_a_graph_that_takes_more_than_planned_is_not_used(room_bytes: int, folders: Callable[[str], Path]) -> None:
    folder = folders("llama")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    model = load(folder)
    vars(model)["generate"].graphs.room_bytes = room_bytes
    expected = tokens(plain, 1, sampled=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with pytest.warns(UserWarning, match="out of memory"):
        assert tokens(model, 1, sampled=False) == expected
    assert torch.cuda.max_memory_reserved() - before <= room_bytes + (4 << 20)
    model.brim.remove()


def test_a_budget_without_room_plans_no_graph(folders: Callable[[str], Path]) -> None:
    model = load(folders("llama"), vram="100MiB")
    assert "graph_bytes" not in model.brim.plan.settings
    assert len(tokens(model, 1, sampled=False)[0]) == NEW
    assert replays(model) == 0
    model.brim.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_planned_cache_is_decoded_by_graphs(family: str, folders: Callable[[str], Path]) -> None:
    """Several prompts, whose cache brim allocates."""
    folder, prompts = folders(family), ["one more thing", "to go", "on from here", "and on"]
    results = []
    for graphs in (True, False):
        answers: list[Answer] = []
        request = Request(
            model=folder, prompt=prompts, batch=2, max_new_tokens=30, vram="1GiB", ram="2GiB", device="cuda",
            cuda_graphs=graphs,
        )  # fmt: skip
        before = clear()
        made = generate_many(request, on_answer=answers.append)
        assert torch.cuda.max_memory_reserved() - before <= made.promised_bytes["vram"]
        assert ("graph_replays" in made.timeline.facts) == graphs
        assert not graphs or made.timeline.facts["graph_replays"] >= 2 * 26
        results.append([answer.token_ids for answer in answers])
    assert results[0] == results[1]


def test_turns_of_a_conversation_are_those_without_graphs(folders: Callable[[str], Path]) -> None:
    """The cache is cut back to what the turns share, and continued."""
    turns = []
    for graphs in (True, False):
        request = Request(
            model=folders("llama"), max_new_tokens=20, vram="1GiB", ram="2GiB", device="cuda", cuda_graphs=graphs
        )
        with chat(request, context=400) as talk:
            turns.append([talk.answer(text) for text in ("one more thing", "to go on from here", "and on")])
    ids = [[(turn.token_ids, turn.reused_tokens) for turn in each] for each in turns]
    assert ids[0] == ids[1]
    assert turns[0][1].reused_tokens > 0


def test_calls_outside_of_generate_and_of_other_threads_are_plain(folders: Callable[[str], Path]) -> None:
    model = load(folders("llama"))
    expected = tokens(model, 1, sampled=False)
    ids = inputs(1)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    others: list[torch.Tensor] = []

    class Calling:
        def put(self, value: torch.Tensor) -> None:
            def call() -> None:
                with torch.no_grad():
                    others.append(model(input_ids=ids).logits)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        def end(self) -> None:
            pass

    out = model.generate(**inputs(1), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, streamer=Calling())
    assert out[:, 16:].tolist() == expected
    assert len(others) == NEW + 1 and all(torch.equal(other, logits) for other in others)
    cache = transformers.DynamicCache(config=model.config)
    made = model.generate(
        **inputs(1), max_new_tokens=NEW, do_sample=False, cache=cache, return_dict_in_generate=True,
        output_hidden_states=True,
    )  # fmt: skip
    assert made.sequences[:, 16:].tolist() == expected
    assert len({states[0].sum().item() for states in made.hidden_states}) > 5  # each its own memory
    model.brim.remove()
    assert "generate" not in vars(model)


def test_a_cache_of_the_user_is_given_back(folders: Callable[[str], Path]) -> None:
    folder = folders("mistral")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).cuda().eval()
    model = load(folder)
    contents = []
    for each in (plain, model):
        cache = transformers.DynamicCache(config=each.config)
        out = each.generate(**inputs(1), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache=cache)
        again = each.generate(out, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, cache=cache)
        types = {type(layer).__name__ for layer in cache.layers}
        contents.append((again.tolist(), types, cache.get_seq_length(), [layer.keys for layer in cache.layers]))
    assert contents[0][:3] == contents[1][:3]
    for one, other in zip(contents[0][3], contents[1][3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert replays(model) == NEW - 4 + NEW - 3  # the second prompt is a single token
    model.brim.remove()
