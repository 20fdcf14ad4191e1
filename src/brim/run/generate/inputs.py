"""Read prompts, tokenise them, and form batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brim.core.files import regular
from brim.errors import ModelError, UsageError
from brim.models.chat_template import apply_template


def read_prompts(path: Path) -> list[str]:
    """Read a prompt per line; in a ``.jsonl`` file each line is an object with ``prompt``. Blank lines are skipped.

    Raises UsageError with the number of a line that is not a prompt.
    """
    try:
        is_pipe = str(path).startswith(("/dev/fd/", "/dev/stdin"))  # a shell's process substitution
        raw = (path if is_pipe else regular(path)).read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read prompts from {path}.", f"{error.strerror}.", "Check the path.") from error
    prompts = []
    for number, line in enumerate(raw.rstrip(b"\r\n").splitlines(), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _bad_line(path, number, f"It is not UTF-8: {error.reason}, at byte {error.start}.") from error
        if not text.strip():
            continue
        prompts.append(_of_json(path, number, text) if path.suffix.lower() == ".jsonl" else text)
        if not prompts[-1].strip():
            raise _bad_line(path, number, "It is empty.")
    if not prompts:
        raise UsageError(f"Cannot read prompts from {path}.", "It is empty.", "Write one prompt per line.")
    return prompts


def _of_json(path: Path, number: int, text: str) -> str:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_line(path, number, f"It is not JSON: {error}.") from error
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str):
        raise _bad_line(path, number, 'It is not an object with a text under "prompt".')
    return prompt


def _bad_line(path: Path, number: int, problem: str) -> UsageError:
    return UsageError(f"Cannot read line {number} of {path} as a prompt.", problem, "Correct or remove it.")


def encode(tokenizer: Any, prompt: str, chat: bool | None, system: str | None = None) -> torch.Tensor:
    """The prompt as token ids, shape (tokens,). ``chat`` None: with the chat template if there is one.

    ``system``: a message before the prompt, which needs a chat template.
    """
    _check_text(prompt)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    if chat:
        return encode_chat(tokenizer, [*instructed(system), {"role": "user", "content": prompt}])
    if system is not None:
        raise UsageError(
            "Cannot use --system.",
            "Without a chat template there is no place for it.",
            "Leave it out, or write it into the prompt.",
        )
    return _filled(tokenizer(prompt, return_tensors="pt").input_ids)


def _check_text(prompt: str) -> None:
    """Raise UsageError for a prompt that was decoded from bytes that are not text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "Cannot read the prompt.", f"It is not UTF-8 text from character {error.start} on.", "Convert it."
        ) from error


def instructed(system: str | None) -> list[dict[str, str]]:
    """The first messages of a conversation."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    """The conversation as token ids, up to the model's answer; shape (tokens,)."""
    if not tokenizer.chat_template:
        raise UsageError(
            "Cannot apply a chat template to the prompt.", "This model's tokenizer has none.", "Use --no-chat."
        )
    return _filled(_apply_template(tokenizer, messages))


def _filled(ids: torch.Tensor) -> torch.Tensor:
    if ids.numel() == 0:
        raise UsageError("Cannot generate from the prompt.", "It is empty.", "Give at least one token.")
    return ids.long()[0]


def _apply_template(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    try:
        ids = apply_template(tokenizer, messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    except (TypeError, ValueError) as error:
        raise ModelError(
            "Cannot apply the model's chat template to the prompt.",
            f"The template fails: {' '.join(str(error).split()) or type(error).__name__:.300}.",
            "Leave out --system if the template does not use it, correct the template (chat_template.jinja or "
            "tokenizer_config.json), or use --no-chat.",
        ) from error
    token_ids: torch.Tensor = ids["input_ids"]
    return token_ids


def check(module: Any, name: str, rows: Sequence[torch.Tensor], new_tokens: int) -> None:
    """Raise for tokens outside of the model's vocabulary, and for more tokens than it has positions."""
    vocabulary = module.get_input_embeddings().num_embeddings
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    for number, ids in enumerate(rows, start=1):
        subject = f"Prompt {number}" if len(rows) > 1 else "The prompt"
        if int(ids.max()) >= vocabulary:
            raise ModelError(
                f"Cannot give {subject} to {name}.",
                f"Its tokenizer produces token {int(ids.max())}, and the model knows {vocabulary} tokens.",
                "Tokenizer and weights belong to different models: fetch them again.",
            )
        if limit is not None and len(ids) + new_tokens > limit:
            of = f" of prompt {number}" if len(rows) > 1 else ""
            raise UsageError(
                f"Cannot use {len(ids)} prompt tokens{of} and {new_tokens} new ones with {name}.",
                f"It was made for {limit} in all.",
                "Shorten the prompt or give a smaller --max-new-tokens.",
            )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that go through the model together. ``ids`` and ``mask`` (0: padding): [sequences, longest]."""

    first: int  # index of its first prompt
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def padded(self) -> bool:
        return not bool(self.mask.all())


def batches(rows: Sequence[torch.Tensor], size: int, *, pad: int, pad_left: bool) -> Iterator[Batch]:
    """``size`` prompts at a time, in the given order.

    A decoder continues from the end of its prompt, so its padding is on the left; an encoder counts positions from
    the beginning.
    """
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        longest = max(len(ids) for ids in some)
        ids = torch.full((len(some), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(some):
            place = slice(longest - len(row), longest) if pad_left else slice(0, len(row))
            ids[index, place], mask[index, place] = row, 1
        yield Batch(first=first, ids=ids, mask=mask)
