"""``brim generate`` on damaged models, wrong requests and signals: one clear error, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from brim.cli import main
from support.tiny_model import held, save_llama, save_tokenizer

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(cache: Path, scratch: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process: exit code, stdout, stderr."""

    def run(model: object, *options: str, prompt: str = "hi") -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["generate", str(model), "--prompt", prompt, "--max-new-tokens", "3", "--json", *options])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def refused(outcome: tuple[int, str, str], *words: str, code: int = 2) -> str:
    """One error of three parts on stderr, its exit code, nothing on stdout."""
    assert outcome[:2] == (code, ""), outcome[2]
    err = outcome[2]
    assert err.startswith("Error: ")
    assert len(err.strip().splitlines()) == 3, err
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    assert held()["threads"] == []
    return err


@pytest.fixture(scope="module")
def saved_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "shards", hidden=64, max_shard_size="200KB")


@pytest.fixture
def sharded(saved_shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_shards, tmp_path / "sharded")


def second_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def test_damaged_shards_are_one_clear_error(sharded: Path, saved_shards: Path, cli: Cli) -> None:
    shard = second_shard(sharded)
    raw = shard.read_bytes()

    shard.write_bytes(raw[:-10])
    refused(cli(sharded), shard.name, "10 of its", "Fetch it again")

    length = int.from_bytes(raw[:8], "little")
    at = raw.index(b'"F32"') + 2  # the 3 of a dtype
    for damaged in (
        bytes([raw[0] ^ 1]) + raw[1:],
        raw[:7] + bytes([raw[7] ^ 64]) + raw[8:],
        raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :],
        raw[: 8 + length - 2] + bytes([raw[8 + length - 2] ^ 8]) + raw[8 + length - 1 :],
    ):
        shard.write_bytes(damaged)
        refused(cli(sharded), shard.name)

    shard.unlink()
    refused(cli(sharded), shard.name, "not there")

    shutil.copy(saved_shards / shard.name, sharded.parent / "outside.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "../outside.safetensors"))
    refused(cli(sharded), "outside the checkpoint's folder")


def test_a_wrong_dtype_is_one_clear_error(sharded: Path, cli: Cli) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    refused(cli(sharded), "bfloat16", "float32")


@pytest.mark.thorough
def test_a_flipped_bit_in_a_converted_model_is_found(sharded: Path, cli: Cli) -> None:
    from brim.memory.checkpoint_files import read_checkpoint
    from brim.memory.checkpoint_writing import write_safetensors
    from brim.memory.checksums import write_manifest

    values = {
        name: torch.frombuffer(
            bytearray(Path(s.extents[0].path).read_bytes()[s.extents[0].offset :][: s.bytes]), dtype=s.dtype
        ).view(s.shape)
        for name, s in read_checkpoint(sharded).items()
    }
    for shard in sharded.glob("model-*"):
        shard.unlink()
    (sharded / "model.safetensors.index.json").unlink()
    path = sharded / "model.safetensors"
    layout = [(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    write_manifest(sharded, write_safetensors(path, layout, values.items()))
    assert cli(sharded)[0] == 0
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 2
    path.write_bytes(raw)
    refused(cli(sharded), "checksum differs")


def test_verify_finds_a_flipped_bit_in_a_hub_download_and_says_where_it_cannot_tell(
    sharded: Path, tmp_path: Path, cli: Cli
) -> None:
    refused(cli(sharded, "--verify"), "no checksums")
    repo = tmp_path / "models--some--model"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots").mkdir()
    snapshot = sharded.rename(repo / "snapshots" / "abc")
    for shard in sorted(snapshot.glob("*.safetensors")):
        blob = repo / "blobs" / hashlib.sha256(shard.read_bytes()).hexdigest()
        shard.rename(blob)
        shard.symlink_to(Path("../../blobs") / blob.name)
    assert cli(snapshot, "--verify")[0] == 0
    raw = bytearray(blob.read_bytes())
    raw[-100] ^= 2
    blob.write_bytes(raw)
    refused(cli(snapshot, "--verify"), "damaged", "fetch it again")


def test_a_tokenizer_that_is_missing_or_of_another_model_is_one_clear_error(sharded: Path, cli: Cli) -> None:
    (sharded / "chat_template.jinja").write_text("{{ raise_exception('only questions') }}")
    refused(cli(sharded), "only questions", "--no-chat")
    (sharded / "chat_template.jinja").unlink()
    refused(cli(sharded, "--chat"), "template")
    tokenizer = (sharded / "tokenizer.json").read_text()
    (sharded / "tokenizer.json").write_text(re.sub(r'"h": \d+', '"h": 300', tokenizer))
    refused(cli(sharded), "token 300", "300 tokens")
    (sharded / "tokenizer.json").unlink()
    refused(cli(sharded), "tokenizer")


def test_requests_that_cannot_be_are_one_clear_error(saved_shards: Path, tmp_path: Path, cli: Cli) -> None:
    (saved_shards / "chat_template.jinja").unlink(missing_ok=True)
    save_tokenizer(saved_shards, chat_template=None)
    refused(cli(saved_shards, prompt=""), "empty")
    refused(cli(saved_shards, prompt="x" * 4094), "4096 in all", "Shorten")
    refused(cli(saved_shards, "--ram", "999TiB"), "999 TiB", "This machine has")
    refused(cli(saved_shards, "--ram", "0"), "at least", "--ram", code=3)
    refused(cli(tmp_path), "config.json")
    refused(cli(tmp_path / "nowhere"), "no such file or folder")
    refused(cli(saved_shards / "config.json"), "neither a folder nor a .gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ram", "-5GiB"], ["--ram", "8GiB, 512MiB"]),
        (["--ram", "3 potatoes"], ["--ram", "8GiB, 512MiB"]),
        (["--vram", "9" * 5000], ["--vram", "8GiB, 512MiB"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens", "x>=1"]),
        (["--max-new-tokens", "many"], ["--max-new-tokens", "integer"]),
        (["--max-new-token", "3"], ["--max-new-tokens"]),
        (["--devcie", "cpu"], ["--device"]),
        (["--device", "gpu"], ["'auto', 'cuda', 'xpu', 'npu', 'cpu'"]),
        (["extra"], ["unexpected extra argument"]),
    ],
)
def test_wrong_options_are_exit_code_2_before_anything_is_done(
    options: list[str], words: list[str], cli: Cli, tmp_path: Path
) -> None:
    code, out, err = cli(str(tmp_path), *options)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err


def test_model_and_prompt_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "hi"]) == 2
    assert "MODEL" in capsys.readouterr().err
    assert main(["generate", "model"]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_a_model_that_does_not_generate_says_so(tmp_path: Path, cli: Cli) -> None:
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    save_tokenizer(tmp_path / "bert")
    refused(cli(tmp_path / "bert"), "BertForMaskedLM does not generate")


def test_code_that_comes_with_a_model_is_not_run_and_pickles_are_not_read(sharded: Path, cli: Cli) -> None:
    (sharded / "pytorch_model.bin").write_bytes(b"not looked at")
    assert cli(sharded)[0] == 0
    config = json.loads((sharded / "config.json").read_text())
    for name in ("modeling_mine", "configuration_mine"):
        (sharded / f"{name}.py").write_text("import os\nos._exit(7)\n")
    own = {"AutoConfig": "configuration_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}
    (sharded / "config.json").write_text(
        json.dumps(config | {"model_type": "mine", "architectures": ["Mine"], "auto_map": own})
    )
    refused(cli(sharded), "trust_remote_code")
    (sharded / "config.json").write_text(json.dumps(config))
    for path in sharded.glob("*.safetensors*"):
        path.unlink()
    refused(cli(sharded), "never loads pickles")


def test_the_smallest_budget_of_an_error_then_works(llama: Path, cli: Cli) -> None:
    cli(llama)  # what the libraries import and keep is here now, and not part of the budget
    message = refused(cli(llama, "--ram", "1B"), code=3)
    least = re.search(r"Give --ram (\d+)MiB or more", message)
    assert least is not None
    code, out, err = cli(llama, "--ram", f"{int(least[1]) + 1}MiB")  # heaps vary by a little from run to run
    assert code == 0, err
    assert json.loads(out)["measured_bytes"]["ram"] <= (int(least[1]) + 1) << 20


# -- in processes of their own


def spawn(model: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "brim", "generate", str(model), "--prompt", "hi", *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    stop_s = time.monotonic() + 120
    while time.monotonic() < stop_s and process.poll() is None:
        if ready():
            return
        time.sleep(0.005)
    raise AssertionError(f"it never came to that: {process.communicate()}")


def opened(process: subprocess.Popen[str], word: str) -> bool:
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            if word in str(link.readlink()):
                return True
        except FileNotFoundError:
            continue
    return False


def maps(process: subprocess.Popen[str], word: str) -> bool:
    return word in Path(f"/proc/{process.pid}/maps").read_text()


# When to interrupt: libraries being imported, the weights being opened, text coming.
MOMENTS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "importing": lambda process: wait_until(process, lambda: maps(process, "libtorch")),
    "loading": lambda process: wait_until(process, lambda: opened(process, "model.safetensors")),
    "generating": lambda process: process.stdout and process.stdout.read(3),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("importing", signal.SIGINT),
        ("loading", signal.SIGINT),
        ("generating", signal.SIGINT),
        ("generating", signal.SIGTERM),
    ],
)
def test_signals_end_it_at_once_and_leave_nothing(
    moment: str, number: signal.Signals, saved_llama: Path, cache: Path, scratch: Path
) -> None:
    before = sorted(cache.rglob("*"))
    process = spawn(saved_llama, "--max-new-tokens", "4000", TMPDIR=str(scratch))
    try:
        MOMENTS[moment](process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    code, word = (130, "Interrupted.") if number == signal.SIGINT else (143, "Terminated.")
    assert process.returncode == code, err
    assert err.strip().splitlines()[-1] == word
    assert "Traceback" not in err
    assert sorted(cache.rglob("*")) == before
    assert list(scratch.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_while_a_gguf_is_converted_leave_neither_files_nor_processes(
    number: signal.Signals, cache: Path, tmp_path: Path
) -> None:
    path, folder = tmp_path / "slow.gguf", cache / "brim" / "gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(1000))
    folder.unlink()  # it leads to one that other tests write to
    folder.mkdir()
    process = spawn(path)
    try:
        wait_until(process, lambda: any(folder.glob(".slow-*")) and bool(children(process)))
        (child,) = children(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=250)
    finally:
        process.kill()
    if number != signal.SIGKILL:  # nobody can clean up after that
        assert process.returncode == 128 + number, err
        assert "Traceback" not in err
        assert list(folder.iterdir()) == []
    stop_s = time.monotonic() + 60
    while alive(child) and time.monotonic() < stop_s:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(process: subprocess.Popen[str]) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in found.split()]


@pytest.mark.thorough
def test_a_file_cut_short_while_generating_is_one_error_and_no_crash(llama: Path, cache: Path) -> None:
    process = spawn(llama, "--ram", least_megabytes(llama), "--max-new-tokens", "4000")
    try:
        assert process.stdout is not None
        process.stdout.read(3)
        os.truncate(llama / "model.safetensors", 1 << 20)
        _, err = process.communicate(timeout=250)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert re.search(r"model\.safetensors\.\n(The file ends|It was written to)", err), err


def least_megabytes(model: Path) -> str:
    process = spawn(model, "--ram", "1B", "--max-new-tokens", "4000")
    _, err = process.communicate(timeout=250)
    least = re.search(r"Give --ram (\d+)MiB or more", err)
    assert least is not None, err
    return f"{int(least[1]) + 8}MiB"


@pytest.mark.thorough
def test_a_reader_that_goes_away_ends_it_quietly(saved_llama: Path, cache: Path) -> None:
    with spawn(saved_llama, "--max-new-tokens", "4000") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert err == ""


def test_a_bad_request_makes_no_connection(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("this was not to touch the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    refused(cli("./not-here"), "no such file or folder")
