"""A model whose layers or tensors lie on several ranks says what it says on one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from brim.cli import main
from brim.errors import BrimError
from brim.processes import python_command
from brim.run.generate.request import Request
from brim.run.ranks.generate import RanksRequest
from brim.run.ranks.group import start
from support.generating_over_ranks import generated
from support.tiny_model import save_llama, save_tokenizer

PROMPT, TOKENS = "what is said here", 12
SMALL = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=64, positions=128)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output layer is its embedding, and positions have a table."""
    torch.manual_seed(1)
    config = GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128, **SMALL)
    return saved(GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers are of two kinds in turn, one with a window shorter than the text."""
    torch.manual_seed(2)
    config = Gemma2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=8, max_position_embeddings=128, pad_token_id=0, **SMALL,
    )  # fmt: skip
    return saved(Gemma2ForCausalLM(config), tmp_path_factory.mktemp("gemma"))


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder, chat_template=None)
    return folder


DRAWN = {"temperature": 1.5, "top_k": 50, "seed": 11}


def alone(folder: Path, **drawn: Any) -> list[int]:
    """By plain transformers in this process, greedily or with what is drawn."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    given = {name: value for name, value in drawn.items() if name != "seed"}
    with torch.random.fork_rng():
        torch.manual_seed(drawn.get("seed", 0))
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=bool(drawn), pad_token_id=0, **given
        )
    return list(out[0, ids.shape[1] :].tolist())


def request(folder: Path, split: str) -> dict[str, Any]:
    return {"model": str(folder), "prompt": PROMPT, "max_new_tokens": TOKENS, "chat": False, "split": split}


@pytest.mark.thorough
def test_layers_or_tensors_on_two_ranks_say_what_one_process_says(llama: Path, gpt2: Path) -> None:
    asked = [(llama, "layers"), (llama, "tensors"), (gpt2, "layers")]
    *made, drawn = generated(
        2, *(request(folder, split) for folder, split in asked), request(llama, "layers") | {"sampling": DRAWN}
    )
    for (folder, split), found in zip(asked, made, strict=True):
        assert found["token_ids"] == alone(folder), (folder.name, split)
    assert (drawn["token_ids"], drawn["seed"]) == (alone(llama, **DRAWN), 11)
    whole = sum(path.stat().st_size for path in llama.glob("*.safetensors"))
    for found in made[:2]:
        held = [rank["weights_bytes"] for rank in found["ranks"]]
        assert max(held) < 0.6 * whole
        assert sum(held) > 0.9 * whole


@pytest.mark.slow
def test_layers_of_two_kinds_and_products_in_one_are_split(gpt2: Path, gemma: Path) -> None:
    asked = [(gpt2, "tensors"), (gemma, "layers"), (gemma, "tensors")]
    made = generated(2, *(request(folder, split) for folder, split in asked))
    for (folder, split), found in zip(asked, made, strict=True):
        assert found["token_ids"] == alone(folder), (folder.name, split)


@pytest.mark.slow
def test_three_ranks_have_layers_of_their_own(llama: Path, gemma: Path) -> None:
    for folder, found in zip(
        (llama, gemma), generated(3, *(request(f, "layers") for f in (llama, gemma))), strict=True
    ):
        assert found["token_ids"] == alone(folder)


def test_ranks_are_told_all_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[list[str]] = []
    monkeypatch.setattr("brim.run.ranks.group.start", lambda gpus, told: words.append(told) or 0)
    drawn = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--seed", "3"]
    given = [*drawn, "--stop", "a", "--stop", "b", "--system", "be brief"]
    assert main(["generate", "model", "--prompt", "hi", "--gpus", "2", *given]) == 0
    for option, value in zip(given[::2], given[1::2], strict=True):
        assert (option, value) in zip(words[0], words[0][1:], strict=False)


@pytest.mark.slow
def test_the_command_starts_its_ranks_itself(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(llama), "--prompt", PROMPT, "--no-chat", "--max-new-tokens", str(TOKENS)]
    assert main([*command, "--gpus", "2"]) == 0
    output = capfd.readouterr()
    said = AutoTokenizer.from_pretrained(llama).decode(alone(llama), skip_special_tokens=True)
    assert output.out == f"{said}\n"
    assert "layers split" in output.err


@pytest.mark.slow
def test_what_does_not_divide_is_told_once_and_ends_all(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(llama), "--prompt", PROMPT, "--no-chat", "--gpus", "3", "--split", "tensors"]) == 2
    assert capfd.readouterr().err.count("Error: ") == 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all(llama: Path, rank: int) -> None:
    words = ["generate", str(llama), "--prompt", "a", "--no-chat", "--max-new-tokens", "120", "--split", "tensors"]
    process = subprocess.Popen(
        [sys.executable, "-m", "brim", *words, "--gpus", "2", "--timeout", "20"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 60
    while len(children.read_text().split()) < 2:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    os.kill(int(children.read_text().split()[rank]), signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode != 0
    assert told.count("Error: ") == 1, told[-3000:]


def test_ranks_that_fail_give_their_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert start(2, ["no-such-command"]) == 2


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"vram": "1GiB"}, "Cannot use --vram with --gpus"), ({"precision": "int8"}, "--precision int8"),
        ({"prompt": ["a", "b"]}, "one prompt at a time"), ({"prefill_chunk": 4}, "--prefill-chunk"),
    ],
)  # fmt: skip
def test_what_ranks_do_not_do_is_refused(option: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"model": "llama", "prompt": "a", **option}
    with pytest.raises(BrimError, match=told):
        RanksRequest(generation=Request(**given)).check()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--split", "layers"], "--split was given"), (["--timeout", "5"], "--timeout was given"),
        (["--gpus", "2", "--ram", "1GiB"], "Cannot use --ram with --gpus"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_one_clear_error(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "llama", "--prompt", "a", *words]) == 2
    assert told in capsys.readouterr().err


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which a process and what it has started take connections."""
    found: set[str] = set()
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found |= {sock.laddr.ip for sock in one.net_connections("tcp") if sock.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.thorough
def test_ranks_of_this_machine_listen_to_it_alone_and_meet_where_no_other_user_can(
    llama: Path, tmp_path: Path
) -> None:
    command = python_command(
        "-m", "brim", "generate", llama, "--gpus", "2", "--prompt", "x", "--max-new-tokens", "100"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    addresses: set[str] = set()
    modes: set[int] = set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            addresses |= listening(process)
            with contextlib.suppress(FileNotFoundError):
                modes |= {folder.stat().st_mode & 0o777 for folder in tmp_path.glob("brim-ranks-*")}
            time.sleep(0.05)
    assert child.returncode == 0
    assert addresses == {"127.0.0.1"}  # gloo's
    assert modes == {0o700}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_ranks_end_with_the_process_that_started_them(llama: Path) -> None:
    command = python_command(
        "-m", "brim", "generate", llama, "--gpus", "2", "--prompt", "x", "--max-new-tokens", "100"
    )
    with subprocess.Popen(
        [*command, "--timeout", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        while len(children := psutil.Process(child.pid).children()) < 2:
            time.sleep(0.02)
        child.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
