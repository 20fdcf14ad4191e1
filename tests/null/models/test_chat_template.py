"""Chat templates within bounds: each is a program that came with a model."""

from __future__ import annotations

import gc
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from brim.models import chat_template
from brim.models.chat_template import TemplateError, apply_template
from support.forked import forked
from support.tiny_model import save_tokenizer

QUESTION = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def rendered(tokenizer: Any, template: str, messages: list[dict[str, str]] = QUESTION) -> str:
    tokenizer.chat_template = template
    text: str = apply_template(tokenizer, messages, tokenize=False)
    return text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'x' * 10 ** 9 }}", "more than 2.. MiB of memory"),
        ("{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "of memory"),
        ("{{ '%1000000000d' % 1 }}", "of memory"),
        ("{{ 'a' | center(10 ** 10) }}", "of memory"),
        ("{{ [1] * 10 ** 9 }}", "of memory"),
        ("{{ 'x' * 14000000 }}", "writes 14,000,000 characters; at most 1,0"),
        ("{% for n in range(10 ** 18) %}x{% endfor %}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ raise_exception('only questions') }}", "^only questions$"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_what_a_template_makes_is_bounded(tokenizer: Any, template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        rendered(tokenizer, template)
    assert rendered(tokenizer, "{{ messages[0].content }}") == "hi"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=10 ** 7) }}",
    ],
)
def test_its_time_is_bounded(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MOST_CPU_S", 1)
    with pytest.raises(TemplateError, match="computes for more than 1 s"):
        rendered(tokenizer, template)
    assert rendered(tokenizer, "{{ messages[0].content }}") == "hi"


def test_one_that_hangs_is_ended_by_the_clock(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MOST_WAIT_S", 0.0)
    with pytest.raises(TemplateError, match="not rendered within 0 s"):
        rendered(tokenizer, "{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}")


def test_a_long_conversation_is_rendered_whole(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "words " * 20} for _ in range(20_000)]
    began_s = time.process_time()
    text = rendered(tokenizer, "{% for m in messages %}{{ m.content }}|{% endfor %}", messages)
    assert len(text) == 20_000 * 121
    assert time.process_time() - began_s < 2


def test_the_renderer_of_everybody_else_stays_transformers_own(tokenizer: Any) -> None:
    assert rendered(tokenizer, "{{ messages[0].content }}") == "hi"
    tokenizer.chat_template = "{{ 'x' * 2000000 }}"
    assert len(tokenizer.apply_chat_template(QUESTION, tokenize=False)) == 2_000_000


def test_a_copy_of_the_process_has_a_renderer_of_its_own(tokenizer: Any) -> None:
    assert rendered(tokenizer, "{{ 1 }}") == "1"
    child = chat_template._process._child
    assert child is not None
    gc.collect()  # what other tests left open is not looked at below

    def copy() -> None:
        nonlocal child
        pid = child.pid
        del child
        with warnings.catch_warnings(record=True) as warned:  # a pipe that is left open is one
            warnings.simplefilter("always")
            same = rendered(tokenizer, "{{ 2 }}") == "2"
            gc.collect()
        other = chat_template._process._child
        os._exit(0 if same and not warned and other is not None and other.pid != pid else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(forked(copy), 0)[1]) == 0
    assert rendered(tokenizer, "{{ 3 }}") == "3"


def test_one_that_ended_is_begun_anew(tokenizer: Any) -> None:
    assert rendered(tokenizer, "{{ 1 }}") == "1"
    child = chat_template._process._child
    assert child is not None and child.stdin is not None
    child.stdin.close()
    child.wait()
    child.stdin = open(os.devnull, "wb")  # noqa: SIM115  # closed with the process
    assert rendered(tokenizer, "{{ 2 }}") == "2"


def test_a_working_folder_that_is_gone_is_not_needed(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_template._process.end()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert rendered(tokenizer, "{{ 4 }}") == "4"
