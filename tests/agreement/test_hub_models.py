"""Published checkpoints of all kinds are estimated and planned by their configurations and headers alone.

The headers are written from the published formats (tests/support/hub_checkpoints.py), and their sum is the one that
the makers state where it is known.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import brim
from brim.cli import main
from brim.core.options import STORED
from brim.estimation.models import find_model
from brim.estimation.packed_weights import as_stored
from brim.estimation.silence import quiet
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from support.hub import Hub, hub, tensor_bytes
from support.hub_checkpoints import Scheme, Tensors, gptq, weights_of
from support.hub_models import PUBLISHED

__all__ = ["hub"]
# metadata.total_size of model.safetensors.index.json.
STATED_BYTES = {
    "meta-llama/Llama-3.1-8B-Instruct": 16_060_522_496,
    "Qwen/Qwen2.5-7B-Instruct": 15_231_233_024,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248,
    "google/gemma-3-4b-it": 8_600_158_944,
    "microsoft/phi-4": 29_319_014_400,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 93_405_585_408,
    "openai/gpt-oss-20b": 13_761_264_768,
    "leo-kreisman/Qwen3.5-9B-MLX-8bit": 10_426_433_504,
}
DEEPSEEK_FILES_BYTES = 688_586_727_753  # of DeepSeek-V3's 163 files, with their headers
OFTEN = (  # the others are slow
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "openai/gpt-oss-20b", "mlx-community/Qwen3-4B-4bit",
)  # fmt: skip
FLOATS = ("F32", "F16", "BF16")
BUFFERS_BYTES = 1 << 16  # of rotary embeddings, positions and the biases of routers
pytestmark = pytest.mark.filterwarnings("ignore:brim generate does not run weights:UserWarning")  # plans predict them
GPU = ("--gpu", "RTX 4090", "--task", "generate")


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor_bytes(*entry) for entry in tensors.values())


def serve_published(hub: Hub, name: str) -> Tensors:
    published = PUBLISHED[name]
    headers = published.headers()
    hub.add(name, published.configuration(), headers)
    return headers


def loaded(name: str, headers: Tensors) -> Tensors:
    """What transformers loads: all but next-token modules, heads that are tied, and settings written as tensors."""
    config = PUBLISHED[name].configuration()
    text: dict[str, Any] = config.get("text_config", config)
    left_out = rf"^mtp\.|layers\.{text['num_hidden_layers']}\.|\.quant_state\.|\.weight_format$|correction_bias$"
    if config.get("tie_word_embeddings"):
        left_out += "|^lm_head"
    return {name: entry for name, entry in headers.items() if not re.search(left_out, name)}


def parameters_bytes(name: str, headers: Tensors) -> int:
    """The bytes of the parameters: floating ones are cast, but for scales of packed weights and some routers."""
    routers = r"|mlp\.gate\.weight$" if PUBLISHED[name].config in ("deepseek-v3", "glm-4.5-air") else ""
    scales, routers_wide = re.compile(r"absmax|quant_map|SCB|scale|biases$"), re.compile(f"^${routers}")
    own = "F32" if name.startswith("allenai") else "BF16"
    types = {
        part: dtype if dtype not in FLOATS or scales.search(part) else "F32" if routers_wide.search(part) else own
        for part, (dtype, _) in headers.items()
    }
    return bytes_of({part: (types[part], shape) for part, (_, shape) in loaded(name, headers).items()})


def errors_in(text: str) -> int:
    """The number of errors, without tracebacks."""
    return sum(line.startswith("Error:") for line in text.splitlines()) if "Traceback" not in text else -1


def test_the_headers_are_as_large_as_the_makers_state() -> None:
    for name, stated_bytes in STATED_BYTES.items():
        assert bytes_of(PUBLISHED[name].headers()) == stated_bytes
    headers = PUBLISHED["deepseek-ai/DeepSeek-V3.1"].headers()
    names_bytes = sum(len(name) for name in headers)
    assert 0 < DEEPSEEK_FILES_BYTES - bytes_of(headers) - names_bytes < 100 * len(headers)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_large_as_published(name: str, hub: Hub) -> None:
    headers = serve_published(hub, name)
    source = find_model(name)
    job = Job(source, Workload(task="generate", seq=16, new_tokens=2))
    with quiet(), torch.device("meta"):
        model = job.module()
        notes = as_stored(model, source, (8, 9)) if job.workload.precision == STORED else {}
    assert sum(parameter.nbytes for parameter in model.parameters()) == parameters_bytes(name, headers)
    assert bool(notes) == (PUBLISHED[name].scheme.settings is not None or "FP8" in name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in PUBLISHED])
def test_a_published_checkpoint_is_estimated_and_planned(
    name: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = serve_published(hub, name)
    result = brim.estimate(name, "generate", gpu="RTX 4090", seq=1024, new_tokens=2)
    assert result.stored_bytes == bytes_of(headers)
    settings = PUBLISHED[name].scheme.settings or {}
    if settings.get("quant_method") != "compressed-tensors":  # whose weights are unpacked in the first pass
        expected_bytes = parameters_bytes(name, headers)
        assert result.at_peak_bytes["parameters"] - expected_bytes in range(BUFFERS_BYTES)
    assert main(["plan", name, *GPU, "--seq", "1024", "--new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]
    assert hub.sent_bytes < 16 << 20  # headers, no weights


@pytest.mark.thorough
def test_the_command_estimates_a_model_that_is_known_by_its_headers(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "meta-llama/Llama-3.2-1B-Instruct"
    size = bytes_of(serve_published(hub, name))
    assert main(["estimate", name, *GPU, "--seq", "16", "--new-tokens", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["stored_bytes"] == size and answer["at_peak_bytes"]["parameters"] - size in range(1024)
    assert hub.sent_bytes < 1 << 20


@pytest.mark.thorough
def test_experts_are_counted_once_in_the_note(hub: Hub) -> None:
    """A layer's experts are two parameters of one module."""
    name = "openai/gpt-oss-20b"
    headers = serve_published(hub, name)
    result = brim.estimate(name, "generate", gpu="RTX 4090", seq=16, new_tokens=2)
    packed_bytes = bytes_of({part: entry for part, entry in headers.items() if ".experts." in part})
    assert f"mxfp4: 48 weights of {packed_bytes / 2**30:.3g} GiB" in " ".join(result.notes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "openai/gpt-oss-120b"])
