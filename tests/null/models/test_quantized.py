"""A model opened quantized is the model quantized in memory; the cache holds no more than that takes."""

from __future__ import annotations

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
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import brim
from brim.errors import UnsupportedError, UsageError
from brim.estimation.step_memory import Inputs
from brim.memory.checkpoint_files import read_checkpoint
from brim.models.opening import open_model
from brim.models.quantized import PRECISIONS, open_as, open_quantized
from brim.techniques.quantization.technique import SCHEMES, Quantization, QuantizedLinear, apply

IDS = torch.arange(1, 9).view(1, 8)
INPUTS = Inputs(prompt=8, total=8)


def llama(*, tied: bool = False, words: int = 96) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=words,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied-bf16": lambda: llama(tied=True).bfloat16(),
    "gpt2": gpt2,
}


def saved(make: Callable[[], PreTrainedModel], folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    make().save_pretrained(folder, **options)
    return folder


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def cached(home: Path) -> list[Path]:
    return sorted((home / "brim" / "quantized").glob("*"))


@pytest.fixture
def home(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, in which the machine is known."""
    made = tmp_path / "cache"
    made.mkdir()
    (made / "brim").mkdir()
    for path in (cache_home / "brim").glob("*.json"):
        (made / "brim" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(made))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_loaded_quantized_is_quantized_in_memory(name: str, scheme: str, tmp_path: Path, home: Path) -> None:
    folder = saved(MODELS[name], tmp_path / name, max_shard_size="100KB")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    twin = AutoModelForCausalLM.from_pretrained(folder).eval()
    apply(twin, scheme)
    module = brim.load(folder, quantization=scheme, inputs=INPUTS)
    assert torch.equal(logits(module), logits(twin))
    module.brim.remove()  # type: ignore[operator, union-attr]
    assert torch.equal(logits(module), logits(twin))
    wanted = dict(twin.named_parameters())
    for path, parameter in module.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), wanted[path].view(torch.uint8)), path
    assert files == {path: path.read_bytes() for path in folder.iterdir()}


def test_it_is_converted_once(tmp_path: Path, home: Path) -> None:
    folder = saved(llama, tmp_path / "llama")
    open_quantized(folder, "int8")
    (made,) = cached(home)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    open_quantized(folder, Quantization(scheme="int8"))
    assert cached(home) == [made]
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp


def test_whatever_changes_the_result_has_a_cache_of_its_own(tmp_path: Path, home: Path) -> None:
    folder = saved(llama, tmp_path / "llama")
    for asked in ("int4", Quantization(scheme="int4", group=32), Quantization(scheme="int4", head=True)):
        open_quantized(folder, asked)
    open_quantized(folder, "int4", dtype=torch.bfloat16)
    assert len(cached(home)) == 4
    saved(llama, folder)  # the same values, written anew
    open_quantized(folder, "int4")
    assert len(cached(home)) == 5


def test_tables_that_stay_wide_are_read_from_where_they_are(tmp_path: Path, home: Path) -> None:
    folder = saved(lambda: llama(words=5000), tmp_path / "llama")  # 1.28 MB a table
    opened = open_quantized(folder, "int8")
    (made,) = cached(home)
    held = read_checkpoint(made)
    tables = ["lm_head.weight", "model.embed_tokens.weight"]
    assert not set(tables) & set(held)
    assert "model.layers.0.input_layernorm.weight" in held
    assert "model.layers.0.mlp.up_proj.codes" in held
    assert opened.sources["model.embed_tokens.weight"].extents[0].path == str(folder / "model.safetensors")
    assert opened.bytes == sum(source.bytes for source in held.values()) + 2 * 5000 * 64 * 4
    assert opened.name == "llama (int8)"
    twin = AutoModelForCausalLM.from_pretrained(folder).eval()
    apply(twin, "int8")
    assert torch.equal(logits(brim.load(folder, quantization="int8", inputs=INPUTS)), logits(twin))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_too(tied: bool, tmp_path: Path, home: Path) -> None:
    asked = Quantization(scheme="int4", head=True)
    folder = saved(lambda: llama(tied=tied), tmp_path / "llama")
    twin = AutoModelForCausalLM.from_pretrained(folder).eval()
    apply(twin, asked)
    module = brim.load(folder, quantization=asked, inputs=INPUTS)
    assert isinstance(module.lm_head, QuantizedLinear)
    assert torch.equal(logits(module), logits(twin))


def test_what_stays_wide_takes_the_type_that_is_asked_for(tmp_path: Path, home: Path) -> None:
    folder = saved(llama, tmp_path / "llama")
    module = brim.load(folder, quantization="int8", dtype=torch.bfloat16, inputs=INPUTS)
    assert logits(module).dtype == torch.bfloat16
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    apply(twin, "int8")
    assert torch.equal(logits(module), logits(twin))


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_a_precision_by_name(precision: str | None, tmp_path: Path, home: Path) -> None:
    folder = saved(llama, tmp_path / "llama")
    opened = open_as(folder, precision)
    dtypes = {p.dtype for p in opened.module.parameters()}
    expected = {
        None: {torch.float32},
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16},
        "fp16": {torch.float16},
        "int8": {torch.float32, torch.int8},
        "int4": {torch.float32, torch.uint8, torch.bfloat16},
        "fp8": {torch.float32, torch.float8_e4m3fn},
    }
    assert dtypes == expected[precision]
    assert {source.dtype for source in opened.sources.values()} == dtypes
    assert opened.bytes == sum(p.nbytes for p in opened.module.parameters())
    if precision in SCHEMES:
        assert opened.bytes < open_model(folder).bytes / 2


def test_what_cannot_be_quantized_is_refused_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3)
    folder = saved(lambda: ResNetForImageClassification(config), tmp_path / "resnet")
    with pytest.raises(UnsupportedError, match="linear layers can be quantized"):
        open_quantized(folder, "int4")
    with pytest.raises(UsageError, match="Known: int8, int4, fp8"):
        brim.load(folder, quantization="int3")
    assert cached(home) == []
