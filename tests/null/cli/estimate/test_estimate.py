"""``brim estimate`` as a user meets it."""

import json
import sys

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
        "notes", "leak", "stored_bytes", "by", "precision", "precision_origin", "program", "brim_differs",
        "fits_with",
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


@pytest.mark.thorough
def test_the_text_begins_with_the_verdict_and_what_was_asked_a_line_each(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["estimate", model, "--seq", "256", "--gpu", "RTX 4090 Laptop"]) == 0
    verdict, title = capsys.readouterr().out.splitlines()[:2]
    assert verdict.startswith("Fits with ") and verdict.endswith(" is the largest.")
    assert "RTX 4090 Laptop GPU: train, batch 1, 256 tokens, fp32" in title and len(title) > 80


@pytest.mark.thorough
def test_adapters_and_an_unknown_card_by_options(model, capsys):
    adapters = ["--method", "lora", "--lora-rank", "4", "--lora-targets", "q_proj, v_proj"]
    assert main(["estimate", model, "--seq", "32", *adapters, "--vram", "12GiB"]) == 0
    text = capsys.readouterr().out
    assert "on a GPU of 12 GiB" in text and "lora, rank 4, in q_proj, v_proj" in text
    assert "only the memory of this GPU is known" in text and "by roofline" not in text
    assert main(["estimate", model, "--seq", "32", "--lora-rank", "4"]) == 2
    assert "--method lora" in capsys.readouterr().err


def test_a_package_that_a_model_needs_and_is_missing_is_named(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["estimate", model, "--seq", "32", "--method", "lora"]) == 2
    assert "peft is not installed. Run pip install peft." in " ".join(capsys.readouterr().err.split())


def test_weights_without_a_configuration_are_an_unknown_model(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model.gguf"):
        assert main(["estimate", str(name)]) == 2
        assert "(model.gguf) and no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing.gguf", "missing.safetensors", "missing.json"])
def test_a_file_that_is_missing_is_no_unknown_model(name, capsys):
    assert main(["estimate", name]) == 2
    assert f"There is no {name}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": 7}, "not a multiple"),
        ({"vocab_size": 10**15}, "more than any machine has"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.OwnForCausalLM"}, "architectures": ["OwnForCausalLM"]},
         "custom Python code"),
    ],
)  # fmt: skip
def test_an_impossible_configuration_is_one_clear_error(tmp_path, changes, told, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    assert main(["estimate", str(tmp_path), "--seq", "16"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert told in output.err


def test_a_function_that_fails_is_told_with_its_line(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text("import sys\n\ndef build():\n    raise ValueError('my own')\n\ndef ends():\n    sys.exit(3)\n")
    for function, line in (("build", 4), ("ends", 7)):
        assert main(["estimate", f"{file}:{function}"]) == 2
        assert f"It fails at {file}:{line}" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_size_that_cannot_be_traced_does_not_take_the_report_along(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 10**12}))
    assert main(["estimate", str(tmp_path), "--seq", "1024", "--gpu", "H200"]) == 3
    text = capsys.readouterr().out
    assert text.startswith("Does not fit: it takes ") and "CUDA out of memory" in text
    assert "largest batch that fits: 0" in text or "other batches are not solved" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([""], "An empty name"),
        (["gpt2", "--alloc-conf", "backend:cudaMallocAsync"], "backend:native"),
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


FLUX = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6],
    "guidance_embeds": True, "in_channels": 16, "joint_attention_dim": 32, "num_attention_heads": 2, "num_layers": 1,
    "num_single_layers": 1, "patch_size": 1, "pooled_projection_dim": 32,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["train", "generate"])
def test_a_transformer_of_images_is_traced_at_its_pipelines_size(tmp_path, capsys, task):
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    assert main(["estimate", str(tmp_path), "--task", task, "--precision", "bf16"]) == 0
    told = capsys.readouterr().out
    assert "inputs: an image of 1024 x 1024 pixels, 4,096 tokens" in told


def test_a_diffusion_model_without_inputs_is_no_mistake_of_its_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan", "base_dim": 16}))
    assert main(["estimate", str(tmp_path)]) == 2
    assert "Cannot make inputs for AutoencoderKLWan" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [(), ("--gpus", "2")])
def test_the_answer_names_the_precision_and_where_it_is_from(tmp_path, model, capsys, gpus):
    asked = ["estimate", model, "--seq", "64", *gpus]
    own = "bf16-mixed, brim train's default on GPUs" if gpus else "fp32, by default: its configuration"
    assert main(asked) == 0
    assert f"precision: {own}" in capsys.readouterr().out
    assert main([*asked, "--precision", "bf16"]) == 0
    assert "precision: bf16, as asked for" in capsys.readouterr().out


WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2000}


@pytest.fixture
def wide(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    return str(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("asked", "vram"),
    [
        (["--seq", "512", "--batch", "4"], "580MiB"),
        pytest.param(["--task", "generate", "--seq", "512"], "420MiB", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_fit_is_code_3_with_settings_that_do(wide, capsys, asked, vram):
    command = ["estimate", wide, *asked, "--vram", vram]
    assert main([*command, "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False and 1 <= len(document["fits_with"]) <= 3
    assert main(command) == 3
    text = capsys.readouterr().out
    for setting in document["fits_with"]:
        assert setting["options"] in text
        assert main([*command, *setting["options"].split(), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["peak_bytes"]["process"] == setting["process_bytes"]


@pytest.mark.thorough
def test_where_no_setting_fits_the_command_that_looks_further_is_named(wide, capsys):
    command = ["estimate", wide, "--seq", "64", "--vram", "382MiB"]
    assert main(command) == 3
    told = capsys.readouterr().out
    assert f"brim plan {wide} --task train --vram 382MiB --seq 64" in told.splitlines()
    assert main([*command, "--task", "generate", "--new-tokens", "9", "--precision", "int4"]) == 3
    told = capsys.readouterr().out
    plan = f"brim plan {wide} --task generate --vram 382MiB --seq 64 --new-tokens 9 --precision int4"
    assert plan in told.splitlines()
    assert main([*command, "--method", "lora", "--precision", "int4"]) == 3  # plan trains no int4
    assert (
        f"brim plan {wide} --task train --vram 382MiB --seq 64 --method lora" in capsys.readouterr().out.splitlines()
    )


@pytest.mark.thorough
def test_every_size_is_told_as_it_is_in_this_memory(wide, capsys):
    """Where the allocator has to give blocks back to fit, the tables have the peaks of that run too, and say so."""
    command = ["estimate", wide, "--seq", "512", "--batch", "4"]
    assert main(command) == 0
    free = capsys.readouterr().out
    assert main([*command, "--vram", "815MiB"]) == 0
    tight = capsys.readouterr().out
    process = next(line.split()[1:3] for line in tight.splitlines() if line.startswith(" process"))
    row = next(line.split() for line in tight.splitlines() if line.startswith(" 4 "))
    assert row[-2:] == process
    assert "allocator: memory was full of blocks that it kept" in tight
    assert "allocator: memory was full" not in free
    assert "does not fit" in next(line for line in tight.splitlines() if line.startswith(" 32 "))
