"""A conversation as tokens, and which of them are the assistant's answers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from brim.errors import ModelError, UnsupportedError, UsageError
from brim.models.chat_template import apply_template

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Most messages of a conversation that is rendered anew up to each answer, which takes quadratic time; the second
# holds where the template changes words that have a mark in them.
_FEW_MESSAGES, _MOST_MESSAGES = 32, 512
_MARK = re.compile("\uf8f0([0-9]+)\uf8f1")  # in characters for private use

Message = dict[str, Any]
Span = tuple[int, int]  # begin, end: characters of the rendered conversation
Render = Callable[[Sequence[Message], bool], str]  # the messages, and whether the prompt for an answer follows


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template.

    A template with ``{% generation %}`` marks the answers itself. With any other template, an answer begins where the
    generation prompt before it ends (the earlier messages rendered as for inference) and ends where the conversation
    up to and with it ends, its end-of-turn token included. Both are checked against the rendering of the full
    conversation, because some templates render a turn differently once others follow (they leave out its reasoning).
    Where they differ, the answer is located by its own text and by the special token that ends the turn.

    In a long conversation, the first answer shows the prompt before every answer and the ending after it. Messages
    are located by a second rendering, in which each has a mark.

    Raises ModelError for a tokenizer without a template, UnsupportedError for one that gives no positions of its
    tokens in the text.
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
        """Token ids, and a flag for each: part of an answer or not. ``where`` names the line in errors."""
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
        answers = [bisect_right(begins, begin) - 1 for begin, _ in offsets]  # the last that begins at or before
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
        reached = 0  # end of the last message that was located
        for index, message in enumerate(messages):
            words = _words(message)
            begin = None
            if message["role"] == "assistant":
                begin = _length(render(messages[:index], True) if index else None, full, reached)
            at, after = places.get(index) or (full.find(words, reached if begin is None else begin), -1)
            words_end = at + len(words) if after < 0 <= at else after
            if message["role"] != "assistant":
                reached = max(words_end, reached)
                continue
            begin = (at if words else -1) if begin is None else begin
            until = render(messages[: index + 1], False)
            end = self._end(until, full, begin, words_end if words and words_end >= 0 else None)
            if begin < 0 or end <= begin:
                raise _not_found(index, where)
            spans.append((begin, end))
            reached = end
        return spans

    def _answers_at(
        self, places: dict[int, Span], messages: Sequence[Message], full: str, render: Render, where: str
    ) -> list[Span]:
        """``_answers_by_prefixes`` for a long conversation: most messages' words are at ``places``."""
        prompt, opening, ending, closing = self._around_an_answer(messages, render, where)
        begins = [*(begin for begin, _ in places.values()), len(full)]
        spans: list[Span] = []
        reached = passed = 0  # end of the last message; number of places up to this message
        for index, message in enumerate(messages):
            words_begin, words_end = places.get(index, (None, None))
            passed += words_begin is not None
            if message["role"] != "assistant":
                reached = reached if words_end is None else words_end
                continue
            at = full.find(prompt, reached, begins[passed] if words_begin is None else words_begin) if prompt else -1
            begin = at + len(prompt) if at >= 0 else -1 if words_begin is None else words_begin
            if not prompt and full.endswith(opening, reached, max(begin, reached)):
                begin -= len(opening)
            if words_end is not None and ending and full.startswith(ending, words_end):
                end = words_end + len(ending)
            else:
                at = full.find(closing, max(begin, words_end or 0), begins[passed]) if closing else -1
                is_closed = at >= 0 and not (words_end is not None and full[words_end:at].strip())
                end = at + len(closing) if is_closed else -1 if words_end is None else words_end
            if begin < 0 or end <= begin:
                raise _not_found(index, where)
            spans.append((begin, end))
            reached = end
        return spans

    def _around_an_answer(self, messages: Sequence[Message], render: Render, where: str) -> tuple[str, str, str, str]:
        """Generation prompt; text of the turn before and after the answer's words; special token that ends a turn."""
        index = next((i for i, message in enumerate(messages) if i and message["role"] == "assistant"), 0)
        before, prompted = (render(messages[:index], more) if index else "" for more in (False, True))
        until = render(messages[: index + 1], False)
        places = _places(messages[: index + 1], until, render) or {}
        begin, end = self._answers_by_prefixes(places, messages[: index + 1], until, render, where)[-1]
        words_begin, words_end = places.get(index, (-1, -1))
        return (
            prompted.removeprefix(before) if prompted.startswith(before) else "",
            until[begin:words_begin] if words_begin > begin else "",
            until[words_end:end] if words_end > begin else "",
            next((token for token in self._special if until.rstrip().endswith(token)), ""),
        )

    def _end(self, until: str, full: str, begin: int, words_end: int | None) -> int:
        """End of the turn that begins at ``begin``: its closing special token included, the space after it not.

        until: the conversation up to and with the turn. words_end: end of the answer's words, if they were located.
        """
        stripped = until.rstrip()
        closing = next((token for token in self._special if stripped.endswith(token)), None)
        if full.startswith(until):
            return len(stripped) if closing else len(until)
        at = -1 if closing is None else full.find(closing, begin if words_end is None else words_end)
        if words_end is not None and full[words_end:at].strip():
            return words_end  # that token ends another turn
        return -1 if closing is None or at < 0 else at + len(closing)


def _length(part: str | None, full: str, least: int) -> int | None:
    """Length of ``part`` if ``full`` begins with it and it is at least ``least`` long, else None."""
    fits = part is not None and full.startswith(part) and len(part) >= least
    return len(part) if part is not None and fits else None


def _words(message: Message) -> str:
    return (message.get("content") or "").strip()


def _verbatim(message: Message, text: str, at: int) -> Span:
    """Span of ``message``'s words, which begin at ``at`` in ``text``, with as much of their surrounding space as the
    text has."""
    content, words = message["content"], _words(message)
    lead = content.find(words)
    if at >= lead and text.startswith(content, at - lead):
        return at - lead, at - lead + len(content)
    return at, at + len(words)


def _places(messages: Sequence[Message], full: str, render: Render) -> dict[int, Span] | None:
    """Span of each message's words in the templated conversation, for messages that appear verbatim.

    None where the template changes words that have a mark in their middle.
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
    for match in _MARK.finditer(text):
        index = int(match[1])
        words = _words(messages[index])
        at = match.start() - removed - len(words) // 2
        removed += len(match[0])
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
