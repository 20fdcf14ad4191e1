"""Longer trainings over ranks: shards in RAM, experts and sequences over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim import catalog
from brim.estimation.models import find_model
from brim.planning.meshes.torch_engine import run_meshes
from brim.run.ranks import plan as distributed_plan
from support.rank_checks import (
    MIXED,
    SP,
    TENSORS,
    adapted,
    check,
    check_adapter,
    check_losses,
    check_memory,
    check_trained,
    save_family,
    save_mixtral,
)
from support.splitting import BATCH, LR, SEQ, STEPS, brim_train, torchrun, trained
from support.trainings import plain

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about its own process groups


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_in_ram_go_with_every_split_of_two_ranks(
    llama: Path, gpt2: Path, text: Path, tmp_path: Path, alone: Any
) -> None:
    offload = {"offload_shards": True}
    splits = [
        {"zero": 3, "micro_batch": 6, **offload}, {"zero": 2, "micro_batch": 3, **offload},
        {"zero": 1, "micro_batch": 3, **offload}, {"zero": 3, "tp": 2, "micro_batch": 6, **SP, **offload},
        {"zero": 3, "pp": 2, "micro_batch": 6, **offload},
        {"zero": 3, "pp": 2, "interleave": 2, "micro_batch": 3, **offload},
        {"zero": 3, "micro_batch": 3, "checkpointing": "full", **offload},
        {"zero": 3, "cp": 2, "micro_batch": 6, **offload},
    ]  # fmt: skip
    tied = {"zero": 3, "pp": 2, "micro_batch": 6, **offload}
    lora = {"method": "lora", "zero": 3, "micro_batch": 3, **offload}
    sgd = {"optimizer": "sgd", "micro_batch": 3, "zero": 3}
    others = [{**tied, "model": str(gpt2)}, lora, sgd, {**sgd, **offload}]
    made = trained(2, llama, text, tmp_path, *splits, *others)
    check(made, tmp_path, alone, *splits)
    check_memory(2, llama, made[: len(splits)], *splits)
    of_gpt2, adapter, stepped, in_ram = made[len(splits) :]
    assert of_gpt2["losses"] == pytest.approx(plain(gpt2, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)[0], abs=1e-5)
    check_adapter(adapter["losses"], tmp_path / str(len(splits) + 1), adapted(llama, text))
    assert in_ram["losses"] == pytest.approx(stepped["losses"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_in_ram_are_clipped_and_go_on_from_checkpoints_of_other_ranks(
    llama: Path, text: Path, tmp_path: Path, alone: Any
) -> None:
    """Four ranks in two dimensions begin, three in RAM go on, and two at last without it."""
    whole = plain(llama, text, 6, seq=SEQ, batch=BATCH, lr=LR)[0]
    split = {"output": str(tmp_path / "course"), "save_every": 2, "zero": 3}
    offload = {"offload_shards": True}
    first = trained(4, llama, text, tmp_path, {**split, **offload, "tp": 2, "steps": 2})
    second = trained(3, llama, text, tmp_path, {**split, **offload, "steps": 4, "resume": True})
    third = trained(2, llama, text, tmp_path, {**split, "steps": 6, "resume": True})
    losses = [loss for (made,) in (first, second, third) for loss in made["losses"]]
    assert losses == pytest.approx(whole, abs=1e-5)
    clipped = {"clip_norm": 0.1, "zero": 3, "micro_batch": 3}
    apart, together = trained(2, llama, text, tmp_path / "clipped", {**clipped, **offload}, clipped)
    assert apart["losses"] == pytest.approx(together["losses"], abs=1e-5)
    assert apart["losses"] != pytest.approx(alone[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sequences_of_four_ranks(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    splits = [
        {"cp": 2, "zero": 3, "micro_batch": 3},
        {"cp": 4, "zero": 0, "micro_batch": 3}, {"cp": 2, "zero": 2, "micro_batch": 3, "checkpointing": "full"},
    ]  # fmt: skip
    check_trained(4, llama, text, tmp_path, alone, *splits)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sequences_beside_tensors_and_pipelines(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    shared = {"cp": 2, "micro_batch": 3}
    splits = [
        {**shared, "tp": 2}, {**shared, "tp": 2, "zero": 1, **SP}, {**shared, "pp": 2},
        {**shared, "pp": 2, "zero": 3},
        {**shared, "tp": 2, "zero": 3, "checkpointing": "full", **SP},
        {**shared, "pp": 2, "interleave": 2, "zero": 1, "micro_batch": 1},
        {"cp": 4, "micro_batch": 3, "checkpointing": "selective"},
    ]  # fmt: skip
    check_trained(4, llama, text, tmp_path, alone, *splits)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sequences_tensors_and_stages_at_once(llama: Path, text: Path, tmp_path: Path, alone: Any) -> None:
    shared = {"cp": 2, "tp": 2, "pp": 2}
    splits = [{**shared, "zero": 1, "micro_batch": 2, **SP}, {**shared, "zero": 3, "micro_batch": 6}]
    check_trained(8, llama, text, tmp_path, alone, *splits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sequences_are_clipped_beside_tensors_and_pipelines_as_on_one_rank(
    llama: Path, text: Path, tmp_path: Path, alone: Any
) -> None:
    clipped = {"clip_norm": 0.1, "micro_batch": 3}
    one = trained(1, llama, text, tmp_path / "one", {**clipped, "micro_batch": 12})[0]["losses"]
    assert one != pytest.approx(alone[0], abs=1e-5)
    splits = [{"cp": 2, "tp": 2, "zero": 1, **SP}, {"cp": 2, "pp": 2, "zero": 3}]
    for found in trained(4, llama, text, tmp_path / "four", *({**clipped, **split} for split in splits)):
        assert found["losses"] == pytest.approx(one, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow) if family != "gemma2" else family for family in MIXED]
)
@pytest.mark.timeout(600)
def test_layers_of_several_kinds_in_stages(family: str, text: Path, tmp_path: Path) -> None:
    """Layers look far in turn or are dense at first, embeddings are scaled, and stages begin between those."""
    folder = save_family(tmp_path / family, family)
    splits = [{"pp": 2, "micro_batch": 3}]
    if family != "gemma2":
        splits += [{"pp": 2, "interleave": 2, "zero": 1, "micro_batch": 3}, {"zero": 3, "micro_batch": 6}]
    made = trained(2, folder, text, tmp_path, *splits)
    reference = plain(folder, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
    for number, found in enumerate(made):
        check_losses(found, tmp_path / str(number), reference)
    check_memory(2, folder, made, *splits)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow) if family != "qwen3" else family for family in TENSORS]
)
@pytest.mark.timeout(600)
def test_tensors_of_layers_that_are_more_than_products(family: str, text: Path, tmp_path: Path) -> None:
    """Gradients of what all heads share are those of all ranks' heads, and clipped as on one rank.

    By SGD: Adam makes a whole step of a gradient that is nothing but rounding.
    """
    folder = save_family(tmp_path / family, family)
    sgd = {"optimizer": "sgd", "lr": 0.1}
    splits = [{"tp": 2, "zero": 0, "micro_batch": 6, **sgd}, {"tp": 2, "zero": 0, "micro_batch": 6, **sgd, **SP}]
    made = trained(2, folder, text, tmp_path, *splits, {**splits[1], "clip_norm": 0.1})
    one = trained(1, folder, text, tmp_path / "one", {"micro_batch": 12, "clip_norm": 0.1, **sgd})[0]["losses"]
    reference = plain(folder, text, STEPS, seq=SEQ, batch=BATCH, lr=0.1, sgd=True)
    for number, found in enumerate(made[:2]):
        check_losses(found, tmp_path / str(number), reference)
    check_memory(2, folder, made[:2], *splits)
    assert made[2]["losses"] == pytest.approx(one, abs=1e-5)
    assert one != pytest.approx(reference[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_of_four_ranks(text: Path, tmp_path: Path) -> None:
    """Every token goes to every expert, so that all ranks have as many rows, as predicted; or to half of them."""
    splits = [
        {"ep": 4, "zero": 1, "micro_batch": 3}, {"ep": 4, "zero": 0, "micro_batch": 1},
        {"ep": 2, "pp": 2, "zero": 1, "micro_batch": 3},
        {"ep": 4, "zero": 3, "micro_batch": 3, "checkpointing": "full"},
    ]  # fmt: skip
    for chosen in (4, 2):
        folder = save_mixtral(tmp_path / f"of {chosen}", chosen)
        reference = plain(folder, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)
        made = trained(4, folder, text, tmp_path / str(chosen), *splits)
        for number, found in enumerate(made):
            check_losses(found, tmp_path / str(chosen) / str(number), reference)
        if chosen == 4:
            check_memory(4, folder, made, *splits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_are_clipped_and_go_on_from_a_checkpoint_without_them(
    mixtral: Path, text: Path, tmp_path: Path
) -> None:
    spread = {"ep": 2, "zero": 1, "micro_batch": 3}
    half = {"output": str(tmp_path / "half")}
    steps = [{**half, **spread, "steps": 2, "save_every": 2}, {**half, "zero": 3, "micro_batch": 3, "resume": True}]
    made = trained(2, mixtral, text, tmp_path, {**spread, "clip_norm": 0.1}, *steps)
    one = trained(1, mixtral, text, tmp_path / "one", {"clip_norm": 0.1, "micro_batch": 12})[0]["losses"]
    free = plain(mixtral, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)[0]
    assert one != pytest.approx(free, abs=1e-5)
    assert made[0]["losses"] == pytest.approx(one, abs=1e-5)
    assert made[1]["losses"] + made[2]["losses"] == pytest.approx(free, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["ep", "cp"])
def test_a_plan_that_the_search_has_made_is_run(
    way: str, mixtral: Path, llama: Path, text: Path, tmp_path: Path
) -> None:
    folder = mixtral if way == "ep" else llama
    sizes = {"gpus": 2, "gpus_per_node": 2, "sequence": SEQ, "global_batch": BATCH}
    found = run_meshes(find_model(str(folder)), gpu=catalog.gpu("H100"), **sizes)
    mesh = next(mesh for mesh in found if getattr(mesh.split, way) > 1)
    made = distributed_plan.SplitPlan(
        brim="0", model=str(folder), gpu="H100", engine="torch", precision="fp32", sequence=SEQ, split=mesh.split,
        checkpointing=mesh.checkpointing, peak_bytes=mesh.peak_bytes, step_s=mesh.step_s,
    )  # fmt: skip
    distributed_plan.write(tmp_path / "plan.json", made)
    done = torchrun(2, *brim_train(folder, text, tmp_path / "out", "--plan", str(tmp_path / "plan.json"), "--json"))
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert told["mesh"] == {name: mesh.split.size(name) for name in ("pp", "dp", "cp", "tp", "ep")}
    assert told["losses"] == pytest.approx(plain(folder, text, STEPS, seq=SEQ, batch=BATCH, lr=LR)[0], abs=1e-5)
