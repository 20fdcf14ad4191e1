"""A Llama-shaped checkpoint with random weights, laid out as ``save_pretrained`` lays one out, written streaming."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 10**9
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a Llama. 24 blocks of 243 MB, embeddings and untied head 12 % of 6.6 GB in fp32."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 24
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 48_000


FULL = Shape()
TINY = Shape(hidden=256, intermediate=704, layers=6, heads=4, kv_heads=2, vocabulary=1000)


def write_checkpoint(directory: Path, shape: Shape) -> int:
    """Write the checkpoint where it is not there yet, one tensor in memory at a time; returns its weights' bytes."""
    index = directory / _INDEX
    marker = directory / "shape.json"
    wanted = json.dumps(vars(shape))
    if not (index.exists() and marker.exists() and marker.read_text() == wanted):
        directory.mkdir(parents=True, exist_ok=True)
        tensors = _describe(directory, shape)
        _write_shards(directory, _shards(tensors))
        write_tokenizer(directory)
        marker.write_text(wanted)
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _describe(directory: Path, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Write config.json; names and shapes of the weights in the model's own order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _shards(tensors: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, dims in tensors.items():
        size = prod(dims) * 4
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = dims
        held += size
    return shards


def _write_shards(directory: Path, shards: list[dict[str, tuple[int, ...]]]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_shard(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(document, indent=1))  # last: its presence says that all is there


def _write_shard(file: Path, shard: dict[str, tuple[int, ...]]) -> int:
    """One safetensors file: 8 bytes of header length, the header padded to 8 bytes, the tensors by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shard):
        size = prod(shard[name]) * 4
        header[name] = {"dtype": "F32", "shape": shard[name], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(shard):
            handle.write(_values(name, shard[name]).data)
    return offset


def _values(name: str, dims: tuple[int, ...]) -> np.ndarray:
    """Norms near one, the rest N(0, 1/fan-in): activations keep their size through the depth."""
    seed = np.random.default_rng(list(name.encode()))
    values = seed.standard_normal(dims, dtype=np.float32)
    if len(dims) == 1:
        values = values * np.float32(0.1) + np.float32(1.0)
    elif "embed_tokens" not in name:
        values *= np.float32(dims[1] ** -0.5)
    return values


def write_tokenizer(directory: Path) -> None:
    """The least tokenizer that loads: some tools open one whether they need it or not."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapper: Any = PreTrainedTokenizerFast
    fast = wrapper(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
