"""Generate text with a model on disk, inside a budget, and compare promised with measured memory and time.

In a conversation the plan and the cache stay in force from turn to turn.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from brim.core import Plan, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.estimation.step_memory import Inputs
from brim.measure.monitor import Monitor, Usage
from brim.measure.token_clock import Clock
from brim.memory import heap
from brim.models.opening import OpenedModel, precision_of, prepare, read_tokenizer, verify_files
from brim.models.quantized import open_as
from brim.planning.inference import predicted_timeline
from brim.planning.inference.ample import AmpleStrategy
from brim.planning.inference.choose import GenerationRequest
from brim.planning.inference.machine import budgets, held_to, machine, on, within_room
from brim.planning.seconds.drives import reading_from
from brim.planning.seconds.spans import ComputeSpans
from brim.requests.generate import Request as Request
from brim.requests.sampling import cut
from brim.run.generate.inputs import Batch, batches, check, encode, encode_chat, instructed
from brim.run.generate.load import Loaded, ample_model, choose_generation, load_for_generation, place_ample
from brim.run.generate.loop import (
    CHECKED_TOKENS,
    Ending,
    Printer,
    begin_of,
    check_batch,
    must_compare,
    pad_token,
    run_batch,
    seeded,
)

if TYPE_CHECKING:
    from brim.planning.file import PlanFile

_UNPLANNED_TOKENS = 512  # new ones, up to which transformers' own cache, which grows, is as fast
DEFAULT_CONTEXT = 4096  # tokens of a conversation


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Promised and measured figures of a generation. ``eta`` is T_bound / T_measured per token.

    ``measured_bytes["ram"]`` is the growth of the resident set's high water since before loading.
    ``steady_s_per_token``, of the later half of the steps, is predicted by ``step_s`` of the plan: the mean also has
    the first passes, which touch new memory.
    """

    plan: Plan
    promised_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    s_per_token: float | None
    steady_s_per_token: float | None
    eta: float | None
    seed: int | None = None  # of sampling
    timeline: Timeline = field(compare=False)
    predicted: Timeline | None = field(compare=False)  # by the plan, from the first measured pass on
    precision: tuple[str, str] = ("", "")  # the name, and its origin

    def figures(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "promised_bytes": self.promised_bytes,
            "measured_bytes": self.measured_bytes,
            "s_per_token": self.s_per_token,
            "steady_s_per_token": self.steady_s_per_token,
            "eta": self.eta,
            "precision": self.precision[0],
            "precision_origin": self.precision[1],
        } | {
            name: value
            for name, value in (("seed", self.seed), ("exceeded", self.plan.exceeded(self.measured_bytes) or None))
            if value is not None
        }


@dataclass(frozen=True, kw_only=True)
class Generation(Figures):
    """The result of one prompt. ``text`` ends before the stop text, whose tokens ``token_ids`` includes."""

    text: str
    token_ids: list[int]

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "token_ids": self.token_ids, **self.figures()}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one of several prompts; ``index`` counts them from 0."""

    index: int
    prompt: str
    text: str
    token_ids: list[int]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Throughput(Figures):
    """The results of several prompts. ``s_per_token`` is of a step: a token for each of ``batch`` sequences.

    ``tokens`` were made for all prompts together in ``seconds``, prompts' passes included and loading not.
    """

    batch: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        made = {"tokens": self.tokens, "seconds": self.seconds, "tokens_per_s": self.tokens_per_s}
        return {"batch": self.batch, **made, **self.figures()}


def generate(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_loaded: Callable[[int, int], None] = lambda done, total: None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Generate inside the budget, greedily or as ``sampling`` says.

    ``on_stage`` hears what is being done, ``on_loaded`` how many bytes of weights have been loaded, of how many,
    ``on_text`` each piece of text.
    """
    if not isinstance(request.prompt, str):
        raise UsageError(
            "Cannot generate from several prompts.", "generate() takes a single prompt.", "Use generate_many()."
        )
    with opened_run(request, [request.prompt], on_stage, on_loaded) as run:
        printer = Printer(run.tokenizer, on_text, request.stop)
        clock = Clock(printer.put)
        with seeded(run.sampling):
            token_ids = run.generated(next(run.batches()), clock)[0]
        printer.end()
    return Generation(text=run.text(token_ids), token_ids=token_ids, seed=run.sampling.seed, **run.figures(clock))


