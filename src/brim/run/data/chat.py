"""A conversation as tokens, and which of them are the assistant's answers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.models.chat_template import apply_template

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A conversation of more messages is not rendered anew up to each answer, which grows with their square ...
_FEW_MESSAGES = 32
_MOST_MESSAGES = (
    512  # ... unless its template makes other text of words with a mark in them; and then of these at most
)
_MARK = re.compile("\uf8f0([0-9]+)\uf8f1")  # in characters for private use

Message = dict[str, Any]
Span = tuple[int, int]  # from, to: characters of the rendered conversation
Render = Callable[[Sequence[Message], bool], str]  # the messages, and whether the prompt for an answer follows


class ChatEncoder:
    """Applies a tokenizer's chat template.

    A template with ``{% generation %}`` marks the answers itself. For any other, an answer begins where the prompt
    for it ends (the template applied to all that comes before, with its generation prompt, as in inference) and ends
    where the conversation up to it does, its end-of-turn token included. Both are checked against the rendering of
    the whole, because some templates render a turn differently once others follow (reasoning is left out); there,
    the answer's own words are looked for, and then the token that ends the turn. In a long conversation the first
    answer shows which prompt stands before one and what ends it; words are found by another rendering, in which each
    message has a mark.

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
        begins = [begin for begin, _ in spans]
        answers = [bisect_right(begins, begin) - 1 for begin, _ in offsets]  # the last that begins there or before
        return list(encoded["input_ids"]), [
            begin < end and answer >= 0 and begin < spans[answer][1]
            for (begin, end), answer in zip(offsets, answers, strict=True)
        ]

    def _applied(self, where: str, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return apply_template(self._tokenizer, messages, **options)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Cannot apply the tokenizer's chat template to {where}.",
                f"The template fails: {' '.join(str(error).split()) or type(error).__name__:.300}.",
                "Write the conversation as the model expects it.",
            ) from error

    def _answers(self, messages: Sequence[Message], full: str, render: Render, where: str) -> list[Span]:
        places = _places(messages, full, render)
        if len(messages) > _FEW_MESSAGES:
            if places is not None:
                return self._answers_at(places, messages, full, render, where)
            if len(messages) > _MOST_MESSAGES:
                raise UnsupportedError(
                    f"Cannot find the answers of {where} in the templated conversation.",
                    f"It has {len(messages):,} messages, and the tokenizer's chat template changes their text.",
                    _TODO,
                )
        return self._answers_by_prefixes(places or {}, messages, full, render, where)

    def _answers_by_prefixes(
        self, places: dict[int, Span], messages: Sequence[Message], full: str, render: Render, where: str
    ) -> list[Span]:
        spans: list[Span] = []
        reached = 0  # everything before is accounted for
        for index, message in enumerate(messages):
            words = _words(message)
            begin = None
            if message["role"] == "assistant":
                begin = _length(render(messages[:index], True) if index else None, full, reached)
            at, after = places.get(index) or (full.find(words, reached if begin is None else begin), -1)
            said = at + len(words) if after < 0 <= at else after
            if message["role"] != "assistant":
                reached = max(said, reached)
                continue
            begin = (at if words else -1) if begin is None else begin
            until = render(messages[: index + 1], False)
            end = self._end(until, full, begin, said if words and said >= 0 else None)
            if begin < 0 or end <= begin:
                raise _not_found(index, where)
            spans.append((begin, end))
            reached = end
        return spans

    def _answers_at(
        self, places: dict[int, Span], messages: Sequence[Message], full: str, render: Render, where: str
    ) -> list[Span]:
        """The same for a long conversation, of which it is known where most messages' words are."""
        prompt, opening, ending, closing = self._around_an_answer(messages, render, where)
        begins = [*(begin for begin, _ in places.values()), len(full)]
        spans: list[Span] = []
        reached = passed = 0  # characters and places
        for index, message in enumerate(messages):
            said, after = places.get(index, (None, None))
            passed += said is not None
            if message["role"] != "assistant":
                reached = reached if after is None else after
                continue
            at = full.find(prompt, reached, begins[passed] if said is None else said) if prompt else -1
            begin = at + len(prompt) if at >= 0 else -1 if said is None else said
            if not prompt and full.endswith(opening, reached, max(begin, reached)):
                begin -= len(opening)
            if after is not None and ending and full.startswith(ending, after):
                end = after + len(ending)
            else:
                at = full.find(closing, max(begin, after or 0), begins[passed]) if closing else -1
                is_closed = at >= 0 and not (after is not None and full[after:at].strip())
                end = at + len(closing) if is_closed else -1 if after is None else after
            if begin < 0 or end <= begin:
                raise _not_found(index, where)
            spans.append((begin, end))
            reached = end
        return spans

    def _around_an_answer(self, messages: Sequence[Message], render: Render, where: str) -> tuple[str, str, str, str]:
        """The prompt for an answer; what its turn has before and after its words; the token that ends turns."""
        index = next((i for i, message in enumerate(messages) if i and message["role"] == "assistant"), 0)
        before, prompted = (render(messages[:index], more) if index else "" for more in (False, True))
        until = render(messages[: index + 1], False)
        places = _places(messages[: index + 1], until, render) or {}
        begin, end = self._answers_by_prefixes(places, messages[: index + 1], until, render, where)[-1]
        said, after = places.get(index, (-1, -1))
        return (
            prompted.removeprefix(before) if prompted.startswith(before) else "",
            until[begin:said] if said > begin else "",
            until[after:end] if after > begin else "",
            next((token for token in self._special if until.rstrip().endswith(token)), ""),
        )

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


def _words(message: Message) -> str:
    return (message.get("content") or "").strip()


def _verbatim(message: Message, text: str, at: int) -> Span:
    """From where to where ``message``'s words, which begin at ``at``, are in ``text``, with the space around them as
    far as it is there too."""
    content, words = message["content"], _words(message)
    lead = content.find(words)
    if at >= lead and text.startswith(content, at - lead):
        return at - lead, at - lead + len(content)
    return at, at + len(words)


def _places(messages: Sequence[Message], full: str, render: Render) -> dict[int, Span] | None:
    """Where the words of each message are in the templated conversation, as far as they are there as they are.

    None where the template makes other text of words with a mark in their middle.
    """
    marked = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        middle = content.find(_words(message)) + len(_words(message)) // 2
        mark = f"\uf8f0{index}\uf8f1" if content.strip() else ""
        marked.append({**message, "content": content[:middle] + mark + content[middle:]} if mark else message)
    text = render(marked, False)
    if _MARK.search(full) or _MARK.sub("", text) != full:
        return None
    places: dict[int, Span] = {}
    reached = removed = 0
    for found in _MARK.finditer(text):
        index = int(found[1])
        words = _words(messages[index])
        at = found.start() - removed - len(words) // 2
        removed += len(found[0])
        if (
            index not in places
            and index >= next(reversed(places), 0)
            and at >= reached
            and full.startswith(words, at)
        ):
            begin, reached = _verbatim(messages[index], full, at)
            places[index] = begin, reached
    return places


_TODO = "Mark the answers in the template with {% generation %} ... {% endgeneration %}."


def _not_found(index: int, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot find the answer of message {index + 1} of {where} in the templated conversation.",
        "The tokenizer's chat template changes its text.",
        _TODO,
    )
