"""Training over ranks that torchrun starts: the same course as on one, in the memory that was predicted."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import splitting
from brim.core import Timeline
from brim.estimation.parallel import Split
from brim.estimation.ranks import cpu_bytes
from brim.run.data import Batches, open_data
from brim.run.trainee import add_lora
from splitting import BATCH, LR, SEQ, STEPS, brim_train, command, environment, signal_rank, torchrun, trained
from tiny_model import save_llama, save_tokenizer
from trainings import course, plain, weights, write_text

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about its own process groups

SP = {"sequence_parallel": True}
TABLE = "transformer.wte.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=4, hidden=64, positions=128)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose output layer is its embedding."""
    folder = save_llama(tmp_path_factory.mktemp("tied"), layers=4, hidden=64, positions=128)
    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output layer is its embedding."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=4, n_positions=128, vocab_size=300, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def alone(llama: Path, text: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch in one process."""
    return plain(llama, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)


def split_of(ranks: int, given: dict[str, Any]) -> Split:
    names = ("zero", "tp", "pp", "interleave", "sequence_parallel", "stage_layers")
    shape = {name: given[name] for name in names if name in given}
    return Split(gpus=ranks, gpus_per_node=ranks, global_batch=BATCH, micro_batch=given["micro_batch"], **shape)


def check(made: list[Any], output: Path, alone: Any, *splits: dict[str, Any]) -> None:
    """Every split, the first of ``made``, has the losses and the weights of one process."""
    losses, last = alone
    assert len(made) >= len(splits)
    for number, (split, found) in enumerate(zip(splits, made, strict=False)):
        assert found["losses"] == pytest.approx(losses, abs=1e-5), split
        for name, value in weights(output / str(number)).items():
            assert torch.allclose(value, last[name], atol=1e-5), (split, name)


def check_memory(ranks: int, llama: Path, made: list[Any], *splits: dict[str, Any]) -> None:
    """Measured bytes of every rank are the predicted ones within 2 %."""
    for split, found in zip(splits, made, strict=True):
        measured = [rank["allocated_bytes"] for rank in found["ranks"]]
        recompute = split.get("checkpointing")
        predicted = cpu_bytes(llama, split_of(ranks, split), seq=SEQ, checkpointing=recompute)
        assert measured == pytest.approx(predicted, rel=0.02), split