def generate_many(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_loaded: Callable[[int, int], None] = lambda done, total: None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Throughput:
    """Generate from every prompt, several per pass of the weights. ``on_answer`` hears them in order.

    A sequence's tokens are those that it has alone, as far as a batch's sums, in another order, round alike. Where
    prompts of several lengths meet, that is tried on one of them: UnsupportedError tells of a model that cannot.
    """
    prompts = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt or ())
    if not prompts:
        raise UsageError("Cannot generate.", "There are no prompts.", "Give one or more.")
    clocks: list[Clock] = []
    tokens = 0
    seconds = 0.0
    with opened_run(request, prompts, on_stage, on_loaded) as run, seeded(run.sampling):
        todo = list(run.batches())
        compared = next((batch for batch in todo if must_compare(run.loaded, batch)), None)
        for number, batch in enumerate(todo, start=1):
            on_stage(f"generating, batch {number} of {len(todo)}")
            clocks.append(Clock())
            began_s = time.perf_counter()
            processors = [run.compare(batch)] if batch is compared else []
            if processors and run.sampling.draws:  # what is compared is what both would take greedily
                run_batch(run.loaded, batch, min(request.max_new_tokens, CHECKED_TOKENS), processors=processors)
                processors = []
            rows = run.generated(batch, clocks[-1], processors)
            seconds += time.perf_counter() - began_s
            for offset, ids in enumerate(rows):
                index, text = batch.first + offset, run.text(ids)
                on_answer(Answer(index=index, prompt=prompts[index], text=text, token_ids=ids))
                tokens += len(ids) - run.encodes
    longest = max(clocks, key=lambda clock: len(clock.times_s))
    batch_size = run.loaded.strategy.sizes.batch
    return Throughput(
        batch=batch_size, tokens=tokens, seconds=seconds, seed=run.sampling.seed, **run.figures(longest)
    )


class OpenedRun:
    """A model loaded for its prompts. ``usage`` is there once it is closed."""

    def __init__(
        self,
        request: Request,
        opened: OpenedModel,
        rows: list[torch.Tensor],
        tokenizer: Any,
        context: int | None,
    ) -> None:
        self.context = context
        self._request, self.opened, self._rows, self.tokenizer = request, opened, rows, tokenizer
        self.sampling = request.sampling.with_seed()
        self.usage: Usage | None = None
        self.precision = ("", "")
        self._loaded: Loaded | None = None

    @property
    def loaded(self) -> Loaded:
        assert self._loaded is not None
        return self._loaded

    @property
    def encodes(self) -> bool:
        """Return whether the output begins with a token that was not generated."""
        module: Any = self.opened.module
        return bool(module.config.is_encoder_decoder)

    def generation(self) -> GenerationRequest:
        batch, chunk = self._request.batch, self._request.prefill_chunk
        lengths = [len(ids) for ids in self._rows]
        if self.context is not None:
            lengths = [self.context - self._request.max_new_tokens]
        return GenerationRequest(
            lengths=tuple(lengths),
            new_tokens=self._request.max_new_tokens,
            batch=None if batch == "auto" else batch,
            chunk=None if chunk == "auto" else chunk,
            drawn=self.sampling.draws,
            continued=self.context is not None,
            host_compute=self._request.host_compute,
            graphs=self._request.cuda_graphs,
        )

    def batches(self) -> Iterator[Batch]:
        size, pad = self.loaded.strategy.sizes.batch, pad_token(self.opened.module)
        return batches(self._rows, size, pad=pad, pad_left=not self.encodes)

    def generated(self, batch: Batch, clock: Clock, processors: Sequence[Any] = ()) -> list[list[int]]:
        """The new tokens of every sequence of a batch."""
        request, begin = self._request, begin_of(self.opened.module, batch)
        ending = Ending(self.tokenizer, request.stop, begin=begin) if request.stop else None
        return run_batch(
            self.loaded,
            batch,
            request.max_new_tokens,
            clock,
            processors=processors,
            sampling=self.sampling,
            ending=ending,
        )

    def text(self, token_ids: list[int]) -> str:
        """The text of tokens, up to the first stop text."""
        return cut(self.tokenizer.decode(token_ids, skip_special_tokens=True), self._request.stop)

    def compare(self, batch: Batch) -> Any:
        return check_batch(self.loaded, batch, self._request.max_new_tokens, self.opened.name)

    def figures(self, clock: Clock) -> dict[str, Any]:
        assert self.usage is not None, "it is not closed"
        step_s = clock.s_per_step()
        handle, strategy = self.loaded.handle, self.loaded.strategy
        promise = handle.plan.promise
        return {
            "plan": handle.plan,
            "promised_bytes": {tier: promise.peak_bytes.get(tier, 0) for tier in (VRAM, RAM)},
            "measured_bytes": {VRAM: self.usage.vram_reserved_bytes, RAM: self.usage.ram_growth_bytes},
            "s_per_token": step_s,
            "steady_s_per_token": clock.steady_s_per_step(),
            "eta": promise.bound_s / step_s if step_s and promise.bound_s else None,
            "precision": self.precision,
            "timeline": handle.timeline(),
            "predicted": None if isinstance(strategy, AmpleStrategy) else predicted_timeline.beside(handle, strategy),
        }


def _read(path: str | Path) -> PlanFile:
    from brim.planning import file  # most have no plan, and start sooner without all that searches one

    return file.read(path)


@contextlib.contextmanager
def opened_run(
    request: Request,
    prompts: Sequence[str],
    on_stage: Callable[[str], None],
    on_loaded: Callable[[int, int], None],
    *,
    context: int | None = None,
) -> Iterator[OpenedRun]:
    """Yield the loaded model; its usage is known afterwards.

    ``context``: tokens of one conversation, whose turns are not known yet (there are no prompts then); 0 is the
    default.
    """
    request.check()
    file = None if request.plan is None else _read(request.plan)
    # A plan may be for the processor of a machine that has a GPU.
    named = "cpu" if file and request.device == "auto" and file.hardware.compute == RAM else request.device
    with (
        on(named) as device,
        _opened_here(replace(request, device=device), file, prompts, on_stage, on_loaded, context=context) as run,
    ):
        yield run


