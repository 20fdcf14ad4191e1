"""``brim generate --prompts``: answers in order, JSON lines, a summary, and files that are no prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brim.cli import main
from brim.run.generate.inputs import read_prompts
from support.generating import alone, save
from support.tiny_model import held

SUMMARY = {"batch", "tokens", "seconds", "tokens_per_s"}
SUMMARY |= {"plan", "promised_bytes", "measured_bytes", "s_per_token", "steady_s_per_token", "eta", "compute"}
SUMMARY |= {"precision", "precision_origin"}
PROMPTS = ["hi", "a longer one", "\u00e9t\u00e9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "llama", "llama")


def run(folder: Path, file: Path, *options: str) -> int:
    return main(["generate", str(folder), "--prompts", str(file), "--max-new-tokens", "4", *options])


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_json_is_one_object_per_prompt_and_a_summary(
    name: str, folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    lines = [json.dumps({"prompt": p, "id": 7}) for p in PROMPTS] if name.endswith("l") else PROMPTS
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert run(folder, file, "--json", "--batch", "2") == 0
    output = capsys.readouterr()
    *answers, last = [json.loads(line) for line in output.out.splitlines()]
    assert output.err == ""
    assert [answer["token_ids"] for answer in answers] == alone(folder, PROMPTS, 4)
    assert [(answer["index"], answer["prompt"]) for answer in answers] == list(enumerate(PROMPTS))
    assert all(set(answer) == {"index", "prompt", "text", "token_ids"} for answer in answers)
    assert set(last["summary"]) == SUMMARY
    assert (last["summary"]["batch"], last["summary"]["tokens"]) == (2, 12)
    assert last["summary"]["tokens_per_s"] == 12 / last["summary"]["seconds"]


def test_people_get_prompt_and_answer_and_a_summary_on_stderr(
    folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    assert run(folder, file, "--json") == 0
    texts = [json.loads(line).get("text") for line in capsys.readouterr().out.splitlines()][:-1]
    assert run(folder, file, "--html", str(tmp_path / "page.html")) == 0
    output = capsys.readouterr()
    expected = [f"[{i + 1}] {p}\n{t}\n\n" for i, (p, t) in enumerate(zip(PROMPTS, texts, strict=True))]
    assert output.out == "".join(expected)
    assert "12 tokens in" in output.err and "3 sequences at once" in output.err
    assert "kv_cache" in (tmp_path / "page.html").read_text()


BAD = {
    "empty.txt": (b"", "It is empty"),
    "blank.txt": (b"\n\n", "It is empty"),
    "gap.jsonl": (b'{"prompt": "a"}\n\n{"prompt": " "}\n', "line 3"),
    "latin.txt": (b"one\nt\xe9l\xe9\n", "line 2"),
    "list.jsonl": (b'["one"]\n', "line 1"),
    "number.jsonl": (b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2"),
    "cut.jsonl": (b'{"prompt": "a"}\n{"prompt": "b\n', "line 2"),
    "deep.jsonl": (b"[" * 100_000, "line 1"),
    "long.txt": (b"one\n" + b"word " * 400, "of prompt 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_list_of_prompts_is_one_clear_error(
    name: str, folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    assert run(folder, tmp_path / name, "--json") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Error: ") and len(output.err.strip().splitlines()) == 3
    assert words in output.err
    assert held()["threads"] == []


def test_blank_lines_are_no_prompts(tmp_path: Path) -> None:
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("\none\n \t\n\ntwo\n\n")
    objects.write_text('{"prompt": "one"}\n\n  \n{"prompt": "two"}\n')
    assert read_prompts(lines) == read_prompts(objects) == ["one", "two"]


def test_options_that_cannot_go_together_are_refused(
    folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hi\n")
    for arguments in (
        [str(folder)],
        [str(folder), "--prompt", "hi", "--prompts", str(file)],
        [str(folder), "--prompt", "hi", "--batch", "2"],
        [str(folder), "--prompts", str(file), "--batch", "0"],
        [str(folder), "--prompts", str(file), "--batch", "many"],
        [str(folder), "--prompts", str(tmp_path / "none.txt")],
        [str(folder), "--prompt", "hi", "--prefill-chunk", "0"],
        [str(folder), "--prompt", "hi", "--temperature", "-1"],
        [str(folder), "--prompt", "hi", "--temperature", "nan"],
        [str(folder), "--prompt", "hi", "--top-p", "2"],
        [str(folder), "--prompt", "hi", "--top-k", "0"],
        [str(folder), "--prompt", "hi", "--seed", "1"],
        [str(folder), "--prompt", "hi", "--stop", ""],
        [str(folder), "--prompt", "hi", "--system", "be brief"],
        [str(folder), "--prompt", "hi", "--context", "100"],
        [str(folder), "--prompt", "hi", "--precision", "fp7"],
        [str(folder), "--prompt", "hi", "--plan", str(tmp_path / "none.json")],
    ):
        assert main(["generate", *arguments]) == 2
        output = capsys.readouterr()
        assert output.out == "" and "Error" in output.err and "Traceback" not in output.err


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n")
    assert read_prompts(file) == ["one", "two"]
