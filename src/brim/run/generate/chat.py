"""A conversation with a model that stays in force from turn to turn, and so does what its cache holds of them."""

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
from brim.run.generate.request import OpenedRun, Request, opened_for_chat


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer. ``stopped``: before its end, by ``stopped`` of ``answer``.

    ``forgotten``: how many of the oldest messages were left out, as they would not fit. ``reused_tokens`` of
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
    """What was said so far. ``messages`` are as chat templates take them: ``role`` and ``content``."""

    def __init__(self, run: OpenedRun, request: Request, context: int, cache: Any) -> None:
        self._run, self._request, self.context, self._cache = run, request, context, cache
        self._cached: list[int] = []  # what the cache was filled with
        self._turns = 0
        self.precision = run.precision
        self.messages: list[dict[str, str]] = instructed(request.system)

    def answer(
        self, text: str, on_text: Callable[[str], None] = lambda text: None, *, stopped: Callable[[], bool] = bool
    ) -> Turn:
        """The model's answer to ``text``. ``stopped`` is called after every token; True ends the answer there.

        Raises UsageError for a message that is too long for ``context`` by itself.
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
        if sampling.seed is not None:  # each turn draws anew
            sampling = replace(sampling, seed=sampling.seed + self._turns)
        with seeded(sampling):
            tokens = run_batch(
                self._run.loaded, batch, request.max_new_tokens, clock,
                sampling=sampling, ending=ending, cache=self._cache,
            )[0]  # fmt: skip
        printer.end()
        self._cached = [*ids.tolist(), *tokens]
        self._turns += 1
        said = cut(tokenizer.decode(tokens, skip_special_tokens=True), request.stop)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return Turn(
            text=said, token_ids=tokens, stopped=stopped(), forgotten=forgotten, prompt_tokens=len(ids),
            reused_tokens=reused, s_per_token=clock.s_per_step(),
        )  # fmt: skip

    def _encoded(self, messages: list[dict[str, str]]) -> torch.Tensor:
        tokenizer, chat = self._run.tokenizer, self._request.chat
        if tokenizer.chat_template and chat is not False:
            return encode_chat(tokenizer, messages)
        # Without a template nothing says where a turn ends: the text goes on as it is.
        return encode(tokenizer, "\n".join(message["content"] for message in messages), chat)

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], torch.Tensor, int]:
        """The messages without the oldest turns that leave no room for an answer, their tokens, how many went."""
        room, kept, forgotten = self.context - self._request.max_new_tokens, messages, 0
        first = len(instructed(self._request.system))
        while True:
            ids = self._encoded(kept)
            if len(ids) <= room:
                return kept, ids, forgotten
            if len(kept) - first < 3:
                raise UsageError(
                    f"The message has {len(ids)} tokens.",
                    f"A context of {self.context} tokens leaves {room} for it beside the answer.",
                    "Shorten it, give a larger --context or a smaller --max-new-tokens.",
                )
            kept, forgotten = [*kept[:first], *kept[first + 2 :]], forgotten + 2

    def _reused(self, ids: torch.Tensor) -> int:
        """Cut the cache back to what it shares with ``ids``; at least the last token goes through the model."""
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
    """A conversation inside the budget; ``request.prompt`` says nothing.

    ``context``: tokens of all that is said, planned for at once; None is 4,096, or what the model was made
    for where that is less. Raises what ``generate`` raises.
    """
    with ExitStack() as stack:
        run, tokens = stack.enter_context(opened_for_chat(request, context, on_stage, on_loaded))
        if run.encodes:
            raise UnsupportedError(
                f"Cannot hold a conversation with {request.model}.", "An encoder-decoder answers a single text.",
                "Give --prompt.",
            )  # fmt: skip
        loaded = run.loaded
        cache = loaded.cache(1, tokens - request.max_new_tokens, request.max_new_tokens)
        if cache is not None:
            stack.callback(cache.remove)
        yield Conversation(run, request, tokens, cache)
