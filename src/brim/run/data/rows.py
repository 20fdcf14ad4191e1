"""Convert the forms of published datasets (alpaca's instructions, ShareGPT's conversations) to ``messages``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MESSAGES, TEXT = "messages", "text"
FORMS = (
    'Each example is {"messages": [{"role": "user", "content": "..."}, ...]}, {"text": "..."}, '
    '{"instruction": "...", "input": "...", "output": "..."} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}.'
)
_INSTRUCTION, _CONVERSATIONS = "instruction", "conversations"
# Speaker, as ShareGPT's exports and their descendants write it -> role of chat templates.
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "bing": "assistant", "bard": "assistant", "tool": "tool",
}  # fmt: skip


def as_messages(row: dict[str, Any], refuse: Callable[[str], Exception]) -> dict[str, Any]:
    """``row`` with another known form converted to ``messages``; rows with ``messages`` or ``text``, and rows of an
    unknown form, are returned unchanged. Raises ``refuse(problem)``."""
    if MESSAGES in row or isinstance(row.get(TEXT), str):
        return row
    if _CONVERSATIONS in row:
        return {MESSAGES: _of_conversation(row[_CONVERSATIONS], refuse)}
    return {MESSAGES: _of_instruction(row, refuse)} if _INSTRUCTION in row else row


def _of_instruction(row: dict[str, Any], refuse: Callable[[str], Exception]) -> list[dict[str, Any]]:
    """Alpaca: an instruction, optionally its input, and the answer."""
    texts = {name: row.get(name) or "" for name in ("system", _INSTRUCTION, "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise refuse(f"{name} is not a string but {type(text).__name__}.")
    if not texts["output"].strip():
        raise refuse("It has an instruction but no output.")
    question = "\n\n".join(text for text in (texts[_INSTRUCTION], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]


def _of_conversation(turns: Any, refuse: Callable[[str], Exception]) -> list[dict[str, Any]]:
    """ShareGPT: ``from`` and ``value``; some exports have ``role`` and ``content`` here too."""
    if not isinstance(turns, list) or not turns:
        raise refuse("conversations is not a list of one or more messages.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise refuse(f"message {number} is not an object with from and value.")
        speaker = turn.get("from", turn.get("role"))
        role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise refuse(f"message {number} is from {speaker!r}; known: {', '.join(_SPEAKERS)}.")
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return messages
