"""A conversation as tokens, and which of them are the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.run.model.chat_template import apply_template

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, Any]
Span = tuple[int, int]  # from, to: characters of the rendered conversation


class ChatEncoder:
    """Applies a tokenizer's chat template.

    A template with ``{% generation %}`` marks the answers itself. For any other, an answer begins where the prompt
    for it ends (the template applied to all that comes before, with its generation prompt, as in inference) and ends
    where the conversation up to it does, its end-of-turn token included. Both are checked against the rendering of
    the whole, because some templates render a turn differently once others follow (reasoning is left out); there,
    the answer's own words are looked for, and then the token that ends the turn.

    Raises ModelError for a tokenizer without a template, UnsupportedError for one that does not tell where in the
    text its tokens are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ModelError(
                "The data has messages, which need a chat template.",
                "The tokenizer has none: it belongs to a base model.",
                "Use the tokenizer of an instruction-tuned model, or data with text.",
            ) from error
        if not tokenizer.is_fast:
            raise UnsupportedError(
                "The data has messages, so the answers in them must be located.",
                f"{type(tokenizer).__name__} does not give the positions of its tokens in the text.",
                "Use a fast tokenizer (one with a tokenizer.json).",
            )
        self._marked = bool(_GENERATION.search(template))
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(added | set(tokenizer.all_special_tokens))

    def encode(self, row: dict[str, Any], where: str) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is part of an answer. ``where`` is the line, for errors."""
        messages, options = row["messages"], {"tools": row["tools"]} if row.get("tools") else {}
        if self._marked:
            encoded = self._applied(
                where, messages, **options, return_dict=True, return_assistant_tokens_mask=True, verbose=False
            )
            return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

        def render(part: Sequence[Message], prompt: bool) -> str:
            text = self._applied(where, part, **options, tokenize=False, add_generation_prompt=prompt)
            assert isinstance(text, str)
            return text

        full = render(messages, False)
        spans = self._answers(messages, full, render, where)
        encoded = self._tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded["offset_mapping"]
        return list(encoded["input_ids"]), [end > begin and _inside(begin, spans) for begin, end in offsets]

    def _applied(self, where: str, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return apply_template(self._tokenizer, messages, **options)
        except Exception as error:  # templates raise what they like
            raise UsageError(
                f"Cannot apply the tokenizer's chat template to {where}.",
                f"The template fails: {' '.join(str(error).split()) or type(error).__name__:.300}.",
                "Write the conversation as the model expects it.",
            ) from error

    def _answers(
        self, messages: Sequence[Message], full: str, render: Callable[[Sequence[Message], bool], str], where: str
    ) -> list[Span]:
        spans: list[Span] = []
        reached = 0  # everything before is accounted for
        for index, message in enumerate(messages):
            words = (message.get("content") or "").strip()
            if message["role"] != "assistant":
                at = full.find(words, reached)
                reached = at + len(words) if at >= 0 else reached
                continue
            begin = _length(render(messages[:index], True) if index else None, full, reached)
            said = full.find(words, reached if begin is None else begin) if words else -1
            begin = said if begin is None else begin
            end = self._end(
                render(messages[: index + 1], False), full, begin, said + len(words) if said >= 0 else None
            )
            if begin < 0 or end <= begin:
                raise _not_found(index, where)
            spans.append((begin, end))
            reached = end
        return spans

    def _end(self, until: str, full: str, begin: int, said: int | None) -> int:
        """Where the turn that begins at ``begin`` ends: with the special token that ends turns, without space after.

        until: the conversation up to and with the turn. said: where the answer's words end, if they are there.
        """
        told = until.rstrip()
        closing = next((token for token in self._special if told.endswith(token)), None)
        if full.startswith(until):
            return len(told) if closing else len(until)
        at = -1 if closing is None else full.find(closing, begin if said is None else said)
        if said is not None and full[said:at].strip():
            return said  # that token ends something else
        return -1 if closing is None or at < 0 else at + len(closing)


def _length(part: str | None, full: str, least: int) -> int | None:
    """How long ``part`` is, if ``full`` begins with it and it reaches ``least``."""
    fits = part is not None and full.startswith(part) and len(part) >= least
    return len(part) if part is not None and fits else None


def _inside(at: int, spans: Sequence[Span]) -> bool:
    return any(begin <= at < end for begin, end in spans)


def _not_found(index: int, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot find the answer of message {index + 1} of {where} in the templated conversation.",
        "The tokenizer's chat template changes its text.",
        "Mark the answers in the template with {% generation %} ... {% endgeneration %}.",
    )
