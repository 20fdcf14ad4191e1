"""A model is quantized once, into a checkpoint that transformers opens too; and a weight at a time."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
)

import brim
from brim.errors import UnsupportedError, UsageError
from brim.estimation.quantization import quantize
from brim.estimation.step_memory import Inputs, watch_inference
from brim.models.opening import open_model
from brim.models.quantized import PRECISIONS, give_quantized_layers, open_as, open_quantized
from brim.models.weights import materialize
from brim.planning.file import described
from brim.requests.plan import LOSSY

IDS = torch.arange(1, 9).view(1, 8)
INPUTS = Inputs(prompt=8, total=12)
SIZES: dict[str, Any] = {"num_attention_heads": 4, "vocab_size": 96}


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def llama(**values: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | SIZES | values))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(hidden_size=64, word_embed_proj_dim=32, ffn_dim=128, num_hidden_layers=2, **SIZES)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    ),
}


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.bfloat16().save_pretrained(folder, **options)
    return folder


def cached(home: Path) -> list[Path]:
    return sorted((home / "brim" / "quantized").glob("*"))


@pytest.fixture
def home(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, in which the machine is known."""
    made = tmp_path / "cache"
    (made / "brim").mkdir(parents=True)
    for path in (cache_home / "brim").glob("*.json"):
        (made / "brim" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(made))
    return made


@needs_bitsandbytes
@torch.no_grad()
@pytest.mark.parametrize("precision", LOSSY)
def test_transformers_opens_what_is_cached(precision: str, tmp_path: Path, home: Path) -> None:
    folder = saved(llama(), tmp_path / "llama", max_shard_size="30KB")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    module = brim.load(folder, quantization=precision, inputs=INPUTS)
    (made,) = cached(home)
    assert json.loads((made / "config.json").read_bytes())["quantization_config"]["quant_method"] == "bitsandbytes"
    twin: Any = AutoModelForCausalLM.from_pretrained(made).eval()
    assert torch.equal(module(input_ids=IDS).logits, twin(input_ids=IDS).logits)
    assert files == {path: path.read_bytes() for path in folder.iterdir()}


@needs_bitsandbytes
def test_it_is_converted_once_and_whatever_changes_the_result_has_a_folder_of_its_own(
    tmp_path: Path, home: Path
) -> None:
    folder = saved(llama(), tmp_path / "llama")
    opened = open_quantized(folder, "int8")
    (made,) = cached(home)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert open_quantized(folder, "int8").sources == opened.sources
    assert opened.name == "llama (int8)" and opened.path == folder
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    open_quantized(folder, "int4")
    open_quantized(folder, "int4", dtype=torch.float16)
    saved(llama(), folder)  # written anew
    open_quantized(folder, "int4")
    assert len(cached(home)) == 4


@needs_bitsandbytes
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_by_name(precision: str, tmp_path: Path, home: Path) -> None:
    folder = saved(llama(), tmp_path / "llama")
    opened = open_as(folder, precision)
    expected = {
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16},
        "fp16": {torch.float16},
        "int8": {torch.bfloat16, torch.int8, torch.float32},
        "int4": {torch.bfloat16, torch.uint8, torch.float32},
    }
    assert {p.dtype for p in opened.module.parameters()} == expected[precision]
    assert opened.bytes == sum(p.nbytes for p in opened.module.parameters())
    if precision in LOSSY:
        assert opened.bytes < 0.75 * open_model(folder).bytes


@needs_bitsandbytes
@pytest.mark.parametrize("precision", LOSSY)
@pytest.mark.parametrize("name", MODELS)
def test_plans_and_estimates_have_the_parameters_of_a_run(
    name: str, precision: str, tmp_path: Path, home: Path
) -> None:
    folder = saved(MODELS[name](), tmp_path / name)
    opened = open_quantized(folder, precision)
    planned, estimated = described(folder), described(folder)
    give_quantized_layers(planned.eval(), name, precision)
    with torch.device("meta"):
        quantize(estimated, precision, training=False)

    def parameters(module: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return {name: (p.dtype, p.shape) for name, p in module.named_parameters()}

    assert parameters(planned) == parameters(estimated) == parameters(opened.module)
    materialize(opened.module, opened)
    assert watch_inference(planned, INPUTS).step_bytes == watch_inference(opened.module, INPUTS).step_bytes


@needs_bitsandbytes
@pytest.mark.parametrize("precision", LOSSY)
def test_a_weight_is_held_at_a_time(
    precision: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the largest weight: its rounded copy, codes in pieces and joined, and 16 float32 copies of a piece."""
    monkeypatch.setattr("brim.models.prequantized._PIECE_VALUES", 1 << 16)
    weight_bytes = 2 * 512 * 2048
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    folder = saved(llama(**config), tmp_path / "llama")
    with torch.profiler.profile(profile_memory=True) as profile:
        open_quantized(folder, precision)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    held, peak = 0, 0
    for event in profile.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    assert weight_bytes < peak < 3 * weight_bytes + 16 * 4 * (1 << 16) + (1 << 20)


def test_an_unknown_precision_says_what_would_run(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "llama")
    with pytest.raises(UsageError, match=r"Known: int8, int4(.|\n)*stored in another form"):
        brim.load(folder, quantization="fp8")


def test_a_missing_package_is_named_with_how_to_install_it(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers import quantizer_bnb_4bit

    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    folder = saved(llama(), tmp_path / "llama")
    with pytest.raises(UnsupportedError, match=r"are to be quantized(.|\n)*Run pip install bitsandbytes"):
        open_quantized(folder, "int4")
    with pytest.raises(UnsupportedError, match="`pip install"):
        give_quantized_layers(described(folder), "llama", "int4")
    assert cached(home) == []


@needs_bitsandbytes
def test_what_cannot_be_quantized_is_refused_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2])
    folder = saved(ResNetModel(config), tmp_path / "resnet")
    with pytest.raises(UnsupportedError, match="linear ones that can be quantized"):
        open_quantized(folder, "int4")
    assert cached(home) == []
