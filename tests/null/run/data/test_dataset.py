"""Training data: what is learnt, in which order, and what each kind of bad input says."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from brim.errors import BrimError, ModelError, UnsupportedError, UsageError
from brim.models.chat_template import apply_template
from brim.run.data import chat as data_chat
from brim.run.data import dataset as data_packed
from brim.run.data.dataset import IGNORED, Batches, LineDataset, PackedDataset, open_data
from brim.run.generate.inputs import encode
from support.tiny_model import save_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' + m.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '</s>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '</s>\\n' }}{% endif %}"
    "{% endfor %}"
)
# As Qwen3: reasoning is shown in the last turn only, and there even where there is none.
FORGETFUL = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% if loop.last %}{{ '<think>' + (m.content.split('</think>')[0] if '</think>' in m.content else '') "
    "+ '</think>' }}{% endif %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{ '</s>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
# As DeepSeek's: the generation prompt opens a thought that the text does not have.
OPENING = (
    "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:<think>' }}{% endif %}"
)
# No end of turn, no generation prompt.
INSTRUCT = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST] ' if m.role == 'user' else m.content }}{% endfor %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
REWRITING = "{% for m in messages %}{{ loop.length ~ m.content | reverse }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    made = AutoTokenizer.from_pretrained(folder)
    made.chat_template = CHATML
    return made


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *messages]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def answers(dataset: LineDataset, tokenizer: Any, index: int = 0) -> list[str]:
    """What has labels, one string per stretch."""
    example = dataset.example(index)
    stretches: list[list[int]] = []
    inside = False
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, IGNORED)
        if label != IGNORED:
            stretches = stretches if inside else [*stretches, []]
            stretches[-1].append(token)
        inside = label != IGNORED
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["blue", "red, and </s>"]),
        (MARKED, ["blue", "red, and </s>"]),
        (FORGETFUL, ["blue", "<think></think>red, and </s>"]),
        (OPENING, ["blue", "red, and </s>"]),
        (INSTRUCT, ["blue", "red, and "]),
    ],
    ids=["prefixes", "marked", "last turn differs", "opens a thought", "bare"],
)
def test_only_the_answers_are_learnt(tmp_path: Path, tokenizer: Any, template: str, wanted: list[str]) -> None:
    tokenizer.chat_template = template
    path = write(tmp_path / "c.jsonl", chat("the blue sky?", "blue", "and blue at night?", "red, and "))
    found = answers(open_data(path, tokenizer, 300), tokenizer)  # type: ignore[arg-type]
    ends = "</s>" if template is not INSTRUCT else ""
    assert found == [wanted[0] + ends, wanted[1]]


def test_an_answer_whose_reasoning_is_left_out_later_is_found(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    path = write(tmp_path / "c.jsonl", chat("a?", "hm</think>blue", "b?", "so</think>red"))
    dataset = open_data(path, tokenizer, 300)
    assert answers(dataset, tokenizer) == ["blue</s>", "<think>so</think>red</s>"]  # type: ignore[arg-type]


def test_a_conversation_may_begin_with_an_answer_have_two_in_a_row_and_end_with_a_question(
    tmp_path: Path, tokenizer: Any
) -> None:
    roles = ["assistant", "assistant", "user", "assistant", "user"]
    row = {"messages": [{"role": role, "content": f"words {i}"} for i, role in enumerate(roles)]}
    dataset = open_data(write(tmp_path / "c.jsonl", row), tokenizer, 300)
    assert answers(dataset, tokenizer) == ["words 0</s>", "words 1</s>", "words 3</s>"]  # type: ignore[arg-type]


def test_the_whole_conversation_is_what_the_template_makes_of_it(tmp_path: Path, tokenizer: Any) -> None:
    row = chat("Wie spät? 🕰", "Fünf.", system="Kurz!")
    dataset = open_data(write(tmp_path / "c.jsonl", row), tokenizer, 300)
    assert dataset.example(0).input_ids == tokenizer.apply_chat_template(row["messages"]).input_ids


def test_tools_and_messages_that_only_call_them_are_passed_on(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ tools[0].name }}|{% for m in messages %}<s>{{ m.role }}:{{ m.content or m.tool_calls[0].name }}</s>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    path = write(tmp_path / "c.jsonl", {"messages": messages, "tools": [{"name": "add"}]})
    assert answers(open_data(path, tokenizer, 300), tokenizer) == ["add</s>", "Four.</s>"]  # type: ignore[arg-type]


def test_text_is_learnt_whole_and_ends_with_eos(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "t.jsonl", {"text": "abc"}, "", {"text": "de\n", "source": "x"})
    dataset = open_data(path, tokenizer, 10)
    assert len(dataset) == 2
    assert [tokenizer.decode(dataset.example(i).labels) for i in (0, 1)] == ["abc</s>", "de\n</s>"]
    assert dataset.example(0).input_ids == dataset.example(0).labels


LINE = '{"text": "fine"}'
BAD_LINES: dict[str, tuple[str, str]] = {
    "not json": ('{"text": "a"', "It is not JSON"),
    "no object": ('["text"]', "not a JSON object but list"),
    "deep": ("[" * 100_000, "It is not JSON"),
    "another kind": ('{"messages": [{"role": "assistant", "content": "a"}]}', "It has no text"),
    "a number": ('{"text": 3}', "text is not a string but int"),
    "blank text": ('{"text": "  "}', "text is empty"),
    "half a pair": ('{"text": "\\ud800"}', "surrogate"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, tokenizer: Any, name: str) -> None:
    line, said = BAD_LINES[name]
    path = write(tmp_path / "bad.jsonl", LINE, "", line, LINE)
    with pytest.raises(UsageError, match="line 3") as caught:
        open_data(path, tokenizer, 10)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_line_too_long_to_be_held_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "long.jsonl", LINE, {"text": "a" * (17 << 20)}, LINE)
    refused(lambda: open_data(path, tokenizer, 10), "line 2", "longer than 16 MiB")


BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "one or more messages"),
    "no list": ("hi", "one or more messages"),
    "no object": (["hi"], "message 1 is not an object"),
    "no role": ([{"content": "a"}], "message 1 is not an object with role"),
    "a wrong role": (
        [{"role": "assistant", "content": "a"}, {"role": "wizard", "content": "a"}],
        "message 2 has the role",
    ),
    "no content": ([{"role": "assistant"}], "the content of message 1 is not a string but NoneType"),
    "an empty answer": ([{"role": "assistant", "content": ""}], "the content of message 1 is empty"),
    "no answer": ([{"role": "user", "content": "a"}], "No message is the assistant's"),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages_are_named_by_line_and_place(tmp_path: Path, tokenizer: Any, name: str) -> None:
    messages, said = BAD_MESSAGES[name]
    path = write(tmp_path / "bad.jsonl", chat("a", "b"), {"messages": messages})
    with pytest.raises(UsageError, match="line 2") as caught:
        open_data(path, tokenizer, 10)
    assert said in str(caught.value)


def refused(action: Callable[[], object], *words: str, kind: type[BrimError] = UsageError) -> None:
    with pytest.raises(kind) as caught:
        action()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_files_that_are_no_data_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("e.jsonl", "e.txt"):
        for content in ("", "\n\n"):
            (tmp_path / name).write_text(content)
            refused(lambda name=name: open_data(tmp_path / name, tokenizer, 10), name, "It is empty")
    refused(lambda: open_data(tmp_path / "none.jsonl", tokenizer, 10), "none.jsonl", "No such file")
    refused(lambda: open_data(tmp_path / "none.txt", tokenizer, 10), "none.txt", "No such file")
    for name in ("none", "none.parquet"):
        refused(lambda name=name: open_data(tmp_path / name, tokenizer, 10), name, "No such file")
    for name, ending in (("data.parquet", "ends in '.parquet'"), ("data", "has no ending")):
        (tmp_path / name).touch()
        refused(lambda name=name: open_data(tmp_path / name, tokenizer, 10), ending, ".jsonl")
    (tmp_path / "folder").mkdir()
    refused(lambda: open_data(tmp_path / "folder", tokenizer, 10), "no text files")
    refused(lambda: open_data(write(tmp_path / "c.jsonl", LINE), tokenizer, 1), "1 tokens")


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path, tokenizer: Any) -> None:
    for name in ("u.jsonl", "u.txt"):
        (tmp_path / name).write_bytes(LINE.encode() + b"\n\n" + b'{"text": "a\xff"}\n')
        refused(lambda name=name: open_data(tmp_path / name, tokenizer, 10), "line 3", "not UTF-8")
    (tmp_path / "end.txt").write_bytes(b"a\nb\xc3")
    refused(lambda: open_data(tmp_path / "end.txt", tokenizer, 2), "line 2", "not UTF-8")


def test_a_byte_order_mark_is_not_text(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE.encode())
    assert tokenizer.decode(open_data(tmp_path / "b.jsonl", tokenizer, 10).example(0).input_ids) == "fine</s>"
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbffine")
    assert tokenizer.decode(open_data(tmp_path / "b.txt", tokenizer, 5).example(0).input_ids) == "fine</s>"


def test_a_tokenizer_without_a_template_cannot_read_messages(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", chat("a", "b"))
    tokenizer.chat_template = None
    refused(lambda: open_data(path, tokenizer, 10), "chat template", kind=ModelError)


def test_what_a_template_refuses_or_rewrites_is_named_by_line(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "c.jsonl", chat("a", "b"), chat("a", "b", system="s"))
    tokenizer.chat_template = STRICT
    dataset = open_data(path, tokenizer, 100)
    dataset.example(0)
    refused(lambda: dataset.example(1), "line 2", "no system role")
    tokenizer.chat_template = REWRITING
    rewritten = open_data(write(tmp_path / "r.jsonl", chat("what?", "nothing.")), tokenizer, 100)
    refused(lambda: rewritten.example(0), "line 1", "generation", kind=UnsupportedError)


def test_another_models_tokenizer_is_noticed(tmp_path: Path, tokenizer: Any) -> None:
    for path in (write(tmp_path / "v.jsonl", LINE), write(tmp_path / "v.txt", "fine")):
        open_data(path, tokenizer, 5, vocab_size=258).example(0)
        refused(
            lambda path=path: open_data(path, tokenizer, 5, vocab_size=70).example(0),
            str(path),
            "70 tokens",
            kind=ModelError,
        )


@pytest.mark.filterwarnings("ignore:.* is cut to:UserWarning")
def test_what_is_too_long_is_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "l.jsonl", {"text": "abcdefgh"}, LINE, {"text": "0123456789"})
    dataset = open_data(path, tokenizer, 5)
    for _ in range(2):
        for index in range(3):
            dataset.example(index)
    assert dataset.truncated == 2
    assert tokenizer.decode(dataset.example(0).input_ids) == "abcde"


def test_the_first_that_is_cut_says_so(tmp_path: Path, tokenizer: Any) -> None:
    dataset = open_data(write(tmp_path / "l.jsonl", {"text": "abcdefgh"}), tokenizer, 5)
    with pytest.warns(UserWarning, match="line 1 has 9 tokens and is cut to 5"):
        dataset.example(0)
    dataset.example(0)  # and says it once


@pytest.mark.filterwarnings("ignore:.* is cut to:UserWarning")
def test_an_example_of_which_nothing_is_learnt_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "n.jsonl", chat("a long question", "b"))
    refused(lambda: open_data(path, tokenizer, 12).example(0), "line 1", "first 12 of its")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% generation %}{% endgeneration %}{% endfor %}"
    refused(lambda: open_data(path, tokenizer, 40).example(0), "line 1", "is a target of training")
    tokenizer.eos_token = None
    single = write(tmp_path / "s.jsonl", {"text": "a"})
    refused(lambda: open_data(single, tokenizer, 9).example(0), "line 1", "None of its 1 tokens")


def test_text_files_are_packed_with_eos_between_them(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("fgh")
    (tmp_path / "texts" / "a.txt").write_text("abcde")
    (tmp_path / "texts" / "notes.json").write_text("no text")
    (tmp_path / "texts" / "notes.json").unlink()
    dataset = open_data(tmp_path / "texts", tokenizer, 4)
    assert [tokenizer.decode(dataset.example(i).input_ids) for i in range(len(dataset))] == ["abcd", "e</s>fg"]
    refused(lambda: open_data(write(tmp_path / "few.txt", "ab"), tokenizer, 10), "It has only 4", "shorter")


def test_a_tokenizer_that_puts_bos_first_puts_it_before_each_document(tmp_path: Path, tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("ab")
    (tmp_path / "texts" / "b.txt").write_text("c")
    dataset = open_data(tmp_path / "texts", tokenizer, 7)
    assert tokenizer.decode(dataset.example(0).input_ids) == "<s>ab</s><s>c</s>"


def test_tokens_of_text_are_made_once(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.txt", "some words " * 50)
    first = open_data(path, tokenizer, 16)
    monkeypatch.setattr(data_packed, "_write", None)
    second = open_data(path, tokenizer, 32)
    assert second.example(0).input_ids == first.example(0).input_ids + first.example(1).input_ids
    assert second.identity != first.identity


def test_a_large_file_is_never_in_memory(tmp_path: Path, tokenizer: Any) -> None:
    rows = 3000
    path = write(tmp_path / "large.jsonl", *({"text": f"{i} " * 800} for i in range(rows)))
    assert path.stat().st_size > 8 << 20
    tokenizer("warm", verbose=False)
    tracemalloc.start()
    try:
        dataset = open_data(path, tokenizer, 4096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(dataset) == rows
    assert peak_bytes < 1 << 20
    assert tokenizer.decode(dataset.example(7).input_ids).startswith("7 7 ")


def test_going_on_with_other_data_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", LINE, {"text": "more"})
    state = Batches(open_data(path, tokenizer, 10), 1).state_dict()
    Batches(open_data(path, tokenizer, 10), 2).load_state_dict(state)
    refused(lambda: Batches(open_data(path, tokenizer, 11), 1).load_state_dict(state), "same data")
    write(path, LINE, {"text": "mora"})
    refused(lambda: Batches(open_data(path, tokenizer, 10), 1).load_state_dict(state), "same data")


def test_a_bad_example_leaves_the_position_where_it_was(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", chat("a", "b"), chat("a", "b", system="s"))
    tokenizer.chat_template = STRICT
    batches = Batches(open_data(path, tokenizer, 100), 2)
    refused(lambda: next(batches), "line 2")
    assert batches.position == 0


def test_the_kinds_of_data_sets(tmp_path: Path, tokenizer: Any) -> None:
    assert isinstance(open_data(write(tmp_path / "d.jsonl", LINE), tokenizer, 10), LineDataset)
    assert isinstance(open_data(write(tmp_path / "d.txt", "ab"), tokenizer, 2), PackedDataset)


@pytest.mark.parametrize("template", ["{% for n in range(10 ** 18) %}x{% endfor %}", "{{ 1 // 0 }}"])
def test_a_template_that_fails_is_one_error(tmp_path: Path, tokenizer: Any, template: str) -> None:
    path = write(tmp_path / "c.jsonl", chat("a", "b"))
    tokenizer.chat_template = template
    refused(lambda: open_data(path, tokenizer, 100).example(0), "line 1", "chat template")
    with pytest.raises(ModelError, match="The template fails: "):
        encode(tokenizer, "hello", chat=None)


# As Mistral's: a system message goes into the question after it.
MERGING = (
    "{{ '<s>' }}{% set system = messages[0].content ~ '\\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ '[INST] ' ~ (system if loop.first else '') ~ m.content ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ m.content | trim ~ ' </s>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL, OPENING, INSTRUCT, MERGING])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_answers_of_a_long_conversation_are_those_found_one_by_one(
    tmp_path: Path, tokenizer: Any, template: str, system: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = template
    said = ["a", "s", "\nuser", " yes, yes ", "say yes", "yes", "<think>hm</think>\n no", "assistant", "0", "1"]
    path = write(tmp_path / "c.jsonl", chat(*(said[n % 10] + said[n % 7] for n in range(41)), "end", system=system))
    dataset = open_data(path, tokenizer, 4000)
    assert isinstance(dataset, LineDataset)
    at_once = dataset.example(0)
    monkeypatch.setattr(data_chat, "_FEW_MESSAGES", 100)
    assert at_once == dataset.example(0)
    assert len(answers(dataset, tokenizer)) == 21


def test_a_conversation_of_many_turns_is_rendered_a_few_times(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rendered_characters(turns: int) -> int:
        row = chat(*(f"{n} and {n * n}" for n in range(2 * turns)))
        encoder, texts = data_chat.ChatEncoder(tokenizer), list[str]()
        monkeypatch.setattr(
            data_chat, "apply_template", lambda *a, **o: texts.append(text := apply_template(*a, **o)) or text
        )
        ids, learnt = encoder.encode(row, "")
        assert len(ids) == len(learnt) and any(learnt)
        return sum(map(len, texts))

    assert rendered_characters(400) < 13 * rendered_characters(40)


def test_a_long_conversation_whose_words_the_template_changes_is_refused_beyond_some_hundreds(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "m.content | length | string + m.content")
    path = write(tmp_path / "c.jsonl", chat(*map(str, range(600))))
    refused(lambda: open_data(path, tokenizer, 100).example(0), "600 messages", "generation", kind=UnsupportedError)
