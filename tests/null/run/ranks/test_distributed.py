"""Training over ranks that torchrun starts: the same course as on one, in the memory that was predicted."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from brim.core import Timeline
from support import splitting
from support.rank_checks import (
    OFFLOADED,
    SP,
    TABLE,
    adapted,
    check,
    check_adapter,
    check_losses,
    check_memory,
    check_trained,
)
from support.splitting import BATCH, LR, SEQ, STEPS, brim_train, command, environment, signal_rank, torchrun, trained
from support.tiny_model import save_llama
from support.trainings import course, plain, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about its own process groups


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose output layer is its embedding."""
    folder = save_llama(tmp_path_factory.mktemp("tied"), layers=4, hidden=64, positions=128)
    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.thorough
def test_two_ranks_have_the_losses_the_weights_and_the_predicted_bytes_of_one(
    llama: Path, gpt2: Path, mixtral: Path, text: Path, tmp_path: Path, alone: Any
) -> None:
    """Of each kind one, in one group of processes; GPT-2's output layer is its embedding, on both stages. Shards in
    RAM are on their way to a GPU that the CPU plays."""
    splits = [
        {"zero": 3, "micro_batch": 6}, OFFLOADED, {"pp": 2, "interleave": 2, "micro_batch": 3},
        {"cp": 2, "zero": 1, "micro_batch": 6}, {"tp": 2, "micro_batch": 12, **SP},
        {"pp": 2, "micro_batch": 6, "stage_layers": (3, 1)},
    ]  # fmt: skip
    tied = {"pp": 2, "micro_batch": 6, "model": str(gpt2)}
    experts = {"ep": 2, "zero": 1, "micro_batch": 3, "model": str(mixtral)}
    lora = {"method": "lora", "zero": 3, "micro_batch": 3}
    made = trained(2, llama, text, tmp_path, *splits, tied, experts, lora)
    check(made, tmp_path, alone, *splits)
    check_memory(2, llama, made[:4], *splits[:4])
    _check_timelines(made[:2], tmp_path)
    of_gpt2, of_mixtral, of_lora = made[len(splits) :]
    losses, last = plain(gpt2, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
    assert of_gpt2["losses"] == pytest.approx(losses, abs=1e-5)
    assert torch.allclose(weights(tmp_path / "6")[TABLE], last[TABLE], atol=1e-5)
    check_memory(2, gpt2, [of_gpt2], tied)
    check_losses(of_mixtral, tmp_path / "7", plain(mixtral, text, STEPS, seq=SEQ, batch=BATCH, lr=LR))
    check_adapter(of_lora["losses"], tmp_path / "8", adapted(llama, text))


def _check_timelines(made: list[Any], output: Path) -> None:
    """What ``brim explain`` reads of ZeRO-3, all in memory and with its shards in RAM."""
    whole = Timeline.read(output / "0" / "timeline-1.json")
    assert whole.measured
    together, apart = (found["ranks"][1] for found in made)
    assert whole.peak_bytes("ram") >= together["allocated_bytes"] > 1 << 20
    split = Timeline.read(output / "1" / "timeline-1.json")
    assert split.peak_bytes("ram") >= apart["ram_bytes"] > 1 << 20
    assert split.peak_bytes("vram") >= apart["allocated_bytes"]
    assert apart["allocated_bytes"] < together["allocated_bytes"]


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
    check_trained(2, llama, text, tmp_path, alone, *splits)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_splits_of_four_ranks(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    splits = [
        {"zero": 3, "micro_batch": 3}, {"zero": 0, "micro_batch": 1}, {"zero": 1, "tp": 2, "micro_batch": 2, **SP},
        {"zero": 2, "tp": 2, "micro_batch": 3}, {"pp": 2, "zero": 1, "micro_batch": 1},
        {"pp": 2, "tp": 2, "micro_batch": 2, **SP}, {"pp": 4, "micro_batch": 1, "checkpointing": "full"},
        {"pp": 2, "interleave": 2, "zero": 1, "micro_batch": 1}, {"pp": 2, "zero": 3, "micro_batch": 3},
    ]  # fmt: skip
    check_trained(4, llama, text, tmp_path, alone, *splits)


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


@pytest.mark.thorough
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
    "tp": (["--tp", "3"], "not a multiple of 3"),
    "heads": (["--tp", "2", "--batch", "5", "--pp", "2"], "Cannot split 2 GPUs into tp 2 x pp 2"),
    "batch": (["--zero", "3", "--batch", "5"], "--global-batch 5 was given"),
    "file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "offload": (["--offload-shards"], "--offload-shards was given without --zero"),
    "option": (["--zero", "3", "--stream-weights", "off"], "Cannot use --stream-weights on several ranks"),
}


@pytest.mark.thorough
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
    assert "Error: Rank 0 cannot exchange tensors with other ranks." in told, told[-3000:]
    assert "Rank 1 had not come to step" in told or "All were in step" in told


@pytest.mark.slow
def test_more_stages_than_layers(llama: Path, text: Path, tmp_path: Path) -> None:
    small = save_llama(tmp_path / "small", layers=1, hidden=64, positions=128)
    done = torchrun(2, *brim_train(small, text, tmp_path / "out", "--pp", "2"), timeout_s=120)
    assert done.returncode != 0
    assert done.stderr.count("Error: Cannot make 2 pipeline stages.") == 1, done.stderr[-3000:]
