"""``brim plan --gpus`` as a user meets it."""

import json
import shlex

import pytest
from transformers import LlamaConfig

from brim.cli import main
from brim.errors import BudgetError
from brim.estimation.ranks import estimate as ranks
from brim.planning import ranks as splits
from brim.planning.meshes import offload
from brim.planning.ranks import fastest
from brim.requests.plan import MeshRequest

COMMAND = ["plan", "llama-3-8b", "--task", "train", "--gpus", "16", "--gpu", "A100 80GB", "--seq", "2048"]
MEGATRON = ["--engine", "megatron"]  # by closed forms: no stage is traced


@pytest.mark.thorough
def test_json_has_the_fastest_splits_with_a_command_for_each(capsys):
    assert main([*COMMAND, *MEGATRON, "--top", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["proposals"]
    assert first["fits"] and second["fits"]
    assert first["step_s"] <= 1.02 * second["step_s"]
    assert main([*shlex.split(first["command"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["peak_bytes"] == first["peak_bytes"]
    assert again["step_s"] == first["step_s"]


@pytest.mark.thorough
def test_the_table_tells_split_memory_and_seconds(capsys):
    assert main([*COMMAND, *MEGATRON, "--top", "1"]) == 0
    text = capsys.readouterr().out
    for told in ("micro-batches a step", "worst rank", "s/step", "brim estimate llama-3-8b", "meshes in"):
        assert told in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--task", "generate", "--gpus", "8", "--gpu", "H100"], "--task train"),
        (["--task", "train", "--gpus", "8"], "--gpu"),
        (["--task", "train", "--gpus-per-node", "8"], "--gpus"),
        (["--task", "train", "--engine", "torch"], "--gpus"),
        (["--task", "train", "--gpus", "8", "--gpu", "H100", "--engine", "jax"], "'torch', 'megatron'"),
    ],
)
def test_what_cannot_be_is_one_clear_error(capsys, arguments, told):
    assert main(["plan", "llama-3-8b", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.thorough
def test_numbers_of_gpus_are_compared_for_the_same_batch(capsys, tmp_path):
    plot = tmp_path / "plot.svg"
    command = ["plan", "llama-3-8b", "--task", "train", "--gpu", "RTX 4090", "--seq", "512", "--compare-gpus", "16,2"]
    command += MEGATRON
    assert main([*command, "--global-batch", "16", "--price", "3", "--output", str(plot), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    two, many = document["rows"]
    assert (two["gpus"], many["gpus"], document["global_batch"]) == (2, 16, 16)
    assert not two["fits"] and two["cost"] is None
    assert many["cost"] == pytest.approx(3 * many["gpu_hours"])
    assert many["gpu_hours"] == pytest.approx(16 * many["step_s"] / 3600 * document["tokens"] / (16 * 512))
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compare-gpus", "1,2", "--gpu", "H100"], "compares trainings"),
        (["--compare-gpus", "two", "--task", "train", "--gpu", "H100"], "numbers of GPUs"),
        (["--price", "2"], "--compare-gpus"),
        (["--compare-gpus", "1,2", "--task", "train", "--gpu", "H100", "--engine", "jax"], "'torch', 'megatron'"),
    ],
)
def test_a_comparison_that_cannot_be_is_one_clear_error(capsys, arguments, told):
    assert main(["plan", "llama-3-8b", *arguments]) == 2
    assert told in capsys.readouterr().err


UNUSED = [
    ["--optimizer", "sgd"], ["--precision", "fp32"], ["--method", "lora"], ["--vram", "8GiB"],
    ["--prefer", "memory"], ["--batch", "4"], ["--new-tokens", "8"], ["--precisions"],
    ["--html", "page.html"],
]  # fmt: skip
ONE_OF_THEM = [["--disk", "1TiB"], ["--lossless"], ["--price", "2"]]  # one GPU's plan in a comparison takes them


@pytest.mark.parametrize(
    ("several", "option"),
    [(["--gpus", "2"], option) for option in UNUSED + ONE_OF_THEM]
    + [(["--compare-gpus", "1,2"], option) for option in [*UNUSED, ["--top", "2"], ["--gpus", "4"]]],
    ids=" ".join,
)  # fmt: skip
def test_what_would_change_nothing_is_refused_by_name(capsys, several, option):
    assert main(["plan", "llama-3.2-1b", "--task", "train", "--gpu", "H100", *several, *option]) == 2
    assert f"{option[0]} was given beside {several[0]}." in capsys.readouterr().err


SMALL = ["plan", "llama-3.2-1b", "--task", "train", "--gpu", "RTX 3060 12GB", "--seq", "128", "--global-batch", "4"]
SMALL_BY_FORMS = [*SMALL, *MEGATRON]


@pytest.mark.slow
def test_too_few_gpus_train_with_their_shards_in_ram(capsys):
    assert main([*SMALL_BY_FORMS, "--compare-gpus", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["fits"] and row["offload"]
    assert "shards in RAM" in row["way"]
    assert row["peak_bytes"]["ram"] > 16 * 1.2e9 > row["peak_bytes"]["vram"]


@pytest.mark.slow
def test_the_three_ways_are_compared_and_drawn(capsys, tmp_path):
    plot = tmp_path / "plot.svg"
    assert main([*SMALL_BY_FORMS, "--compare-gpus", "1,2,4", "--output", str(plot), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["gpus"], row["offload"]) for row in rows] == [(1, True), (2, True), (4, False)]
    assert rows[2]["step_s"] < rows[1]["step_s"]
    assert "with offload" in plot.read_text() and "all on GPUs" in plot.read_text()


@pytest.mark.slow
def test_a_plan_with_shards_in_ram_is_written_and_its_command_tells_the_same(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*SMALL_BY_FORMS, "--gpus", "2", "--top", "1", "--output", str(path), "--json"]) == 0
    (proposal,) = json.loads(capsys.readouterr().out)["proposals"]
    assert proposal["offload_shards"] and proposal["zero"] == 3
    assert json.loads(path.read_text())["split"]["offload_shards"]
    assert main([*shlex.split(proposal["command"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["peak_bytes"], again["node_ram_bytes"]) == (proposal["peak_bytes"], proposal["node_ram_bytes"])


def refused(**others):
    """What a search on two small GPUs says where nothing fits."""
    options = {"task": "train", "gpu": "RTX 3060 12GB", "gpus": 2, "seq": 128, "top": 1, "global_batch": 4, **others}
    with pytest.raises(BudgetError) as told:
        fastest(MeshRequest(model="llama-3.2-1b", **options))
    return told.value


def test_ram_that_is_too_small_for_shards_is_told():
    told = refused(engine="megatron", ram=8 << 30)
    assert "With shards in RAM it does not fit either" in told.reason and "--ram" in told.todo


@pytest.mark.slow
def test_bytes_that_are_missing_are_told_where_nothing_fits_in_ram_either():
    error = refused(engine="megatron", seq=32768, global_batch=2).reason
    assert "B on each of them, and one has" in error
    told = "With shards in RAM it does not fit either: None of 1 traced meshes fits, of 9 compared; they take "
    assert told in error and "B on a GPU and" in error and "B of a node's RAM at least" in error


@pytest.mark.slow
def test_ram_that_is_too_small_is_told_beside_what_was_traced():
    error = refused(ram=8 << 30).reason
    assert "traced meshes fits, of 83 compared; they take" in error
    assert "With shards in RAM it does not fit either: The states of the ranks of one node need" in error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "settings", "given"),
    [
        ("mixtral-8x7b", ["--gpus", "32", "--seq", "1024"], "--ep 8"),
        ("llama-3.2-1b", ["--gpus", "8", "--seq", "32768", "--global-batch", "2"], "--cp 4"),
    ],
)
def test_experts_and_sequences_over_ranks_are_offered_with_their_options(capsys, model, settings, given):
    asked = ["plan", model, "--task", "train", "--gpu", "H100", *settings, *MEGATRON, "--top", "1"]
    assert main([*asked, "--json"]) == 0
    (proposal,) = json.loads(capsys.readouterr().out)["proposals"]
    assert f" {given} " in proposal["command"]
    assert main([*shlex.split(proposal["command"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["peak_bytes"], again["step_s"]) == (proposal["peak_bytes"], proposal["step_s"])
    assert main(asked) == 0
    assert f" {given[2:4]} " in capsys.readouterr().out


@pytest.mark.thorough
def test_the_comparison_of_gpus_takes_experts_over_ranks(capsys):
    asked = ["plan", "mixtral-8x7b", "--task", "train", "--gpu", "H100", "--seq", "512", "--global-batch", "64"]
    assert main([*asked, *MEGATRON, "--compare-gpus", "16,64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all("experts over" in row["way"] for row in rows)
    assert rows[1]["step_s"] < rows[0]["step_s"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_for_the_engine_that_train_runs_and_names_it(capsys, tmp_path, monkeypatch):
    """Where nothing further is proved, it is the first that fits."""
    monkeypatch.setattr(offload, "_FURTHER_PROOFS", 0)
    path = tmp_path / "plan.json"
    asked = ["plan", "llama-3.2-1b", "--task", "train", "--gpus", "2", "--gpu", "RTX 4090", "--seq", "256"]
    words = ["--global-batch", "2", "--top", "3", "--output", str(path), "--json"]
    assert main([*asked, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    (proposal,) = told["proposals"]
    assert told["traced"] == 1
    assert proposal["engine"] == "torch"
    assert main([*shlex.split(proposal["command"])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["peak_bytes"] == proposal["peak_bytes"]
    written = json.loads(path.read_text())
    assert written["peak_bytes"] == again["peak_bytes"]["process"]
    assert (written["engine"], written["precision"]) == ("torch", "bf16-mixed")


@pytest.mark.thorough
def test_a_plan_of_megatron_lm_is_written_as_one(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*COMMAND, *MEGATRON, "--top", "1", "--output", str(path)]) == 0
    written = json.loads(path.read_text())
    assert (written["engine"], written["precision"]) == ("megatron", "bf16")


@pytest.fixture(scope="module")
def half_a_billion(tmp_path_factory):
    """Of 0.54 B parameters: their states take more than 8 GiB."""
    folder = tmp_path_factory.mktemp("half")
    LlamaConfig(
        hidden_size=2560, intermediate_size=6144, num_hidden_layers=6, num_attention_heads=20, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=2048, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), "megatron"])
def test_where_nothing_fits_the_nearest_that_does_is_told(capsys, half_a_billion, engine):
    """Closed forms alone rule it out: states take more than a GPU has."""
    asked = ["plan", half_a_billion, "--task", "train", "--gpus", "1", "--gpu", "RTX 3060 Ti", "--seq", "128"]
    asked += ["--engine", engine, "--top", "1", "--global-batch", "4"]
    assert main([*asked, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["proposals"] == [] and "RTX 3060 Ti" in document["infeasible"]["why"]
    more, *others = document["infeasible"]["nearest"]
    assert more["change"] == "2 GPUs"
    if engine == "megatron":  # searches that are so short are all made
        assert any("more on each GPU" in one["change"] for one in others)
    assert main([*shlex.split(more["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proposals"]


def test_what_a_division_rules_out_is_said_before_changes_are_searched(capsys, monkeypatch):
    seen = []

    def infeasible(request, refusal):
        seen.append(capsys.readouterr().out)
        return splits.Infeasible(why="", needs_bytes={}, nearest=())

    monkeypatch.setattr(splits, "infeasible", infeasible)
    asked = ["--task", "train", "--gpus", "8", "--gpu", "H100", "--ram", "512GiB"]
    assert main(["plan", "llama-3-70b", *asked]) == 3
    (told,) = seen
    assert told.startswith(
        "Nothing fits. Cannot split llama-3-70b over 8 NVIDIA H100 80GB HBM3. Its states need at least"
    )
    assert "assumed: a node has a RAM rate of 492 GB/s" in told


def test_an_estimate_of_ranks_says_first_what_fits_in_no_split(capsys, monkeypatch):
    seen = []

    def estimate_ranks(*_, **__):
        seen.append(capsys.readouterr().err)
        raise BudgetError("enough")

    monkeypatch.setattr(ranks, "estimate_ranks", estimate_ranks)
    asked = ["estimate", "llama-3-70b", "--zero", "3", "--seq", "2048"]
    told = "No split fits: weights, gradients and states take 131 GiB on each of 8 GPUs"
    for gpus, is_told in (("8", True), ("64", False)):
        assert main([*asked, "--gpus", gpus, "--gpu", "H100"]) == 3
        assert (told in seen.pop()) == is_told
