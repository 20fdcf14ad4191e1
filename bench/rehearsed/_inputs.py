"""Makes what the programs read: a tiny Llama's configuration and tokenizer, texts, preferences, images.

python _inputs.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = "the a cat dog sat ran on to and mat house garden river with small big red blue".split()  # noqa: SIM905
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def model(folder: Path) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>", "<system>"]
    words = Tokenizer(WordLevel({word: at for at, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=256, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)


def rows(folder: Path) -> None:
    drawn = random.Random(0)

    def text() -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(5, 60)))

    def said(who: str) -> list[dict[str, str]]:
        return [{"role": who, "content": text()}]

    kinds = {
        "chats": lambda at: {"messages": said("user") + said("assistant")},
        "preferences": lambda at: {
            "prompt": said("user"),
            "chosen": said("assistant"),
            "rejected": said("assistant"),
        },
        "judged": lambda at: {"prompt": said("user"), "completion": said("assistant"), "label": at % 2 == 0},
        "prompts": lambda at: {"prompt": said("user")},
        "rated": lambda at: {
            "chosen": said("user") + said("assistant"),
            "rejected": said("user") + said("assistant"),
        },
    }
    for name, row in kinds.items():
        (folder / name).mkdir()
        lines = [json.dumps(row(at)) for at in range(64)]
        (folder / name / "train.jsonl").write_text("\n".join(lines))


def images(folder: Path) -> None:
    drawn = random.Random(0)
    for kind in ("first", "second"):
        for split in ("train", "val"):
            (folder / split / kind).mkdir(parents=True)
        for at in range(128):
            color = tuple(drawn.randrange(256) for _ in range(3))
            for split in ("train", "val"):
                Image.new("RGB", (96, 96), color).save(folder / split / kind / f"{at}.png")


def boxes(folder: Path) -> None:
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for at in range(8):
        Image.new("RGB", (320, 320), (at * 20, 90, 30)).save(folder / "images" / f"{at}.jpg")
        (folder / "labels" / f"{at}.txt").write_text("0 0.5 0.5 0.3 0.4\n1 0.2 0.3 0.2 0.2\n")
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: {{0: cat, 1: dog}}\n")


if __name__ == "__main__":
    at = Path(sys.argv[1])
    model(at / "model")
    rows(at)
    images(at / "images")
    boxes(at / "boxes")
