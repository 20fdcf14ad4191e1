"""Text out of a model on disk, inside a budget, and what it took beside what was promised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from brim.core import Hardware, Plan, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import ModelError, UsageError
from brim.measure.monitor import Monitor, Usage
from brim.memory import heap
from brim.run import foreseen, plan_file
from brim.run.drives import reading_from
from brim.run.fitting import Device, budgets, machine
from brim.run.generation_inputs import Batch, batches, check, encode
from brim.run.generation_loop import Clock, Printer, check_batch, must_compare, pad_token, run_batch
from brim.run.generation_plan import Loaded, Wanted, load_for_generation
from brim.run.models import OpenedModel, open_tokenizer, prepare, verify_files
from brim.run.quantized import PRECISIONS, open_as
from brim.run.spans import ComputeSpans


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. ``prompt``: a text, or for ``generate_many`` several.

    ``chat`` None: the tokenizer's chat template where it has one. ``verify``: see verify_files. ``batch``: how many
    prompts go through the model together; "auto" is as many as fit. ``prefill_chunk``: how many tokens of a prompt
    do; "auto" is all of them, or the largest part that fits. ``precision`` None: as the weights are stored. ``plan``:
    a file of ``brim plan``, which says all of that, and the budget.
    """

    model: str | Path
    prompt: str | Sequence[str]
    vram: str | int | None = None
    ram: str | int | None = None
    device: Device = "auto"
    max_new_tokens: int = 128
    chat: bool | None = None
    batch: int | Literal["auto"] = "auto"
    prefill_chunk: int | Literal["auto"] = "auto"
    precision: str | None = None
    plan: str | Path | None = None
    trust_remote_code: bool = False
    verify: bool = False

    def check(self) -> None:
        """Raise UsageError for what cannot be meant."""
        if self.max_new_tokens < 1:
            raise UsageError(f"{self.max_new_tokens} new tokens were asked for.", "It takes one at least.")
        for option, value in (("--batch", self.batch), ("--prefill-chunk", self.prefill_chunk)):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{option} {value} was given.", "It is auto, or a number from 1 on.")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UsageError(f"--precision {self.precision} was given.", f"Known are {', '.join(PRECISIONS)}.")
        settled = {"--vram": self.vram, "--ram": self.ram, "--precision": self.precision}
        settled |= {"--batch": self.batch, "--prefill-chunk": self.prefill_chunk}
        given = [option for option, value in settled.items() if value not in (None, "auto")]
        if self.plan is not None and given:
            raise UsageError(f"A plan and {', '.join(given)} were given.", "The plan says that.", "Leave one out.")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was promised and what was measured. ``eta`` is T_bound / T_measured per token.

    ``measured_bytes["ram"]`` is the growth of the resident set's high water over the moment before loading.
    ``steady_s_per_token``, of the later half of the steps, is what ``step_s`` of the plan foresees: in the mean there
    are also the first passes, which touch memory that nobody had touched.
    """

    plan: Plan
    promised_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    s_per_token: float | None
    steady_s_per_token: float | None
    eta: float | None
    timeline: Timeline = field(compare=False)
    predicted: Timeline = field(compare=False)  # what the plan foresees, from the first measured pass on

    def figures(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_json(),
            "promised_bytes": self.promised_bytes,
            "measured_bytes": self.measured_bytes,
            "s_per_token": self.s_per_token,
            "steady_s_per_token": self.steady_s_per_token,
            "eta": self.eta,
        }


@dataclass(frozen=True, kw_only=True)
class Generation(Figures):
    """What came out of one prompt."""

    text: str
    token_ids: list[int]

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "token_ids": self.token_ids, **self.figures()}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came out of one of several prompts; ``index`` counts them from 0."""

    index: int
    prompt: str
    text: str
    token_ids: list[int]

    def to_json(self) -> dict[str, Any]:
        return {"index": self.index, "prompt": self.prompt, "text": self.text, "token_ids": self.token_ids}


@dataclass(frozen=True, kw_only=True)
class Throughput(Figures):
    """What several prompts took. ``s_per_token`` is of a step, which makes a token of each of ``batch`` sequences.

    ``tokens`` were made of all prompts together in ``seconds``, prompts' passes included and loading not.
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
    on_text: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Generate greedily inside the budget. ``on_stage`` hears what is being done, ``on_text`` each piece of text."""
    if not isinstance(request.prompt, str):
        raise UsageError("Text was to be generated from one prompt.", "Several were given.", "Use generate_many.")
    with _opened(request, [request.prompt], on_stage) as run:
        printer = Printer(run.tokenizer, on_text)
        clock = Clock(printer.put)
        token_ids = run_batch(run.loaded, next(run.batches()), request.max_new_tokens, clock)[0]
        printer.end()
    text = run.tokenizer.decode(token_ids, skip_special_tokens=True)
    return Generation(text=text, token_ids=token_ids, **run.figures(clock))