def test_a_short_name_has_the_bytes_of_the_published_checkpoint(name: str) -> None:
    """Where the hub is not reached, the name of the catalog answers as the hub id does."""
    settings: dict[str, Any] = {"gpu": "H200", "seq": 16, "new_tokens": 2}
    result = brim.estimate(name.partition("/")[2], "generate", **settings)
    size = bytes_of(PUBLISHED[name].headers())
    assert result.workload.precision == STORED and result.at_peak_bytes["parameters"] - size in range(1024)
    trained = find_model(name.partition("/")[2])
    for method in ("full", "lora"):  # transformers unpacks them: MXFP4 takes no gradient
        job = Job(trained, Workload(task="train", method=method, seq=16))
        with quiet(), torch.device("meta"):
            job.module()
        assert job.workload.precision == "bf16"


def test_a_custom_class_that_transformers_has_is_built_by_it(hub: Hub) -> None:
    """Kimi K2 is DeepSeek V3 with a model_type of its own, which transformers has not."""
    changes = {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }
    hub.add("moonshotai/Kimi-K2-Instruct", PUBLISHED["deepseek-ai/DeepSeek-V3.1"].configuration() | changes)
    source = find_model("moonshotai/Kimi-K2-Instruct")
    assert source.config["model_type"] == "deepseek_v3" and source.config["quantization_config"]


SMALL = PUBLISHED["meta-llama/Llama-3.2-1B-Instruct"]
PACKED = Scheme(stored=gptq(4)).headers(weights_of(SMALL.configuration()))
LIES: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "hidden size": ({"hidden_size": 4096}, SMALL.headers(), "embed_tokens.weight has the shape .128256, 4096."),
    "vocabulary": ({"vocab_size": 32000}, SMALL.headers(), "In the checkpoint its shape is .128256, 2048."),
    "packed": (
        {"intermediate_size": 4096, "hidden_size": 4096, "quantization_config": {"quant_method": "gptq", "bits": 4}},
        PACKED, "embed_tokens.weight has the shape",
    ),
    "no model_type": ({"model_type": None}, {}, "It names no model_type"),
    "new model_type": ({"model_type": "llama5"}, {}, "has no model_type 'llama5'"),
    "custom code": (
        {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {"AutoModel": "mine.Mine"}}, {},
        "MineForCausalLM is custom Python code",
    ),
    "settings": ({"quantization_config": {"quant_method": "torchao", "quant_type": "int4"}}, {},
                 "sizes are known from the headers"),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["estimate", "plan"])
@pytest.mark.parametrize("case", LIES)
def test_a_configuration_that_lies_is_one_error(
    case: str, verb: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, headers, problem = LIES[case]
    hub.add("org/liar", SMALL.configuration() | changes, *([headers] if headers else []))
    assert main([verb, "org/liar", *GPU, "--seq", "8", "--new-tokens", "2"]) == 2
    error = capsys.readouterr().err
    assert re.search(problem, error) and errors_in(error) == 1
    assert "org/liar" in error and "snapshots" not in error  # the user's name, no folder of the hub's cache


@pytest.mark.parametrize(
    ("status", "code", "problem"),
    [
        (401, "RepoNotFound", "no such model for this account"),
        (403, "GatedRepo", "gated"),
        (404, "RevisionNotFound", "no such revision"),
        (429, "", "refuses further requests"),
        (503, "", "error .503."),
    ],
)
@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_a_refusal_of_the_hub_is_one_error(
    verb: str, status: int, code: str, problem: str, hub: Hub, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between the client's tries
    hub.errors["org/refused"] = status, code
    assert main([verb, "org/refused", *GPU]) == 2
    error = capsys.readouterr().err
    assert re.search(problem, error) and errors_in(error) == 1


@pytest.mark.parametrize("verb", ["estimate", "plan"])
def test_a_connection_that_is_cut_is_one_error(
    verb: str, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the client's tries
    hub.add("org/cut", SMALL.configuration(), SMALL.headers())
    hub.cut.add("org/cut")
    assert main([verb, "org/cut", *GPU]) == 2
    error = capsys.readouterr().err
    assert "cannot be reached" in error and errors_in(error) == 1


@pytest.mark.thorough
def test_an_unknown_method_is_assumed_to_unpack_at_every_call(hub: Hub) -> None:
    changes = {"quantization_config": {"quant_method": "zipquant"}}
    hub.add("org/zip", SMALL.configuration() | changes, PACKED)
    result = brim.estimate("org/zip", "generate", gpu="RTX 4090", seq=8, new_tokens=2)
    assert result.at_peak_bytes["parameters"] - bytes_of(PACKED) in range(1024)
    assert any(note.startswith("zipquant: ") and "assumed to unpack" in note for note in result.notes)
