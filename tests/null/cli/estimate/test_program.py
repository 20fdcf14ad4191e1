"""``brim estimate train.py``: a program as python would find it."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.cli import main

HEAD = """
import sys
import torch
from torch import nn
from sizes import WIDTH
import helper
def net():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).cuda()
"""
LOOP = """
if __name__ == "__main__":
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
    for step in range(10**9):
        loss = model(torch.randn(32, WIDTH, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
        with open("log.txt", "a") as file:
            file.write("a step")
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Writes the program and two modules beside it, and estimates it from another folder, by trace: no CUDA build of
    PyTorch is at hand, whatever the one that runs is."""
    monkeypatch.setattr("brim.rehearsal.environment.find", lambda: None)
    folder = tmp_path / "its place"
    (tmp_path / "temporary").mkdir()
    folder.mkdir()
    (folder / "sizes.py").write_text("WIDTH = 256\n")
    (folder / "helper.py").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("sizes", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def estimate(text: str, *words: str) -> tuple[int, str, str]:
        (folder / "train.py").write_text(HEAD + textwrap.dedent(text))
        code = main(["estimate", "its place/train.py", *words])
        told = capsys.readouterr()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["its place", "temporary"]
        for name in ("sizes", "helper"):
            sys.modules.pop(name, None)
        return code, told.out, told.err

    return estimate


def test_a_program_takes_what_its_step_takes(run: Run) -> None:
    code, out, err = run(LOOP, "--json", "--gpu", "RTX 4090", "--", "0.01")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)

    def build() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss = model(torch.randn(32, 256, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    plain = brim.estimate(build, gpu="RTX 4090")
    assert document["peak_bytes"]["allocated"] == pytest.approx(plain.peak_bytes.allocated, abs=4096)
    assert document["at_peak_bytes"]["optimizer_state"] == plain.at_peak_bytes["optimizer_state"]
    assert document["at_peak_bytes"]["parameters"] == plain.at_peak_bytes["parameters"]
    assert document["flops"] == pytest.approx(plain.flops, rel=0.01)


def test_the_report_says_how_far_it_went_and_what_was_not_kept(run: Run) -> None:
    code, out, err = run(LOOP, "--", "0.01")
    assert code == 0, err
    assert "\ntrain.py: as it is, by trace\n" in out
    assert "optimizer's second step" in out and "log.txt first, were not kept" in " ".join(out.split())


def test_several_optimizers_are_all_stepped_with_their_state(run: Run) -> None:
    text = """
    models = [net() for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    while True:
        for model, optimizer in zip(models, optimizers):
            model(torch.randn(32, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
    """
    code, out, err = run(text, "--json")
    assert code == 0, err
    found = json.loads(out)["at_peak_bytes"]
    assert found["parameters"] == 2 * 4 * (256 * 257 + 257)
    assert found["optimizer_state"] >= 2 * found["parameters"]


def test_a_program_without_an_optimizer_is_traced_to_its_end(run: Run) -> None:
    code, out, err = run("x = net()(torch.zeros(8, WIDTH, device='cuda'))\nsys.exit()", "--json")
    assert code == 0, err
    assert json.loads(out)["at_peak_bytes"]["parameters"] == 4 * (256 * 257 + 257)


def test_a_program_that_calls_no_module_is_one_step(run: Run) -> None:
    text = "x = torch.zeros(1024, 1024, device='cuda')\ny = torch.zeros(1024, 1024, device='cuda')\nz = x @ y"
    code, out, err = run(text, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["peak_bytes"]["allocated"] >= 3 * 4 * 1024 * 1024
    code, out, err = run("model = net()", "--json")
    assert code == 0, err
    assert json.loads(out)["at_peak_bytes"]["parameters"] == 4 * (256 * 257 + 257)


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("print('usage')", [], "The program ended without one.\nIf it needs arguments, give them after --."),
        (LOOP, ["--lr", "3"], "Options of the program go after --."),
        (LOOP, ["--batch", "3"], "--batch was given for its place/train.py."),
        (LOOP, ["--explain-formula"], "--explain-formula was given"),
        (LOOP, ["--gpus", "2"], "--gpus was given"),
        ("sys.exit(3)", [], "SystemExit: 3"),
        ("1 / 0", [], "train.py:9: ZeroDivisionError"),
        ("import os; os.system('true')", [], "cannot start a process"),
    ],
)
def test_what_is_wrong_is_said_in_words(run: Run, text: str, words: list[str], told: str) -> None:
    code, out, err = run(text, *words)
    assert (code, out) == (2, "") and told in err and "Traceback" not in err


def test_only_programs_take_arguments_and_they_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2", "more"]) == 2
    assert "Only programs take arguments" in capsys.readouterr().err
    assert main(["estimate", "nowhere.py"]) == 2
    assert "There is no such file" in capsys.readouterr().err


def test_what_a_program_goes_by_is_said_and_can_be_chosen(run: Run) -> None:
    short = "net()(torch.ones(1, WIDTH, device='cuda'))"
    for words, told in (
        ([], "By trace: No GPU of the catalog is named"),
        (["--gpu", "RTX 4090"], "By trace: There is no CUDA build of PyTorch"),
        (["--gpu", "MI300X"], "By trace: The rehearsal device simulates CUDA"),
        (["--gpu", "RTX 4090", "--by", "trace"], "By trace: --by trace was given"),
    ):
        code, out, err = run(short, *words)
        assert code == 0 and told in err and "as it is, by trace" in out
    code, _, err = run(short, "--gpu", "RTX 4090", "--by", "rehearsal")
    assert code == 2 and "no CUDA build of PyTorch" in err and "`brim rehearse --gpu" in err
    assert main(["estimate", "llama-3.2-1b", "--by", "trace"]) == 2


def test_a_function_of_a_file_imports_what_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside_sizes", raising=False)
    (tmp_path / "beside_sizes.py").write_text("WIDTH = 8\n")
    text = """
    import torch
    def build():
        from beside_sizes import WIDTH
        return torch.nn.Linear(WIDTH, WIDTH), torch.zeros(1, WIDTH)
    """
    (tmp_path / "model.py").write_text(textwrap.dedent(text))
    assert brim.estimate(f"{tmp_path / 'model.py'}:build").at_peak_bytes["parameters"] == 4 * (8 * 8 + 8)


def test_a_trainer_that_saves_writes_nothing(run: Run) -> None:
    text = """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (8, 8))]
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=2, max_steps=4, logging_steps=1, save_steps=1, report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows).train()
    """
    code, out, err = run(text)
    assert code == 0, err
    assert "out first, were not kept" in " ".join(out.split())
