"""``brim train`` with bad data, models, folders and options: one error of three parts that names the culprit."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from brim.cli import main
from brim.errors import BudgetError
from brim.run.checkpoint.reading import steps
from support.tiny_model import held, save_tokenizer
from support.trainings import course

Cli = Callable[..., tuple[int, str, str]]
GOOD = json.dumps({"text": "a line that is fine, and long enough to learn from"})
CHAT = json.dumps(
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4, of course"}]}
)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def cli(tiny: Path, output: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process: exit code, stdout, stderr."""

    def run(data: Path, *options: str, model: Path = tiny) -> tuple[int, str, str]:
        capsys.readouterr()
        command = ["train", str(model), "--data", str(data), "--output", str(output), "--seq", "16", "--batch", "2"]
        code = main([*command, "--steps", "2", "--device", "cpu", "--json", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(outcome: tuple[int, str, str], *words: str, code: int = 2) -> str:
    ended, out, err = outcome
    assert (ended, out) == (code, ""), err
    told = [line for line in err.strip().splitlines() if not line.startswith("Warning: ")]
    assert told[0].startswith("Error: ") and len(told) <= 3, err
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    assert held()["threads"] == []
    return err


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ('{"text": "a"', "It is not JSON"),
    "no object": ("[1]", "not a JSON object"),
    "no text": ('{"txt": "a"}', "It has no text"),
    "messages": (CHAT, "It has no text"),
    "an empty text": ('{"text": ""}', "text is empty"),
    "no UTF-8": (b'{"text": "\xff"}', "not UTF-8"),
    "too long": (b'{"text": "' + b"a" * (17 << 20) + b'"}', "longer than 16 MiB"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_by_its_number_before_anything_is_written(
    name: str, cli: Cli, tmp_path: Path, output: Path
) -> None:
    line, word = BAD_LINES[name]
    refused(cli(write(tmp_path / "data.jsonl", GOOD, GOOD, line, GOOD)), "data.jsonl, line 3", word)
    assert not output.exists() or list(output.iterdir()) == []


@pytest.mark.filterwarnings("always:.* is cut to:UserWarning")
def test_a_line_of_more_tokens_than_a_sequence_is_cut_and_the_first_is_named(
    cli: Cli, tmp_path: Path, quick_trainings: None
) -> None:
    code, _, err = cli(write(tmp_path / "data.jsonl", '{"text": "short"}', json.dumps({"text": "word " * 900})))
    assert code == 0, err
    assert "line 2 has 4501 tokens and is cut to 16" in err


def test_data_that_is_empty_missing_a_folder_or_of_another_kind_is_refused(cli: Cli, tmp_path: Path) -> None:
    refused(cli(write(tmp_path / "empty.jsonl", "")), "empty.jsonl", "It is empty")
    refused(cli(write(tmp_path / "empty.txt", "")), "empty.txt", "It is empty")
    refused(cli(tmp_path / "none.jsonl"), "none.jsonl", "No such file")
    refused(cli(write(tmp_path / "short.txt", "a")), "sequences of 16 tokens", "It has only 3")
    refused(cli(write(tmp_path / "data.parquet", "PAR1")), "'.parquet'")
    (tmp_path / "folder.jsonl").mkdir()
    refused(cli(tmp_path / "folder.jsonl"), "folder.jsonl", "no text files")
    refused(cli(write(tmp_path / "latin.txt", "fine", "caf\xe9".encode("latin-1"))), "line 2", "not UTF-8")


def test_a_tokenizer_that_is_missing_of_another_model_or_without_a_template_is_refused(
    cli: Cli, tiny: Path, tmp_path: Path
) -> None:
    model, data = Path(shutil.copytree(tiny, tmp_path / "model")), write(tmp_path / "data.jsonl", CHAT)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    save_tokenizer(model, chat_template=None)
    refused(cli(data, model=model), "chat template", "The tokenizer has none")
    text = write(tmp_path / "text.txt", "all that follows is hearsay, the hearing of the heath, or heather")
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(re.sub(r'"h": \d+', '"h": 300', tokenizer))
    refused(cli(text, model=model), "300 tokens", "token 300", "'h'")
    (model / "tokenizer.json").unlink()
    refused(cli(text, model=model), "tokenizer")


def test_an_output_that_cannot_be_written_to_is_refused(
    cli: Cli, tiny: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "file", "")
    for place, word in (
        (tmp_path / "file", "is a file"), (tmp_path / "file" / "below", "Not a directory"), (Path("/proc/brim"), "")
    ):  # fmt: skip
        code, out, err = cli(text, "--output", str(place))
        assert (code, out) == (2, ""), err
        assert str(place) in err and word in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("disk", "word"), [("/no/such/folder", "is not a folder"), ("{here}:lots", "8GiB, 512MiB"), ("{here}:-1", "8GiB")]
)
def test_a_disk_that_is_no_folder_or_no_amount_is_refused(
    disk: str, word: str, cli: Cli, text: Path, tmp_path: Path
) -> None:
    code, out, err = cli(text, "--disk", disk.format(here=tmp_path))
    assert (code, out) == (2, "") and "--disk" in err and word in err, err


@pytest.mark.thorough
def test_a_disk_budget_that_is_too_small_says_what_would_do_and_that_does(
    cli: Cli, text: Path, tmp_path: Path, quick_trainings: None
) -> None:
    orders = ["--offload-optimizer", "disk", "--stream-weights", "off", "--micro-batch", "2"]
    orders += ["--checkpointing", "none", "--offload-activations", "0", "--clip-norm", "1"]
    err = refused(cli(text, "--disk", f"{tmp_path}:16KiB", *orders), "16 KiB of DISK", code=BudgetError.exit_code)
    least = re.search(r"--disk (\d+)MiB", err)
    assert least is not None, err
    code, out, err = cli(text, "--disk", f"{tmp_path}:{least[1]}MiB", *orders)
    assert code == 0, err
    assert 0 < json.loads(out)["measured_bytes"]["disk"] <= int(least[1]) << 20


def test_a_step_that_spoils_the_weights_ends_it_and_the_checkpoint_before_is_there(
    cli: Cli, text: Path, output: Path, quick_trainings: None
) -> None:
    assert cli(text, "--steps", "2", "--save-every", "1")[0] == 0
    options = ["--steps", "6", "--save-every", "1", "--resume"]
    code, out, err = cli(text, "--lr", "1e38", "--change-settings", *options)
    note, error = err.split("\n", 1)
    assert note == "--lr is 1e+38 from here on; it was 2e-05 before."
    refused((code, out, error), "values that are not finite", "--resume")
    assert steps(output) == [1, 2]
    code, _, err = cli(text, *options)
    assert code == 0, err
    assert [step for step, _ in course(output)] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for _, loss in course(output))


def test_numbers_that_cannot_be_meant_are_refused(cli: Cli, text: Path) -> None:
    for option, value in (
        ("--batch", "0"), ("--seq", "1"), ("--lr", "-1"), ("--clip-norm", "0"), ("--warmup", "-1"),
        ("--save-every", "0"), ("--micro-batch", "many"), ("--schedule", "linear"), ("--offload-activations", "-1"),
    ):  # fmt: skip
        code, out, err = cli(text, option, value)
        assert (code, out) == (2, "") and option in err, err
