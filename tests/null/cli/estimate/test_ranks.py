"""``brim estimate --gpus`` as a user meets it."""

import json
from dataclasses import fields

import pytest

from brim.cli import main
from brim.cli.estimate.command import estimate
from brim.estimation.estimate import PeakBytes
from brim.estimation.ranks import estimate as ranks
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.split import Split

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
SPLIT = ["--gpus", "8", "--tp", "2", "--pp", "2", "--zero", "1", "--sp", "--seq", "64", "--engine", "megatron"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_json_has_every_rank_its_coordinates_and_the_worst(model, capsys):
    assert main(["estimate", model, *SPLIT, "--gpu", "H100", "--global-batch", "16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["ranks"]) == 8
    assert document["mesh"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1}
    assert document["micro_batches"] == 8
    for rank in document["ranks"]:
        assert set(rank) == {"rank", "coordinates", "peak_bytes", "breakdown"}
        assert rank["peak_bytes"]["allocated"] <= rank["peak_bytes"]["reserved"] < rank["peak_bytes"]["process"]
    assert document["fits"] is True
    assert document["step_s"] > 0


def allocated(model, capsys, *options):
    assert main(["estimate", model, *SPLIT, "--gpu", "A100 80GB", "--json", *options]) == 0
    return max(rank["peak_bytes"]["allocated"] for rank in json.loads(capsys.readouterr().out)["ranks"])


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (["--cross-entropy-loss-fusion"], 1),
        (["--no-gradient-accumulation-fusion"], -1),
        (["--no-create-attention-mask-in-dataloader"], -1),
        (["--attention-backend", "unfused"], 1),
        (["--transformer-impl", "local"], -1),  # without Transformer Engine's workspace
        (["--num-distributed-optimizer-instances", "2"], 1),
        (["--cublas-workspace-config", ":4096:8"], 1),
    ],
    ids=lambda value: str(value),
)
def test_megatron_lms_own_options_change_what_a_rank_takes(model, capsys, options, more):
    assert (allocated(model, capsys, *options) - allocated(model, capsys)) * more > 0


def test_each_option_of_megatron_lm_is_one_of_the_command_line():
    flags = {word for option in estimate.params for word in (option.name, *option.opts)}
    assert {field.name for field in fields(MegatronOptions)} <= flags


def test_megatron_lms_options_are_refused_for_other_engines(model, capsys):
    assert main(["estimate", model, "--gpus", "2", "--no-gradient-accumulation-fusion"]) == 2
    assert "Cannot use --no-gradient-accumulation-fusion without --engine megatron" in capsys.readouterr().err
    assert main(["estimate", model, "--deterministic-mode"]) == 2
    assert "Cannot use --deterministic-mode without --engine megatron" in capsys.readouterr().err


def test_the_worst_rank_allocates_most_and_the_largest_process_decides_what_fits(model, monkeypatch):
    """Where reserved memory is fragmented on a rank that allocates less, that one's process is larger."""
    made = iter([(7, 90), (9, 80)])  # GiB that the first stage and the second allocate, and their processes take

    def memory(*_):
        allocated, process = (size << 30 for size in next(made))
        return PeakBytes(allocated=allocated, reserved=allocated, process=process), {}

    monkeypatch.setattr(ranks, "_memory", memory)
    split = Split(gpus=4, tp=2, pp=2, micro_batch=1, global_batch=4)
    found = ranks.estimate_ranks(model, split, engine="megatron", gpu="H100", seq=64)
    assert found.worst.coordinates["pp"] == 1
    assert found.worst.peak_bytes.allocated == 9 << 30
    assert found.process_bytes == 90 << 30
    assert found.fits is False
    assert found.to_json()["process_bytes"] == 90 << 30


def test_the_table_names_the_worst_rank_and_where_its_bytes_and_seconds_go(model, capsys):
    assert main(["estimate", model, *SPLIT, "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    for told in (
        "8 GPUs: tp 2 x pp 2 x dp 2",
        "(worst)",
        "worst rank:",
        "optimizer state",
        "nccl",
        "pipeline bubble",
    ):
        assert told in text


OFFLOAD = ["--gpus", "4", "--zero", "3", "--offload-shards", "--seq", "64", "--precision", "bf16-mixed"]


@pytest.mark.thorough
def test_shards_in_ram_are_told_of_every_rank_and_of_the_node(model, capsys):
    assert main(["estimate", model, *OFFLOAD, "--gpus-per-node", "2", "--gpu", "RTX 3090", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rank = document["ranks"][0]
    assert rank["ram_bytes"]["allocated"] <= rank["ram_bytes"]["reserved"]
    assert sum(rank["ram_bytes"]["breakdown"].values()) == rank["ram_bytes"]["reserved"]
    assert document["node_ram_bytes"] == 2 * rank["ram_bytes"]["reserved"]
    assert rank["breakdown"]["optimizer_state"] == 0
    assert document["step_s"] > 0


@pytest.mark.thorough
def test_the_table_has_what_lies_in_ram(model, capsys):
    assert main(["estimate", model, *OFFLOAD, "--gpu", "RTX 3090"]) == 0
    text = capsys.readouterr().out
    for told in ("shards in RAM", "in RAM:", "of a node", "page-locked", "shared by its ranks"):
        assert told in text


def test_without_a_gpu_memory_has_no_end_and_time_is_not_told(model, capsys):
    assert main(["estimate", model, *SPLIT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is None and document["step_s"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tp", "2"], "--gpus"),
        (["--offload-shards", "--zero", "3"], "--gpus"),
        (["--gpus", "2", "--offload-shards"], "--offload-shards was given without --zero"),
        (["--gpus", "1", "--zero", "3", "--offload-shards"], "--offload-shards with one GPU"),
        (["--gpus", "2", "--zero", "1", "--offload-shards", "--engine", "megatron"], "--engine torch"),
        (["--gpus", "2", "--zero", "1", "--offload-shards", "--ep", "2"], "spread over ranks"),
        (["--engine", "megatron"], "--gpus"),
        (["--gpus", "8", "--batch", "4"], "--micro-batch"),
        (["--gpus", "8", "--tp", "3"], "--gpus 6 or 9"),
        (["--gpus", "8", "--tp", "8"], "--tp 2"),
        (["--gpus", "8", "--pp", "8"], "--pp 4"),
        (["--gpus", "6", "--pp", "3", "--engine", "megatron"], "--pp 2"),
        (["--gpus", "8", "--dp", "3"], "--dp 8"),
        (["--gpus", "8", "--global-batch", "12"], "--global-batch 8 or 16"),
        (["--gpus", "8", "--zero", "4"], "0, 1, 2 and 3"),
        (["--gpus", "8", "--pp", "2", "--stage-layers", "two"], "as in 9,9,8,6"),
        (["--gpus", "8", "--pp", "2", "--stage-layers", "3,2"], "These are 5 layers"),
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "8", "--engine", "megatro"], "megatron"),
        (["--gpus", "8", "--html", "a.html"], "one GPU"),
        (["--gpus", "8", "--task", "generate"], "Only training"),
        (["--gpus", "8", "--method", "lora"], "--method"),
    ],
)
def test_what_cannot_be_is_one_clear_error_naming_what_works(model, capsys, arguments, told):
    assert main(["estimate", model, "--seq", "64", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.thorough
def test_products_that_several_are_one_of_are_not_split_by_tensors(capsys):
    asked = ["estimate", "phi-3-mini", "--gpus", "2", "--seq", "64"]
    assert main([*asked, "--tp", "2"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    fused = "self_attn.qkv_proj, mlp.gate_up_proj combines several matrices"
    for told in ("Cannot use --tp 2", fused, "by --zero or --pp"):
        assert told in error
    assert main([*asked, "--pp", "2"]) == 0


@pytest.mark.thorough
def test_blocks_are_compiled_when_that_is_asked_for(model, capsys):
    asked = ["estimate", model, "--gpus", "2", "--zero", "3", "--seq", "256", "--micro-batch", "2", "--json"]
    peaks = []
    for more in ([], ["--compile"]):
        assert main([*asked, *more]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"]["allocated"])
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("command", "told"),
    [(["estimate", "MODEL", "--compile"], "Give --gpus 1"),
     (["estimate", "MODEL", "--compile", *SPLIT], "Use --engine torch"),
     (["estimate", "MODEL", "--compile", "--gpus", "2", "--ep", "2"], "at which a compiled graph ends"),
     (["train", "MODEL", "--data", "text.txt", "--output", "out", "--compile"], "No such option")],
)  # fmt: skip
def test_where_nothing_is_compiled_that_is_said(model, command, told, capsys):
    assert main([model if word == "MODEL" else word for word in command]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


@pytest.mark.thorough
def test_shares_of_a_ranks_peak_add_up_to_all_of_its_process(model, capsys):
    assert main(["estimate", model, "--gpus", "2", "--seq", "64"]) == 0
    text = capsys.readouterr().out.partition("at the peak of rank")[2]
    shares = [float(line.split()[-1].rstrip("%")) for line in text.splitlines() if line.rstrip().endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    assert "kept by the allocator, unused" in text


@pytest.mark.thorough
def test_a_split_that_does_not_fit_is_code_3_with_the_command_that_looks_for_others(model, capsys):
    asked = ["estimate", model, "--gpus", "2", "--seq", "64", "--gpu", "RTX 4090", "--vram", "800MiB"]
    assert main(asked) == 3
    told = " ".join(capsys.readouterr().out.split())
    command = f"brim plan {model} --task train --gpu 'RTX 4090' --seq 64 --gpus 2 --global-batch 2"
    assert f"It does not fit. To search splits that fit: {command}" in told
