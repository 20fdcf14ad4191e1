"""transformers' own server answers with a model that `brim.load` streams: `examples/serve.py`, on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from brim.techniques.streaming.placement import FROM_DISK
from support.tiny_model import save_llama

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve.py"
# The example, and what it placed where.
PROGRAM = """
import runpy, sys
import brim
load = brim.load
def noted(*args, **kwargs):
    model = load(*args, **kwargs)
    print(*model.brim.plan.choices("weight_streaming").values(), file=sys.stderr)
    return model
brim.load = noted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not is_serve_available(), reason='needs pip install "transformers[serving]"'),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), layers=6)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, str]]:
    """The server's address, and what it has printed until it listened."""
    words = [sys.executable, "-c", PROGRAM, str(EXAMPLE), str(folder), "--ram=70MiB", "--tokens=64", "--port=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as child:
        try:
            assert child.stderr is not None
            printed = ""
            for line in child.stderr:
                printed += line
                if match := re.search(r"running on (http://\S+)", line):
                    yield match[1], printed
                    break
            else:
                pytest.fail(printed)
        finally:
            child.kill()


def answer(address: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    return [line for line in text.splitlines() if line] if body.get("stream") else json.loads(text)


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """The text by transformers alone, with all weights in memory."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_streamed_model_answers_as_one_in_memory(server: tuple[str, str], folder: Path, expected: str) -> None:
    address, printed = server
    assert FROM_DISK in printed.split()
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": str(folder), "messages": messages, "max_tokens": 8, "temperature": 0.0}
    for _ in range(2):
        found = answer(address, "/v1/chat/completions", **body)
        assert found["choices"][0]["message"]["content"] == expected
    lines = answer(address, "/v1/chat/completions", **body, stream=True)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said and expected.startswith(said)  # the server holds back bytes that are no full character
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_it_answers_for_no_other_model(server: tuple[str, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        answer(server[0], "/v1/completions", model="gpt2", prompt="hello")
    with caught.value as error:
        assert error.code == 400
