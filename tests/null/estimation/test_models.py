"""What MODEL may name, and what is said when it names nothing."""

import json

import pytest
import torch
from safetensors.torch import save_file

import brim
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.models import Source, find_model, weight_type
from brim.estimation.steps import Job
from brim.estimation.workload import Workload


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
        ('{"model_type": "llama", "architectures": 2}', ModelError, "not a list of class names"),
        ('{"model_type": "llama", "architectures": "LlamaForCausalLM"}', ModelError, "not a list of class names"),
        ('{"model_type": "lama"}', UsageError, r"config\.json(.|\n)+lama(.|\n)+llama"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}', UnsupportedError, "custom Python code"),
    ],
)
def test_a_damaged_or_foreign_configuration_is_one_clear_error(tmp_path, text, error, told):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=told):
        find_model(tmp_path)


def test_a_class_of_custom_code_that_transformers_has_too_is_built_by_it(tmp_path):
    config = {"model_type": "llama", "architectures": ["Llama_ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(tmp_path).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": -64}, {"hidden_size": "wide"}, {"num_hidden_layers": 10**9}, {"head_dim": 1 << 62}],
)
def test_impossible_sizes_are_one_clear_error(folder, changes):
    with pytest.raises(ModelError):
        brim.estimate(folder("llama", **changes), batch=1, seq=8)


def test_a_file_names_its_functions_when_the_one_asked_for_is_missing(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def build():\n    return lambda: None\n")
    assert find_model(f"{file}:build").library == "python"
    with pytest.raises(UsageError, match="It has build"):
        find_model(f"{file}:bild")
    file.write_text("raise RuntimeError('broken')")
    with pytest.raises(ModelError, match="broken"):
        find_model(f"{file}:build")


# Where configurations of composite models name the type of their weights, and where of several it is taken from.
@pytest.mark.parametrize(
    ("config", "dtype", "origin"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", "dtype of its configuration"),
        ({"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "float16", "dtype of its configuration"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16", "text_config.dtype of its configuration"),
        ({"text_config": {"torch_dtype": "torch.bfloat16"}}, "bfloat16", "text_config.dtype of its configuration"),
        ({"thinker_config": {"text_config": {"dtype": "bfloat16"}}}, "bfloat16", "thinker_config.text_config.dtype"),
        ({"vision_config": {"dtype": "float32"}, "text_config": {"dtype": "bfloat16"}}, "bfloat16", "text_config"),
        ({"audio_config": {"torch_dtype": "bfloat16"}}, "bfloat16", "audio_config"),
        ({"dtype": None, "llm_config": {"torch_dtype": "bfloat16"}}, "bfloat16", "llm_config"),
        ({"vocabulary_map": {"dtype": 7}, "dtype": {"": "bfloat16"}}, "float32", "default"),
        ({}, "float32", "default: its configuration names no dtype"),
    ],
)
def test_the_type_of_weights_is_found_wherever_a_configuration_has_it(config, dtype, origin):
    found = weight_type(Source(name="mine", library="transformers", config=config))
    assert found.dtype == dtype
    assert found.origin.startswith(origin)


def test_the_weights_say_their_type_where_the_configuration_does_not(folder):
    path = folder("llama", text_config={"dtype": "float16"})
    save_file({"lm_head.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, path / "model.safetensors")
    found = weight_type(find_model(path))
    assert (found.dtype, found.origin) == ("bfloat16", "the weights of its checkpoint")


@pytest.mark.parametrize(("name", "part"), [("llama", None), ("vlm", "text_config")])
def test_a_quantized_model_is_estimated_in_the_precision_that_is_asked_for(folder, name, part):
    asked = {"batch": 1, "seq": 8, "precision": "bf16"}
    plain = brim.estimate(path := folder(name), **asked)
    config = json.loads((path / "config.json").read_text())
    (config if part is None else config[part])["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantized .awq.[^\n]*\n.*--precision bf16"):
        brim.estimate(path, batch=1, seq=8)
    assert brim.estimate(path, **asked).peak_bytes == plain.peak_bytes


@pytest.mark.thorough
def test_a_composite_model_is_estimated_in_the_precision_of_its_text(folder):
    found = brim.estimate(folder("vlm"), batch=1, seq=8)
    assert (found.workload.precision, found.precision_origin) == (
        "bf16", "by text_config.dtype of its configuration (bfloat16)",
    )  # fmt: skip
    assert found.peak_bytes == brim.estimate(folder("vlm", dtype="bfloat16"), batch=1, seq=8).peak_bytes
    assert "inputs: text only: the memory for images and sounds is not included" in found.notes


def test_a_module_of_the_users_own_keeps_its_type(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(64, 64, dtype=torch.bfloat16), (torch.zeros(2, 64, dtype=torch.bfloat16),)\n"
    )
    found = brim.estimate(f"{file}:build")
    assert (found.workload.precision, found.precision_origin) == (
        "bf16", "by the function's module as it is (bfloat16)",
    )  # fmt: skip
    assert found.at_peak_bytes["parameters"] == (64 * 64 + 64) * 2
    assert brim.estimate(f"{file}:build", precision="fp32").at_peak_bytes["parameters"] == (64 * 64 + 64) * 4


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"text_config": {"sliding_window": 1024}}, True),
        ({"thinker_config": {"text_config": {"attention_chunk_size": 8192}}}, True),
        ({"sliding_window": None, "text_config": {"sliding_window": None}}, False),
    ],
)
def test_a_window_is_found_in_the_part_that_has_it(config, windows):
    source = Source(name="mine", library="transformers", config=config)
    assert Job(source, Workload()).has_windows == windows


def test_a_short_name_of_a_quantized_checkpoint_says_what_it_counts() -> None:
    assert find_model("gpt-oss-20b").assumed.endswith("those of openai/gpt-oss-20b are in MXFP4.")
    assert find_model("deepseek-v3").assumed.startswith("weights: in 16 bits")
    assert find_model("gpt2").assumed == ""


@pytest.mark.parametrize("name", ["flux.1-dev", "sd-vae", "llama-3.2-1b"])
def test_one_model_of_a_pipeline_says_that_the_others_are_not_counted(name):
    assert ("the others" in find_model(name).assumed) is (name != "llama-3.2-1b")