@contextlib.contextmanager
def _opened_here(
    request: Request,
    file: PlanFile | None,
    prompts: Sequence[str],
    on_stage: Callable[[str], None],
    on_loaded: Callable[[int, int], None],
    *,
    context: int | None,
) -> Iterator[OpenedRun]:
    precision, device = request.precision if file is None else file.request.precision, request.device
    new_tokens, trusts = request.max_new_tokens, request.trust_remote_code
    batch = len(prompts) if request.batch == "auto" else min(request.batch, len(prompts))
    on_stage("opening the model")
    directory = prepare(request.model, trust_remote_code=trusts)
    if request.verify:
        on_stage("comparing the weights with their checksums")
        verify_files(directory)
    heap.return_freed_memory()  # what a long prompt's pass frees is counted as long as the heap keeps it
    start_bytes = heap.used_resident_bytes()
    tokenizer = read_tokenizer(directory, directory.resolve().name)
    rows = [encode(tokenizer, prompt, request.chat, request.system) for prompt in prompts]
    ample = None
    if not (file or trusts or precision or request.prefill_chunk != "auto"):
        total = max(map(len, rows)) + new_tokens if rows else context or DEFAULT_CONTEXT
        inputs = Inputs(batch=max(batch, 1), prompt=max(total - new_tokens, 1), total=total)
        ample = ample_model(directory, inputs, request.vram, request.ram, device)
    if ample is None:
        on_stage("measuring this machine (once)")
        start_bytes -= heap.used_resident_bytes()  # what measuring and converting leave is not part of a later run
        hardware = machine(device)
        budget = dict(file.plan.budget_bytes) if file else budgets(hardware, request.vram, request.ram, device)
        if precision is not None:
            on_stage("converting the weights (once)")
            open_as(directory, precision, trust_remote_code=trusts)
        start_bytes += heap.used_resident_bytes()
        hardware = reading_from(hardware, directory)
        given = file is not None or request.ram is not None or request.vram is not None
        budget = within_room(budget, given=given)  # libraries and a conversion have taken some since
    else:
        hardware, budget = ample.hardware, ample.budget
    with Monitor() as monitor:
        opened = ample.open() if ample else open_as(directory, precision, trust_remote_code=trusts)
        _refuse_others(opened)
        if file is not None:
            file.check(model=opened.module, hardware=hardware, task="generate")
        check(opened.module, opened.name, rows, new_tokens)
        if context is not None:
            context = _context(opened, context, new_tokens)
        run = OpenedRun(request, opened, rows, tokenizer, context)
        name, origin = precision_of(opened, precision)
        run.precision = (name, "by the plan" if file is not None and precision is not None else origin)
        on_stage("loading weights")
        limited = held_to(budget, device)  # from before the first product, whose workspace the budget includes
        if ample:
            # Later tokens, and turns, are faster with a planned cache.
            plans_cache = not rows or new_tokens > _UNPLANNED_TOKENS
            place = partial(
                place_ample, ample, opened, start_bytes, plans_cache, on_loaded, graphs=request.cuda_graphs
            )
        else:
            fixed = file.plan if file else None
            strategy = choose_generation(opened, hardware, budget, run.generation(), start_bytes, device, fixed=fixed)
            place = partial(load_for_generation, opened, hardware, strategy, device, on_loaded)
        with limited():
            run._loaded = place()
            try:
                on_stage("generating")
                handle = run.loaded.handle
                with ComputeSpans(opened.module, [name for name, _ in handle.blocks], handle.memory):
                    yield run
            finally:
                run.loaded.handle.close()
        run.usage = replace(monitor.usage(), ram_entry_bytes=start_bytes)


def _context(opened: OpenedModel, wanted: int, new_tokens: int) -> int:
    """Tokens of a conversation. Raises UsageError for more than the model was made for, or no room for a message."""
    module: Any = opened.module
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and wanted > limit:
        raise UsageError(
            f"--context {wanted} was given.", f"{opened.name} was made for {limit} tokens.", "Give that or fewer."
        )
    context = wanted or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if new_tokens >= context:
        raise UsageError(
            f"Cannot generate {new_tokens} new tokens in a context of {context}.",
            "That leaves no room for a message.",
            "Give a larger --context or a smaller --max-new-tokens.",
        )
    return context


def _refuse_others(opened: OpenedModel) -> None:
    module: Any = opened.module
    if not module.can_generate():
        raise ModelError(
            f"Cannot generate text with {opened.name}.",
            f"{type(module).__name__} does not generate.",
            "Give a model that does (a causal or an encoder-decoder one), or use brim.load for this one.",
        )


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


@contextlib.contextmanager
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
    with contextlib.ExitStack() as stack:
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