def test_two_ranks_have_the_losses_the_weights_and_the_predicted_bytes_of_one(
    llama: Path, gpt2: Path, text: Path, tmp_path: Path, alone: Any
) -> None:
    """Of each kind one, in one group of processes; GPT-2's output layer is its embedding, on both stages."""
    splits = [
        {"zero": 3, "micro_batch": 6}, {"tp": 2, "micro_batch": 12, **SP},
        {"pp": 2, "micro_batch": 6, "stage_layers": (3, 1)}, {"pp": 2, "interleave": 2, "micro_batch": 3},
    ]  # fmt: skip
    tied = {"pp": 2, "micro_batch": 6}
    lora = {"method": "lora", "zero": 3, "micro_batch": 3}
    made = trained(2, llama, text, tmp_path, *splits, {**tied, "model": str(gpt2)}, lora)
    check(made, tmp_path, alone, *splits)
    check_memory(2, llama, made[:4:3], *splits[::3])
    whole = Timeline.read(tmp_path / "0" / "timeline-1.json")
    assert whole.measured
    assert whole.peak_bytes("ram") >= made[0]["ranks"][1]["allocated_bytes"] > 1 << 20
    of_gpt2 = plain(gpt2, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
    assert made[4]["losses"] == pytest.approx(of_gpt2[0], abs=1e-5)
    assert torch.allclose(weights(tmp_path / "4")[TABLE], of_gpt2[1][TABLE], atol=1e-5)
    check_memory(2, gpt2, made[4:5], tied)
    check_adapter(made[5]["losses"], tmp_path / "5", adapted(llama, text))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_splits_of_two_ranks(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    splits = [
        {"zero": 0, "micro_batch": 6}, {"zero": 1, "micro_batch": 3}, {"zero": 2, "micro_batch": 1},
        {"tp": 2, "micro_batch": 12}, {"pp": 2, "micro_batch": 6, "stage_layers": (3, 1)},
        {"pp": 2, "micro_batch": 6},
        {"tp": 2, "micro_batch": 4, "checkpointing": "full"},
        {"pp": 2, "micro_batch": 1, "checkpointing": "selective"},
    ]  # fmt: skip
    made = trained(2, llama, text, tmp_path, *splits)
    check(made, tmp_path, alone, *splits)
    check_memory(2, llama, made, *splits)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_splits_of_four_ranks(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    splits = [
        {"zero": 3, "micro_batch": 3}, {"zero": 0, "micro_batch": 1}, {"zero": 1, "tp": 2, "micro_batch": 2, **SP},
        {"zero": 2, "tp": 2, "micro_batch": 3}, {"pp": 2, "zero": 1, "micro_batch": 1},
        {"pp": 2, "tp": 2, "micro_batch": 2, **SP}, {"pp": 4, "micro_batch": 1, "checkpointing": "full"},
        {"pp": 2, "interleave": 2, "zero": 1, "micro_batch": 1}, {"pp": 2, "zero": 3, "micro_batch": 3},
    ]  # fmt: skip
    made = trained(4, llama, text, tmp_path, *splits)
    check(made, tmp_path, alone, *splits)
    check_memory(4, llama, made, *splits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tied_embedding_is_clipped_and_resumed_as_one_weight(gpt2: Path, text: Path, tmp_path: Path) -> None:
    losses = plain(gpt2, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)[0]
    split = {"pp": 2, "micro_batch": 6}
    half = {**split, "output": str(tmp_path / "half")}
    steps = [{**half, "steps": 2, "save_every": 2}, {**half, "resume": True}]
    made = trained(2, gpt2, text, tmp_path, {**split, "clip_norm": 0.1}, *steps)
    one = trained(1, gpt2, text, tmp_path / "one", {"clip_norm": 0.1, "micro_batch": 12})[0]["losses"]
    assert one != pytest.approx(losses, abs=1e-5)
    assert made[0]["losses"] == pytest.approx(one, abs=1e-5)
    assert made[1]["losses"] + made[2]["losses"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tied_embedding_is_split_with_its_stages(gpt2: Path, tied: Path, text: Path, tmp_path: Path) -> None:
    of_gpt2 = [{"pp": 2, "zero": zero, "micro_batch": 3} for zero in (1, 3)]
    of_llama = [{"pp": 2, "tp": 2, "micro_batch": 4, **SP}, {"pp": 4, "micro_batch": 3}]
    of_llama += [{"pp": 2, "interleave": 2, "zero": 1, "micro_batch": 1}]
    for folder, splits in ((gpt2, of_gpt2), (tied, of_llama)):
        reference = plain(folder, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
        made = trained(4, folder, text, tmp_path / folder.name, *splits)
        for number, found in enumerate(made):
            assert found["losses"] == pytest.approx(reference[0], abs=1e-5), splits[number]
            kept = weights(tmp_path / folder.name / str(number))
            (table,) = (name for name in kept if name.endswith(("wte.weight", "embed_tokens.weight")))
            assert torch.allclose(kept[table], reference[1][table], atol=1e-5), splits[number]
        check_memory(4, folder, made, *splits)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_dimensions_at_once(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    splits = [{"pp": 2, "tp": 2, "zero": zero, "micro_batch": 2, **SP} for zero in (1, 3)]
    check(trained(8, llama, text, tmp_path, *splits), tmp_path, alone, *splits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clipping_is_exact_across_ranks(llama: Path, text: Path, tmp_path: Path) -> None:
    """Gradients of this model have norms of about 2: all of these steps are clipped."""
    splits = [{"zero": 3, "micro_batch": 6}, {"tp": 2, "micro_batch": 12, **SP}, {"pp": 2, "micro_batch": 6}]
    one = trained(1, llama, text, tmp_path / "one", {"clip_norm": 0.1, "micro_batch": 12})[0]["losses"]
    free = trained(1, llama, text, tmp_path / "free", {"micro_batch": 12})[0]["losses"]
    assert one != pytest.approx(free, abs=1e-5)
    for found in trained(2, llama, text, tmp_path / "two", *({**split, "clip_norm": 0.1} for split in splits)):
        assert found["losses"] == pytest.approx(one, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_go_on_from_a_checkpoint_of_two_ranks(llama: Path, text: Path, tmp_path: Path) -> None:
    one = adapted(llama, text)
    lora = {"method": "lora", "micro_batch": 3}
    half = {**lora, "zero": 1, "output": str(tmp_path / "half")}
    splits = [{**lora, "zero": 0}, {**half, "steps": 2, "save_every": 2}, {**half, "resume": True}]
    made = trained(2, llama, text, tmp_path, *splits)
    check_adapter(made[0]["losses"], tmp_path / "0", one)
    check_adapter(made[1]["losses"] + made[2]["losses"], tmp_path / "half", one)


def check_adapter(losses: list[float], output: Path, one: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    """The course of one process, and its adapter in peft's own file."""
    assert losses == pytest.approx(one[0], abs=1e-5)
    found = weights(output)
    assert found.keys() == one[1].keys()
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in one[1].items())
    assert json.loads((output / "adapter_config.json").read_text())["r"] == 8


def adapted(model: Path, data: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters of plain PyTorch and peft in one process."""
    batches = Batches(open_data(data, AutoTokenizer.from_pretrained(model), SEQ), BATCH, seed=0, pad_to=SEQ)
    module = add_lora(AutoModelForCausalLM.from_pretrained(model), 0).train()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LR)
    losses = []
    for _ in range(STEPS):
        loss = module(**next(batches)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in get_peft_model_state_dict(module).items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_four_ranks_goes_on_with_one_two_and_three(llama: Path, text: Path, tmp_path: Path) -> None:
    whole = plain(llama, text, 6, seq=SEQ, batch=BATCH, lr=LR)[0]
    for ranks, split in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (3, {"zero": 3})):
        output = tmp_path / f"{ranks}-{len(list(tmp_path.iterdir()))}"
        first = {"zero": 3, "tp": 2, "steps": 3, "save_every": 3, "output": str(output)}
        trained(4, llama, text, tmp_path, first)
        rest = {**split, "steps": 6, "resume": True, "output": str(output)}
        (found,) = trained(ranks, llama, text, tmp_path, rest)
        assert found["losses"] == pytest.approx(whole[3:], abs=1e-5)


@pytest.mark.parametrize(
    "lines", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_started_again_and_the_course_is_the_same(
    llama: Path, text: Path, tmp_path: Path, lines: int
) -> None:
    whole = plain(llama, text, 16, seq=SEQ, batch=BATCH, lr=LR)[0]
    words = brim_train(llama, text, tmp_path, "--steps", "16", "--zero", "3", "--save-every", "2")
    process = subprocess.Popen(
        command(2, *words, restarts=2), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        signal_rank(process, lines % 2, tmp_path, lines, signal.SIGKILL)
        _, told = process.communicate(timeout=200)
    finally:
        process.terminate()  # which torchrun passes on
        process.wait(timeout=60)
    assert process.returncode == 0, told[-3000:]
    steps = course(tmp_path)
    assert [step for step, _ in steps] == list(range(1, 17))
    assert [loss for _, loss in steps] == pytest.approx(whole, abs=1e-5)


BAD = {
    "tp": (["--tp", "3"], "no multiple of 3"),
    "heads": (["--tp", "2", "--batch", "5", "--pp", "2"], "2 GPUs were to be split into tp 2 x pp 2"),
    "batch": (["--zero", "3", "--batch", "5"], "--global-batch 5 was given"),
    "file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "option": (["--zero", "3", "--stream-weights", "off"], "--stream-weights was given for several ranks"),
}


@pytest.mark.parametrize(
    "case", ["tp", *(pytest.param(name, marks=pytest.mark.slow) for name in BAD if name != "tp")]
)
def test_what_cannot_be_split_is_told_once_and_ends_all(llama: Path, text: Path, tmp_path: Path, case: str) -> None:
    words, told = BAD[case]
    done = torchrun(2, *brim_train(llama, text, tmp_path / "out", *words), timeout_s=120)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stderr[-3000:]
    assert told in done.stderr
    assert done.stderr.count("Traceback") <= 1, "torchrun's own"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_without_the_data_ends_all(llama: Path, text: Path, tmp_path: Path, rank: int) -> None:
    words = [str(llama), str(text), str(tmp_path), json.dumps({"zero": 3, "rank_without_data": rank})]
    done = torchrun(2, str(Path(splitting.__file__)), *words, timeout_s=120)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: ")] == [
        "Error: nowhere.txt was given as training data."
    ], done.stderr[-3000:]


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_and_not_waited_for_for_ever(
    llama: Path, text: Path, tmp_path: Path
) -> None:
    words = brim_train(llama, text, tmp_path, "--steps", "100000", "--zero", "3", "--timeout", "6")
    process = subprocess.Popen(
        command(2, *words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        signal_rank(process, 1, tmp_path, 2, signal.SIGSTOP)
        _, told = process.communicate(timeout=150)
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert process.returncode != 0
    assert "Error: Rank 0 was to exchange tensors with other ranks." in told, told[-3000:]
    assert "Rank 1 had not come to step" in told or "All were in step" in told


@pytest.mark.slow
def test_more_stages_than_layers(llama: Path, text: Path, tmp_path: Path) -> None:
    small = save_llama(tmp_path / "small", layers=1, hidden=64, positions=128)
    done = torchrun(2, *brim_train(small, text, tmp_path / "out", "--pp", "2"), timeout_s=120)
    assert done.returncode != 0
    assert done.stderr.count("Error: 2 pipeline stages were asked for.") == 1, done.stderr[-3000:]
