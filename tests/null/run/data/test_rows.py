"""Training data as datasets have it: alpaca's rows, ShareGPT's, and ``.json`` files that are one list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.run.data import lines as data_lines
from brim.run.data.dataset import open_data
from brim.run.data.lines import Lines, as_messages

ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello, [you], {there}"}]}
PLAIN = {"messages": [{"role": "user", "content": 'q \\" ]'}, {"role": "assistant", "content": "a,b"}]}


def messages(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in as_messages(row, ValueError)["messages"]]


def test_an_instruction_is_a_question_and_its_answer() -> None:
    assert messages(ALPACA) == [("user", "Add.\n\n2 and 3"), ("assistant", "5")]
    assert messages({"instruction": "Sing.", "input": "", "output": "la"})[0] == ("user", "Sing.")
    assert messages({"instruction": "Sing.", "input": None, "output": "la", "text": None, "system": "s"})[0] == (
        "system",
        "s",
    )


def test_a_conversation_has_speakers() -> None:
    assert messages(SHAREGPT) == [("user", "hi"), ("assistant", "hello, [you], {there}")]
    own = {"conversations": [{"role": "system", "content": "s"}, {"from": "ChatGPT", "value": "a"}]}
    assert messages(own) == [("system", "s"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"instruction": "a", "output": " "}, "no output"),
        ({"instruction": ["a"], "output": "b"}, "instruction is not a string but list"),
        ({"conversations": []}, "one or more messages"),
        ({"conversations": ["hi"]}, "message 1 is not an object"),
        ({"conversations": [{"from": "alien", "value": "hi"}]}, "message 1 is from 'alien'"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "No message is the assistant's"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "not a string but int"),
        ({"prompt": "a"}, "It has no messages"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(PLAIN) + "\n" + json.dumps(row))
    with pytest.raises(UsageError, match="line 2") as caught:
        Lines(path)
    assert says in str(caught.value)


ROWS = [PLAIN, SHAREGPT, ALPACA, {"messages": [{"role": "assistant", "content": "é\u2028" * 40}]}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_a_list_is_read_element_by_element(
    indent: int | None, read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in its strings, and wherever pieces of the file end."""
    monkeypatch.setattr(data_lines, "_READ_BYTES", read_bytes)
    path = tmp_path / "d.json"
    path.write_text("\ufeff " + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = Lines(path)
    assert [lines.row(index) for index in range(len(lines))] == [as_messages(row, ValueError) for row in ROWS]
    assert lines.where(2).endswith("d.json, element 3")


def test_a_json_file_with_an_object_in_each_line_is_read_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert len(Lines(path)) == len(ROWS)
    assert Lines(path).where(1).endswith("line 2")


def test_the_first_line_decides_and_one_of_no_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "a"}))
    with pytest.raises(UsageError, match="its keys are 'prompt'"):
        Lines(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "empty"), ("", "empty"), ("[1]", "not a JSON object but int"), ("[{}, ]", "element 1"),
        ('[{"text": "a"}, ]', "element 2"), ('[{"text": "a"},, {"text": "b"}]', "element 2"),
        ('[{"text": "a"}', "does not end"), ('[{"text": "a}]', "does not end"), ('[{"text": "a"}] 3', "follows it"),
        ('[{"text": "a"}, {"text": 1}]', "element 2"), ("[[[[", "does not end"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_examples_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Lines(path)
    assert says in str(caught.value)


def test_an_element_too_long_to_be_held_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_lines, "_MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(data_lines, "_READ_BYTES", 100)
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b" * 2000}]))
    with pytest.raises(UsageError, match="element 2"):
        Lines(path)


def test_data_of_a_list_is_the_data_of_its_lines(tmp_path: Path) -> None:
    listed, lined = tmp_path / "d.json", tmp_path / "d.jsonl"
    texts = [{"text": "ab"}, {"text": "cd"}]
    listed.write_text(json.dumps(texts))
    lined.write_text("\n".join(map(json.dumps, texts)))

    class Tokenizer:
        eos_token_id, bos_token_id, chat_template, backend_tokenizer = 1, None, None, None

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Made", (), {"input_ids": [ord(letter) for letter in text]})

        def get_vocab(self) -> dict[str, int]:
            return {}

    one, other = (open_data(path, Tokenizer(), 8) for path in (listed, lined))
    assert [one.example(i) for i in range(2)] == [other.example(i) for i in range(2)]
