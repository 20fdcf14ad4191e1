"""A small random Llama with a byte-level tokenizer, saved as a user would have it; and what a leak would show in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from support.garbage import collect_threads

CHAT_TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def save_llama(
    folder: Path,
    *,
    layers: int = 3,
    hidden: int = 512,
    positions: int = 4096,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """3 layers of 15 MB unless told otherwise; ``options`` go to ``save_pretrained``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=None,  # it goes on for as long as it is asked to
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat_template
    made.save_pretrained(folder)


def held(*roots: Path) -> dict[str, Any]:
    """What this process holds that brim might have left: threads, open files, mappings and files under ``roots``."""
    threads = collect_threads()
    files = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            files.append(str(link.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = sorted(str(path) for root in roots for path in root.rglob("*"))
    return {
        "threads": threads,
        "files": sorted(name for name in files if name.startswith("/") and not name.startswith("/proc")),
        "mapped": sorted({line.split(maxsplit=5)[5] for line in maps if "safetensors" in line or "/#" in line}),
        "names": names,
    }
