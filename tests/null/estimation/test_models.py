"""What MODEL may name, and what is said when it names nothing."""

import json

import pytest

import brim
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.models import find_model


def test_a_name_a_hub_id_a_folder_and_a_file_are_models(folder):
    path = folder("llama")
    assert find_model("gpt2").architecture == "GPT2LMHeadModel"
    assert find_model("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"
    assert find_model(path).name == find_model(path / "config.json").name == "llama"
    assert find_model(folder("unet")).library == "diffusers"


@pytest.mark.parametrize(
    ("model", "error", "told"),
    [
        ("lama-3-8b", UsageError, "llama-3-8b"),
        ("no/such/model", UsageError, "Nearest"),
        ("./nothing", ModelError, "There is no"),
        ("nothing.json", ModelError, "There is no"),
        ("nothing.py:build", ModelError, "There is no file"),
        ("nothing.py", UsageError, "no function"),
    ],
)
def test_a_name_of_nothing_is_one_clear_error(model, error, told):
    with pytest.raises(error, match=told):
        find_model(model)


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("{", ModelError, "not a model's configuration"),
        ("[1]", ModelError, "list"),
        ("{}", ModelError, "model_type"),
        ('{"model_type": "lama"}', UsageError, "llama"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}', UnsupportedError, "code of its own"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', UnsupportedError, "quantized"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_one_clear_error(tmp_path, text, error, told):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=told):
        find_model(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": -64}, {"hidden_size": "wide"}, {"num_hidden_layers": 10**9}, {"head_dim": 1 << 62}],
)
def test_impossible_sizes_are_one_clear_error(folder, changes):
    with pytest.raises(ModelError):
        brim.estimate(folder("llama", **changes), batch=1, seq=8)


def test_a_pipeline_folder_says_which_of_its_folders_to_give(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ModelError, match="unet"):
        find_model(tmp_path)


def test_a_file_names_its_functions_when_the_one_asked_for_is_missing(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def build():\n    return lambda: None\n")
    assert find_model(f"{file}:build").library == "python"
    with pytest.raises(UsageError, match="It has build"):
        find_model(f"{file}:bild")
    file.write_text("raise RuntimeError('broken')")
    with pytest.raises(ModelError, match="broken"):
        find_model(f"{file}:build")
