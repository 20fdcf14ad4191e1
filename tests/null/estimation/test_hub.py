"""A model of the hub is estimated by its configuration and headers; each error of the hub has its sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from brim.cli import main
from brim.errors import ModelError, UsageError
from brim.estimation.hub import hub_model, is_hub_id, split_revision
from brim.estimation.models import find_model, weight_type
from support.hub import Hub, hub, tensor_bytes

__all__ = ["hub"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def llama_tensors(dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": (dtype, (512, 256))}
    for layer in range(2):
        inside = f"model.layers.{layer}"
        found |= {f"{inside}.self_attn.{name}_proj.weight": (dtype, (256, 256)) for name in "qkvo"}
        found |= {f"{inside}.mlp.{name}_proj.weight": (dtype, (512, 256)) for name in ("gate", "up")}
        found[f"{inside}.mlp.down_proj.weight"] = dtype, (256, 512)
        found |= {f"{inside}.{name}_layernorm.weight": (dtype, (256,)) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (dtype, (256,))}


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, "--task", "generate", "--seq", "8", "--new-tokens", "2", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_names() -> None:
    assert split_revision("org/name@v1.0") == ("org/name", "v1.0") and split_revision("org/name") == (
        "org/name",
        None,
    )
    assert is_hub_id("Qwen/Qwen3-14B") and is_hub_id("Qwen/Qwen3-14B@main")
    assert not any(map(is_hub_id, ("gpt2", "./model", "a/b/c", "~/model", "../model", "model/", "/model")))


def test_a_model_is_estimated_without_its_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = llama_tensors()
    halves = dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])
    hub.add("org/split", CONFIG, *halves)
    stored = hub_model("org/split").tensors
    assert stored is not None
    size = sum(tensor_bytes(*entry) for entry in tensors.values())
    assert sum(tensor.bytes for tensor in stored.values()) == size
    found = estimate(capsys, "org/split")
    assert found["stored_bytes"] == size and found["at_peak_bytes"]["parameters"] - size in range(1024)  # its buffers
    assert weight_type(find_model("org/split")).dtype == "bfloat16"  # of the headers: the configuration names none
    assert hub.sent_bytes < size // 8  # the client reads the first 100 KB of each file


def test_a_head_that_the_files_have_is_not_tied(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma's configuration class ties by default; transformers does not tie what it loads both."""
    config = {name: value for name, value in CONFIG.items() if name != "tie_word_embeddings"}
    config |= {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 64}
    tensors = llama_tensors() | {"lm_head.weight": ("BF16", (512, 256))}
    for name, files in (("org/head", tensors), ("org/tied", llama_tensors())):
        hub.add(name, config, files)
        size = sum(tensor_bytes(*entry) for entry in files.values())
        assert estimate(capsys, name)["at_peak_bytes"]["parameters"] - size in range(1024)


@pytest.mark.parametrize("dtype", ["U8", "F8_E4M3", "I8"])
def test_quantized_files_are_seen_though_the_configuration_names_no_method(
    dtype: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/packed", CONFIG, llama_tensors() | {"model.layers.0.mlp.down_proj.weight": (dtype, (256, 256))})
    assert main(["estimate", "org/packed"]) == 2
    assert "weights are quantized" in capsys.readouterr().err
    assert estimate(capsys, "org/packed")["precision"] == "stored"
    hub.add("org/mask", CONFIG, llama_tensors() | {"model.layers.0.self_attn.bias": (dtype, (1, 1, 8, 8))})
    assert estimate(capsys, "org/mask")["precision"] == "bf16"
    assert main(["estimate", "org/packed", "--precision", "bf16", "--seq", "8"]) == 0


def test_what_is_in_the_hub_s_cache_is_not_asked_for(hub: Hub) -> None:
    hub.add("org/whole", CONFIG, llama_tensors())
    find_model("org/whole")
    hub_model.cache_clear()
    hub.requests.clear()
    assert find_model("org/whole").stored is not None and not hub.requests


def test_a_revision_is_asked_for(hub: Hub) -> None:
    hub.add("org/whole", CONFIG, llama_tensors())
    commit = hub_model("org/whole").folder.name
    assert find_model(f"org/whole@{commit}").stored is not None
    with pytest.raises(ModelError, match="no such revision"):
        find_model("org/whole@v9")


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (401, "RepoNotFound", "no such model for this account"),
        (404, "RepoNotFound", "no such model for this account"),
        (403, "GatedRepo", "gated"),
        (401, "GatedRepo", "gated"),
        (429, "", "further requests"),
        (500, "", "error .500."),
    ],
)
def test_each_refusal_has_a_sentence(status: int, code: str, reason: str, hub: Hub) -> None:
    hub.errors["org/model"] = status, code
    with pytest.raises(ModelError, match=reason) as caught:
        find_model("org/model")
    assert "org/model" in str(caught.value) and "\n  File" not in str(caught.value)


def test_a_catalog_s_configuration_stands_for_a_gated_model(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.errors["meta-llama/Llama-3.2-1B"] = 403, "GatedRepo"
    found = estimate(capsys, "meta-llama/Llama-3.2-1B")
    assert any(note.startswith("configuration: ") and "gated" in note for note in found["notes"])
    hub.errors["openai/gpt-oss-20b"] = 403, "GatedRepo"
    assumed = find_model("openai/gpt-oss-20b").assumed
    assert "gated" in assumed and assumed.endswith("those of openai/gpt-oss-20b are in MXFP4.")


def test_cut_connections_and_damaged_files_have_a_sentence(hub: Hub) -> None:
    hub.add("org/cut", CONFIG, llama_tensors())
    hub.cut.add("org/cut")
    with pytest.raises(ModelError, match="cannot be reached"):
        find_model("org/cut")
    hub.add("org/damaged", b"{", llama_tensors())
    with pytest.raises(ModelError, match="not a model's configuration"):
        find_model("org/damaged")
    hub.add("org/header", CONFIG, llama_tensors())
    hub.files["org/header"]["model.safetensors"] = b"\\x10" + bytes(7) + b"not a header, 16", 1 << 20
    with pytest.raises(ModelError, match="header of its weights is damaged"):
        find_model("org/header")


def test_a_configuration_in_the_cache_suffices_without_the_hub(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/plain", CONFIG)  # without weights, so without headers
    hub_model("org/plain")
    hub.add("org/plain", CONFIG, llama_tensors())
    hub_model.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = estimate(capsys, "org/plain")
    assert any("headers are unknown" in note and "HF_HUB_OFFLINE" in note for note in found["notes"])


def test_a_configuration_of_another_model_is_named(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add("org/other", CONFIG | {"num_hidden_layers": 6}, llama_tensors())
    found = estimate(capsys, "org/other")
    assert any(note.startswith("weights: ") and "its configuration describes" in note for note in found["notes"])


def test_without_the_hub_an_unknown_name_gets_the_nearest_ones(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE.*\n?.*Nearest: llama"):
        find_model("meta-llama/Llama-3.1-9B")
    with pytest.raises(UsageError, match="Unknown model"):
        find_model("lama-3-8b")
