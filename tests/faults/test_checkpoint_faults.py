"""Damaged, incomplete and hostile checkpoints: each gives one clear error that names the culprit."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brim.errors import BrimError, ModelError, UnsupportedError, UsageError
from brim.memory.checkpoint_files import read_checkpoint, read_safetensors_header
from brim.memory.checkpoint_writing import write_safetensors
from brim.memory.checksums import checksum, read_manifest, write_manifest
from brim.models.opening import open_model, open_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "sharded", max_shard_size="40KB")


def save(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, **options)
    return folder


def refused(action: Callable[[], object], *words: str, kind: type[BrimError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert caught.value.exit_code == 2
    assert caught.value.reason
    return message


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(changed or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -5000])
def test_a_truncated_file_says_how_much_is_missing(llama: Path, keep: int) -> None:
    path = llama / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    message = refused(lambda: open_model(llama), "model.safetensors", "missing")
    if keep < 0:
        assert f"{-keep} of its" in message


def test_a_file_with_more_than_its_header_says_is_refused(llama: Path) -> None:
    with (llama / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refused(lambda: open_model(llama), "4 bytes longer")


def test_any_flipped_bit_of_a_header_is_an_error_or_changes_nothing_but_a_name(llama: Path) -> None:
    path = llama / "model.safetensors"
    raw, good = path.read_bytes(), read_safetensors_header(path)
    length = int.from_bytes(raw[:8], "little")
    for position in range(0, 8 + length, 11):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 7)
        path.write_bytes(damaged)
        try:
            found = read_safetensors_header(path)
        except ModelError:
            continue
        # A name, a dtype of the same size or the metadata: what they say together still covers the data exactly.
        assert [source.extents for source in found.values()] == [source.extents for source in good.values()]


def test_a_flipped_bit_in_a_tensors_name_is_a_missing_tensor(llama: Path) -> None:
    rewrite_header(
        llama / "model.safetensors",
        lambda header: {name.replace("layers.1.mlp.up", "layers.1.mlp.uq"): entry for name, entry in header.items()},
    )
    refused(lambda: open_model(llama), "lacks model.layers.1.mlp.up_proj.weight")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda header: header[NORM].update(dtype="F31"), "F31"),
        (lambda header: header[NORM].update(dtype=["F32"]), "dtype"),
        (lambda header: header[NORM].update(dtype="F16"), "64 bytes"),
        (lambda header: header[NORM].update(shape=[33]), "132 bytes"),
        (lambda header: header[NORM].update(shape=[-32]), "shape"),
        (lambda header: header[NORM].update(shape=[True]), "shape"),
        (lambda header: header[NORM].update(shape=[1 << 70]), "shape"),
        (lambda header: header[NORM].update(data_offsets=[0, 128]), "overlaps"),
        (lambda header: header[NORM].update(data_offsets=[128, 0]), "range has -128"),
        (
            lambda header: header[NORM].update(data_offsets=[1 << 40, (1 << 40) + 128]),
            "before it belong to no tensor",
        ),
        (lambda header: header[NORM].pop("shape"), NORM),
        (lambda header: header[NORM].update(more=1), NORM),
        (lambda header: header.pop(NORM), "belong to no tensor|longer"),
        (lambda header: b"[]", "not a JSON object"),
        (lambda header: b"{", "header is damaged"),
        (lambda header: b"\xff\xfe", "header is damaged"),
        (lambda header: b"[" * 100_000, "header is damaged"),
        (lambda header: b'{"a": {}, "a": {}}', "appears twice"),
    ],
)
def test_a_header_that_lies_is_refused(llama: Path, change: Callable[[dict[str, Any]], Any], word: str) -> None:
    rewrite_header(
        llama / "model.safetensors", lambda header: value if isinstance(value := change(header), bytes) else header
    )
    message = refused(lambda: read_checkpoint(llama), "model.safetensors")
    assert any(part in message for part in word.split("|")), message


def test_a_header_of_an_absurd_length_is_not_read(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])
    refused(lambda: open_model(llama), str(1 << 62))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(lambda: open_model(sharded), shard.name)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(lambda: open_model(sharded), shard.name, "10 of its")


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_names_a_file_outside_its_folder_is_refused(sharded: Path, llama: Path) -> None:
    outside = llama / "model.safetensors"
    (sharded / "link.safetensors").symlink_to(outside)
    (sharded / "folder").symlink_to(llama)
    for name in ("../llama/model.safetensors", str(outside), "link.safetensors", "folder/model.safetensors", "a\0b"):
        edit_index(sharded, lambda weight_map, name=name: weight_map.update({NORM: name}))
        refused(lambda: open_model(sharded), "outside the checkpoint's folder", repr(name))


def test_a_hub_cache_does_not_lead_into_another_repository(tmp_path: Path, llama: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    other = tmp_path / "models--c--d" / "blobs"
    snapshot.parent.mkdir(parents=True)
    other.mkdir(parents=True)
    save(snapshot, max_shard_size="40KB")
    (llama / "model.safetensors").rename(other / "blob")
    (snapshot / "link.safetensors").symlink_to(other / "blob")
    edit_index(snapshot, lambda weight_map: weight_map.update({NORM: "link.safetensors"}))
    refused(lambda: open_model(snapshot), "outside")


def test_an_index_that_lists_a_tensor_in_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_bytes())["weight_map"]
    wrong = next(shard for shard in index.values() if shard != index[NORM])
    edit_index(sharded, lambda weight_map: weight_map.update({NORM: wrong}))
    refused(lambda: open_model(sharded), NORM, wrong)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ""}}'])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(lambda: open_model(sharded), "index.json")


def test_pickles_are_never_loaded(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"never read")
    refused(lambda: open_model(llama), "never loads pickles", "save_pretrained")


def test_a_folder_without_weights_or_config_says_what_it_lacks(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    refused(lambda: open_model(llama), "model.safetensors")
    (llama / "config.json").unlink()
    refused(lambda: open_model(llama), "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no_such_model"}'])
def test_a_damaged_config_is_refused(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    refused(lambda: open_model(llama), "config.json")


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    edit_config(llama, vocab_size=65)
    refused(lambda: open_model(llama), "lm_head.weight", "[65, 32]", "[64, 32]")


def test_missing_tensors_are_named(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=3)
    refused(lambda: open_model(llama), "lacks model.layers.2.input_layernorm.weight", "more")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_a_checkpoint_in_another_dtype_than_its_config_says_is_refused(tmp_path: Path, stored: torch.dtype) -> None:
    folder = save(tmp_path / "half", stored)
    edit_config(folder, dtype="float32")
    refused(lambda: open_model(folder), "float32", str(stored).removeprefix("torch."))


def test_asking_for_another_dtype_than_is_stored_is_refused(llama: Path) -> None:
    refused(lambda: open_model(llama, dtype=torch.bfloat16), "bfloat16", "float32")


@pytest.mark.parametrize("stored", [torch.float16, torch.int32, torch.int64, torch.float8_e4m3fn])
def test_one_tensor_in_a_wrong_dtype_is_named(llama: Path, stored: torch.dtype) -> None:
    path = llama / "model.safetensors"
    content = safetensors.torch.load_file(path)
    content[NORM] = content[NORM].to(stored)
    safetensors.torch.save_file(content, path, {"format": "pt"})
    refused(lambda: open_model(llama), NORM, str(stored).removeprefix("torch."))


def test_checkpoints_quantized_by_another_method_are_refused(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "hqq", "bits": 4})
    refused(
        lambda: open_model(llama),
        "hqq",
        "bitsandbytes, compressed-tensors, torchao, gptq, awq",
        kind=UnsupportedError,
    )


def test_code_in_the_models_folder_is_not_run(llama: Path) -> None:
    (llama / "modeling_mine.py").write_text("raise SystemExit('this ran')")
    (llama / "configuration_mine.py").write_text("raise SystemExit('this ran')")
    auto_map = {"AutoConfig": "configuration_mine.Config", "AutoModel": "modeling_mine.Model"}
    edit_config(llama, model_type="mine", architectures=["Mine"], auto_map=auto_map)
    refused(lambda: open_model(llama), "trust_remote_code", kind=UnsupportedError)


def test_a_diffusers_folder_says_where_it_goes(llama: Path) -> None:
    (llama / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    refused(lambda: open_model(llama), "UNet2DConditionModel", "brim.fit", kind=UnsupportedError)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "no_such_file.gguf", "a/b/c", ""])
def test_a_path_that_is_not_there_is_said_to_be_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("this was not to touch the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    if name:
        refused(lambda: open_model(name), name, "no such file or folder")
    refused(lambda: open_model(Path("nowhere")), "nowhere")


def test_a_hub_id_without_a_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(lambda: open_model("no-such-owner/no-such-model"), "no-such-owner/no-such-model", "HF_HUB_OFFLINE is set")


def test_a_file_that_is_no_gguf_is_refused(llama: Path, tmp_path: Path) -> None:
    refused(lambda: open_model(llama / "config.json"), "config.json", kind=UsageError)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"no gguf at all")
    refused(lambda: open_model(garbage), "garbage.gguf")


def test_a_gguf_of_garbage_is_refused_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 4000)
    refused(lambda: open_model(garbage), "garbage.gguf")
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


def test_a_missing_tokenizer_is_one_clear_error(llama: Path) -> None:
    opened = open_model(llama)
    refused(lambda: open_tokenizer(opened), "tokenizer")


def test_a_flipped_bit_in_the_data_shows_against_the_manifest(llama: Path) -> None:
    content = safetensors.torch.load_file(llama / "model.safetensors")
    layout = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    write_manifest(llama, write_safetensors(llama / "model.safetensors", layout, content.items()))
    opened = open_model(llama)
    assert opened.checksums.keys() == opened.sources.keys()
    (extent,) = opened.sources[NORM].extents
    raw = bytearray(Path(extent.path).read_bytes())
    raw[extent.offset + 17] ^= 4
    data = torch.frombuffer(raw, dtype=torch.uint8)
    assert checksum(data[extent.offset : extent.offset + extent.bytes]) != opened.checksums[NORM]
    for name, source in opened.sources.items():
        (extent,) = source.extents
        good = checksum(data[extent.offset : extent.offset + extent.bytes]) == opened.checksums[name]
        assert good == (name != NORM)


def test_a_damaged_manifest_is_refused(llama: Path) -> None:
    for text in ("", "{}", '{"version": 2, "checksums": {}}', '{"version": 1, "checksums": {"a": "x"}}'):
        (llama / "brim.manifest.json").write_text(text)
        refused(lambda: read_manifest(llama), "brim.manifest.json")
