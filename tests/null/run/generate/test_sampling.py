"""Drawn tokens, texts that end an answer, system messages and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from brim.errors import UsageError
from brim.requests.sampling import Sampling, cut, withheld
from brim.run.generate.loop import Printer
from brim.run.generate.request import Answer, Request, chat, generate, generate_many
from support.generating import save
from support.tiny_model import save_tokenizer

DRAWN = Sampling(temperature=1.3, top_p=0.9, top_k=40, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "llama", "llama")


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save(tmp_path_factory.mktemp("saved") / "talking", "llama")
    save_tokenizer(made)
    return made


def by_transformers(folder: Path, prompt: str, count: int, seed: int, **options: Any) -> list[int]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=True, **options
        )
    return [int(token) for token in out[0, ids.shape[1] :]]


def test_what_is_drawn_is_what_transformers_draws(folder: Path, cache: Path) -> None:
    before = torch.get_rng_state()
    made = generate(Request(model=folder, prompt="hello", max_new_tokens=12, sampling=DRAWN))
    assert made.token_ids == by_transformers(folder, "hello", 12, 7, temperature=1.3, top_p=0.9, top_k=40)
    assert made.seed == 7 and made.to_json()["seed"] == 7
    assert torch.equal(torch.get_rng_state(), before), "the program's own generator is as it was"
    again = generate(Request(model=folder, prompt="hello", max_new_tokens=12, sampling=DRAWN))
    assert again.token_ids == made.token_ids


def test_what_is_left_out_is_as_the_generation_config_has_it() -> None:
    class Config:
        temperature, top_p, top_k = 0.6, None, 20

    assert Sampling(top_p=0.5).options(Config) == {"do_sample": True, "temperature": 0.6, "top_p": 0.5, "top_k": 20}
    plain = Sampling(temperature=2.0).options(object())
    assert plain == {"do_sample": True, "temperature": 2.0, "top_p": 1.0, "top_k": 0}
    assert Sampling().options(Config) == Sampling(temperature=0).options(Config) == {"do_sample": False}


def test_a_seed_is_drawn_and_told_where_none_is_given() -> None:
    first, second = Sampling(temperature=1).with_seed(), Sampling(temperature=1).with_seed()
    assert first.seed is not None and first != second
    assert Sampling().with_seed() == Sampling()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1.0}, "--temperature -1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"top_p": 0.0}, "--top-p 0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"top_k": 0}, "--top-k 0"),
        ({"temperature": 1.0, "seed": -1}, "--seed -1"),
        ({"temperature": 1.0, "seed": 10**30}, "--seed 1000"),
        ({"temperature": 0.0, "top_k": 4}, "always taken"),
        ({"seed": 4}, "Nothing is sampled"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Sampling(**values).check()


def test_prompts_of_several_lengths_are_drawn_together(folder: Path, cache: Path) -> None:
    """The comparison of padded prompts with single ones is of greedy tokens: drawn ones would differ."""
    answers: list[Answer] = []
    request = Request(model=folder, prompt=["a", "longer one"], max_new_tokens=6, batch=2, sampling=DRAWN)
    generate_many(request, on_answer=answers.append)
    again: list[Answer] = []
    generate_many(request, on_answer=again.append)
    assert answers == again
    assert [len(answer.token_ids) for answer in answers] == [6, 6]


# -- where an answer ends


def test_cutting_and_withholding() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", ["two"]) == "one"
    assert withheld("the en", ["end", "n."]) == 2
    assert withheld("the", ["end", "n."]) == 1
    assert withheld("", ["end"]) == 0


def test_a_stop_ends_the_answer_before_it(folder: Path, cache: Path) -> None:
    whole = generate(Request(model=folder, prompt="hi", max_new_tokens=24))
    stop = whole.text[9:11]
    pieces: list[str] = []
    made = generate(Request(model=folder, prompt="hi", max_new_tokens=24, stop=[stop]), on_text=pieces.append)
    assert made.text == whole.text[: whole.text.index(stop)] == "".join(pieces)
    assert made.token_ids == whole.token_ids[: len(made.token_ids)]
    assert len(made.token_ids) < 24
    with pytest.raises(UsageError, match="empty text"):
        generate(Request(model=folder, prompt="hi", stop=[""]))


def test_each_of_several_answers_ends_by_itself(folder: Path, cache: Path) -> None:
    prompts = ["hi", "a longer one"]
    wholes: list[Answer] = []
    generate_many(Request(model=folder, prompt=prompts, max_new_tokens=24, batch=2), on_answer=wholes.append)
    stop = wholes[0].text[5:7]
    found: list[Answer] = []
    request = Request(model=folder, prompt=prompts, max_new_tokens=24, batch=2, stop=[stop])
    generate_many(request, on_answer=found.append)
    assert [answer.text for answer in found] == [cut(whole.text, [stop]) for whole in wholes]
    assert len(found[0].token_ids) < 24


def test_what_is_printed_never_takes_anything_back() -> None:
    class Tokenizer:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(token) for token in tokens)

    pieces: list[str] = []
    printer = Printer(Tokenizer(), pieces.append, ["END"])
    for letter in "an EN ENDless":
        printer.put(torch.tensor([ord(letter)]))
    printer.end()
    assert "".join(pieces) == "an EN "


# -- system messages and conversations


def test_a_system_message_goes_into_the_template(talking: Path, folder: Path, cache: Path) -> None:
    plain = generate(Request(model=talking, prompt="[be brief][hi]", max_new_tokens=4, chat=False))
    made = generate(Request(model=talking, prompt="hi", system="be brief", max_new_tokens=4))
    assert made.token_ids == plain.token_ids
    with pytest.raises(UsageError, match="no place for it"):
        generate(Request(model=folder, prompt="hi", system="be brief"))
    with pytest.raises(UsageError, match="--no-chat"):
        generate(Request(model=talking, prompt="hi", system="be brief", chat=False))


@pytest.mark.thorough
def test_a_conversation_says_what_single_prompts_say(talking: Path, cache: Path) -> None:
    request = Request(model=talking, prompt="", max_new_tokens=6, system="be brief")
    pieces: list[str] = []
    with chat(request, context=200) as talk:
        first = talk.answer("hi", pieces.append)
        second = talk.answer("and now?")
        assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 2]
    assert "".join(pieces) == first.text
    assert first.reused_tokens == 0
    assert second.reused_tokens >= first.prompt_tokens, "what was said before is in the cache"
    alone = generate(Request(model=talking, prompt="hi", max_new_tokens=6, system="be brief"))
    assert first.token_ids == alone.token_ids
    told = f"[be brief][hi][{first.text}][and now?]"
    assert second.token_ids == generate(
        Request(model=talking, prompt=told, max_new_tokens=6, chat=False)
    ).token_ids  # fmt: skip


def test_an_answer_that_is_stopped_is_what_there_is(talking: Path, cache: Path) -> None:
    said: list[str] = []
    with chat(Request(model=talking, prompt="", max_new_tokens=20), context=200) as talk:
        turn = talk.answer("hi", said.append, stopped=lambda: len(said) >= 3)
        assert turn.stopped and 3 <= len(turn.token_ids) < 20
        assert talk.messages[-1] == {"role": "assistant", "content": turn.text}
        assert not talk.answer("go on").stopped


def test_what_does_not_fit_is_left_out_from_the_oldest_on(talking: Path, cache: Path) -> None:
    with chat(Request(model=talking, prompt="", max_new_tokens=4, system="s"), context=40) as talk:
        talk.answer("0123456789abcde")
        turn = talk.answer("0123456789abcde")
        assert turn.forgotten == 2
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        with pytest.raises(UsageError, match="leaves 36"):
            talk.answer("x" * 60)
        assert talk.answer("0").text is not None, "it goes on"


@pytest.mark.parametrize(("context", "says"), [(10**6, "was made for"), (3, "no room")])
def test_a_context_that_cannot_be(context: int, says: str, talking: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=says), chat(Request(model=talking, prompt=""), context=context):
        pass
