"""A conversation with a model whose plan and cache stay in force from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from brim.errors import UnsupportedError, UsageError
from brim.measure.token_clock import Clock
from brim.requests.sampling import cut
from brim.run.generate.inputs import Batch, encode, encode_chat, instructed
from brim.run.generate.loop import Ending, Printer, run_batch, seeded
from brim.run.generate.request import OpenedRun, Request, opened_run


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer. ``stopped``: the caller's ``stopped`` ended it early.

    ``forgotten``: number of oldest messages that were left out because they did not fit. ``reused_tokens`` of the
    ``prompt_tokens`` were in the cache already.
    """

    text: str
    token_ids: list[int]
    stopped: bool
    forgotten: int
    prompt_tokens: int
    reused_tokens: int
    s_per_token: float | None


class Conversation:
    """The messages so far. ``messages`` are in the form of chat templates: ``role`` and ``content``."""

    def __init__(self, run: OpenedRun, request: Request, context: int, cache: Any) -> None:
        self._run, self._request, self.context, self._cache = run, request, context, cache
        self._cached: list[int] = []  # tokens in the cache
        self._turns = 0
        self.precision = run.precision
        self.messages: list[dict[str, str]] = instructed(request.system)

    def answer(
        self, text: str, on_text: Callable[[str], None] = lambda text: None, *, stopped: Callable[[], bool] = bool
    ) -> Turn:
        """The model's answer to ``text``. ``stopped`` is called after every token; True ends the answer.

        Raises UsageError for a message that is too long for ``context``.
        """
        request, tokenizer = self._request, self._run.tokenizer
        messages = [*self.messages, {"role": "user", "content": text}]
        messages, ids, forgotten = self._fitting(messages)
        reused = self._reused(ids)
        batch = Batch(first=0, ids=ids[None], mask=torch.ones_like(ids)[None])
        ending = Ending(tokenizer, request.stop, stopped, begin=len(ids))
        printer = Printer(tokenizer, on_text, request.stop)
        clock = Clock(printer.put)
        sampling = self._run.sampling
        if sampling.seed is not None:  # each turn draws other numbers
            sampling = replace(sampling, seed=sampling.seed + self._turns)
        with seeded(sampling):
            tokens = run_batch(
                self._run.loaded, batch, request.max_new_tokens, clock,
                sampling=sampling, ending=ending, cache=self._cache,
            )[0]  # fmt: skip
        printer.end()
        self._cached = [*ids.tolist(), *tokens]
        self._turns += 1
        answer = cut(tokenizer.decode(tokens, skip_special_tokens=True), request.stop)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return Turn(
            text=answer, token_ids=tokens, stopped=stopped(), forgotten=forgotten, prompt_tokens=len(ids),
            reused_tokens=reused, s_per_token=clock.s_per_step(),
        )  # fmt: skip

    def _encoded(self, messages: list[dict[str, str]]) -> torch.Tensor:
        tokenizer, chat = self._run.tokenizer, self._request.chat
        if tokenizer.chat_template and chat is not False:
            return encode_chat(tokenizer, messages)
        # Without a template nothing marks the end of a turn: the messages are continued as plain text.
        return encode(tokenizer, "\n".join(message["content"] for message in messages), chat)

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], torch.Tensor, int]:
        """Drop the oldest turns that leave no room for an answer; returns messages, their tokens, number dropped."""
        room, forgotten = self.context - self._request.max_new_tokens, 0
        first = len(instructed(self._request.system))
        while True:
            ids = self._encoded(messages)
            if len(ids) <= room:
                return messages, ids, forgotten
            if len(messages) - first < 3:
                raise UsageError(
                    f"The message has {len(ids)} tokens.",
                    f"A context of {self.context} tokens leaves {room} for it beside the answer.",
                    "Shorten it, give a larger --context or a smaller --max-new-tokens.",
                )
            messages, forgotten = [*messages[:first], *messages[first + 2 :]], forgotten + 2

    def _reused(self, ids: torch.Tensor) -> int:
        """Truncate the cache to its common prefix with ``ids``, without their last token, which must be computed."""
        if self._cache is None:
            return 0
        shared = 0
        for cached, token in zip(self._cached, ids[:-1].tolist(), strict=False):
            if cached != token:
                break
            shared += 1
        return int(self._cache.keep(shared))


@contextmanager
def chat(
    request: Request,
    *,
    context: int | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_loaded: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Conversation]:
    """A conversation inside the budget; ``request.prompt`` is ignored.

    ``context``: most tokens of the conversation, for which memory is planned at once; None is 4,096, or the model's
    own limit if that is smaller. Raises as ``generate`` does.
    """
    with ExitStack() as stack:
        run = stack.enter_context(opened_run(request, [], on_stage, on_loaded, context=context or 0))
        assert run.context is not None
        if run.encodes:
            raise UnsupportedError(
                f"Cannot hold a conversation with {request.model}.", "An encoder-decoder answers a single text.",
                "Give --prompt.",
            )  # fmt: skip
        loaded = run.loaded
        cache = loaded.cache(1, run.context - request.max_new_tokens, request.max_new_tokens)
        if cache is not None:
            stack.callback(cache.remove)
        yield Conversation(run, request, run.context, cache)
