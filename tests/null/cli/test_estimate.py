"""``brim estimate`` as a user meets it."""

import json

import pytest

from brim.cli import main

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_json_is_one_document_with_the_promised_keys(model, capsys):
    arguments = ["--task", "train", "--batch", "2", "--seq", "32", "--gpu", "RTX 4090", "--json"]
    assert main(["estimate", model, *arguments, "--alloc-conf", "expandable_segments:True"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        "peak_bytes", "upper_bound_bytes", "at_peak_bytes", "per_module", "step_s", "flops", "not_modelled", "fits",
    }  # fmt: skip
    assert set(document["at_peak_bytes"]) == {
        "parameters", "gradients", "optimizer_state", "activations", "temporary", "kv_cache", "inputs", "workspaces",
        "context",
    }  # fmt: skip
    peak = document["peak_bytes"]
    assert peak["allocated"] <= peak["reserved"] < peak["process"] <= document["upper_bound_bytes"]


def test_the_report_tells_what_where_how_it_grows_and_what_fits(model, capsys):
    assert main(["estimate", model, "--batch", "2", "--seq", "256", "--gpu", "RTX 3060"]) == 0
    text = capsys.readouterr().out
    for told in (
        "RTX 3060", "safe upper bound", "context", "optimizer state", "model.layers.*.mlp.up_proj", "batch", "seq",
        "largest batch that fits:", "FLOP a step",
    ):  # fmt: skip
        assert told in text


def test_formulas_are_explained_as_sums(model, capsys):
    assert main(["estimate", model, "--task", "train", "--seq", "32", "--explain-formula"]) == 0
    text = capsys.readouterr().out
    count = 2 * 500 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64
    assert f"parameters: {count:,} x 4 B = {4 * count:,} B" in text
    assert main(["estimate", model, "--task", "generate", "--seq", "32", "--explain-formula", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_per_token"]["value"] == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lama-3-8b"], "llama-3-8b"),
        (["gpt2", "--gpu", "RTX 4091"], "RTX 4090"),
        (["gpt2", "--optimizer", "adammw"], "adamw"),
        (["gpt2", "--precision", "bf-16"], "bf16"),
        (["gpt2", "--task", "trian"], "train"),
        (["gpt2", "--alloc-conf", "expandable:True"], "expandable_segments"),
        (["gpt2", "--batch", "0"], "batch=0"),
        (["gpt2", "--batch", "many"], "many"),
        (["gpt2", "--sequence", "4"], "--sequence"),
        (["missing.py:build"], "There is no file"),
    ],
)
def test_a_mistake_is_exit_code_2_and_names_the_nearest(arguments, told, capsys):
    assert main(["estimate", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert told in output.err