def generate_many(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Throughput:
    """Generate greedily from every prompt, several per pass of the weights. ``on_answer`` hears them in order.

    A sequence's tokens are those that it has alone, as far as a batch's sums, in another order, round alike. Where
    prompts of several lengths meet, that is tried on one of them: UnsupportedError tells of a model that cannot.
    """
    prompts = [request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
    if not prompts:
        raise UsageError("Text was to be generated from prompts.", "There are none.", "Give one at least.")
    clocks: list[Clock] = []
    tokens = 0
    seconds = 0.0
    with _opened(request, prompts, on_stage) as run:
        todo = list(run.batches())
        compared = next((batch for batch in todo if must_compare(run.loaded, batch)), None)
        for number, batch in enumerate(todo, start=1):
            on_stage(f"generating, batch {number} of {len(todo)}")
            clocks.append(Clock())
            began_s = time.perf_counter()
            processors = [run.compare(batch)] if batch is compared else []
            rows = run_batch(run.loaded, batch, request.max_new_tokens, clocks[-1], processors=processors)
            seconds += time.perf_counter() - began_s
            for offset, ids in enumerate(rows):
                index, text = batch.first + offset, run.tokenizer.decode(ids, skip_special_tokens=True)
                on_answer(Answer(index=index, prompt=prompts[index], text=text, token_ids=ids))
                tokens += len(ids) - run.encodes
    longest = max(clocks, key=lambda clock: len(clock.times_s))
    batch_size = run.loaded.choice.sizes.batch
    return Throughput(batch=batch_size, tokens=tokens, seconds=seconds, **run.figures(longest))


class _Run:
    """A model loaded for its prompts. ``usage`` is there once it is closed."""

    def __init__(
        self,
        request: Request,
        opened: OpenedModel,
        rows: list[torch.Tensor],
        tokenizer: Any,
        hardware: Hardware,
    ) -> None:
        self._request, self._opened, self._rows, self.tokenizer = request, opened, rows, tokenizer
        self._hardware = hardware
        self.usage: Usage | None = None
        self._loaded: Loaded | None = None

    @property
    def loaded(self) -> Loaded:
        assert self._loaded is not None
        return self._loaded

    @property
    def encodes(self) -> bool:
        """Whether what it gives begins with a token that nobody generated."""
        module: Any = self._opened.module
        return bool(module.config.is_encoder_decoder)

    def wanted(self) -> Wanted:
        batch, chunk = self._request.batch, self._request.prefill_chunk
        return Wanted(
            lengths=tuple(len(ids) for ids in self._rows),
            new_tokens=self._request.max_new_tokens,
            batch=None if batch == "auto" else batch,
            chunk=None if chunk == "auto" else chunk,
        )

    def batches(self) -> Iterator[Batch]:
        size, pad = self.loaded.choice.sizes.batch, pad_token(self._opened.module)
        return batches(self._rows, size, pad=pad, pad_left=not self.encodes)

    def compare(self, batch: Batch) -> Any:
        return check_batch(self.loaded, batch, self._request.max_new_tokens, self._opened.name)

    def figures(self, clock: Clock) -> dict[str, Any]:
        assert self.usage is not None, "it is not closed"
        step_s = clock.s_per_step()
        handle = self.loaded.handle
        measured = {RAM: self.usage.ram_growth_bytes, VRAM: self.usage.vram_reserved_bytes}
        promise = handle.plan.promise
        return {
            "plan": handle.plan,
            "promised_bytes": {tier: promise.peak_bytes.get(tier, 0) for tier in (VRAM, RAM)},
            "measured_bytes": {tier: measured[tier] for tier in (VRAM, RAM)},
            "s_per_token": step_s,
            "steady_s_per_token": clock.steady_s_per_step(),
            "eta": promise.bound_s / step_s if step_s else None,
            "timeline": handle.timeline(),
            "predicted": foreseen.beside(handle, self._hardware),
        }


@contextlib.contextmanager
def _opened(request: Request, prompts: Sequence[str], on_stage: Callable[[str], None]) -> Iterator[_Run]:
    """The model in force while within; what it took is known afterwards."""
    request.check()
    file = None if request.plan is None else plan_file.read(request.plan)
    precision = request.precision if file is None else file.request.precision
    on_stage("measuring this machine (once)")
    hardware = machine(request.device)
    budget = file.plan.budget_bytes if file else budgets(hardware, request.vram, request.ram, request.device)
    on_stage("opening the model")
    directory = prepare(request.model, trust_remote_code=request.trust_remote_code)
    if request.verify:
        on_stage("comparing the weights with their checksums")
        verify_files(directory)
    if precision is not None:
        on_stage("converting the weights (once)")
        _open(request, directory, precision)
    hardware = reading_from(hardware, directory)
    heap.return_freed_memory()  # what a long prompt's pass frees is counted as long as the heap keeps it
    with Monitor() as monitor:
        start_bytes = int(psutil.Process().memory_info().rss)
        opened = _open(request, directory, precision)
        _refuse_others(opened)
        if file is not None:
            plan_file.check(file, model=opened.module, hardware=hardware, task="generate")
        tokenizer = open_tokenizer(opened)
        rows = [encode(tokenizer, prompt, request.chat) for prompt in prompts]
        check(opened.module, opened.name, rows, request.max_new_tokens)
        run = _Run(request, opened, rows, tokenizer, hardware)
        on_stage("loading weights")
        fixed = file.plan if file else None
        wanted, device = run.wanted(), request.device
        run._loaded = load_for_generation(opened, hardware, budget, wanted, start_bytes, device, fixed=fixed)
        try:
            on_stage("generating")
            handle = run.loaded.handle
            with ComputeSpans(opened.module, [name for name, _ in handle.blocks], handle.memory):
                yield run
        finally:
            run.loaded.handle.close()
        run.usage = monitor.usage()


def _open(request: Request, directory: Path, precision: str | None) -> OpenedModel:
    return open_as(directory, precision, trust_remote_code=request.trust_remote_code)


def _refuse_others(opened: OpenedModel) -> None:
    module: Any = opened.module
    if not module.can_generate():
        raise ModelError(
            f"{opened.name} was to generate text.",
            f"{type(module).__name__} does not generate.",
            "Give a model that does (a causal or an encoder-decoder one), or use brim.load for this one.",
        )


__all__ = ["Answer", "Figures", "Generation", "Request", "Throughput", "generate", "generate_many"]
