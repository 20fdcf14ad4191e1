"""Text out of a loaded model, token by token, and what it took beside what was promised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from brim.core import Plan, Timeline
from brim.core.hardware import RAM, VRAM
from brim.errors import ModelError, UsageError
from brim.measure.monitor import Monitor
from brim.run import foreseen
from brim.run.fitting import Device, budgets, machine
from brim.run.inference import load_opened
from brim.run.models import open_model, open_tokenizer, prepare, verify_files
from brim.run.spans import ComputeSpans
from brim.run.step_memory import Inputs
from brim.techniques.base import HANDLE_ATTRIBUTE
from brim.techniques.weight_streaming import WeightStreaming


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. ``chat`` None: the tokenizer's chat template where it has one. ``verify``: see verify_files."""

    model: str | Path
    prompt: str
    vram: str | int | None = None
    ram: str | int | None = None
    device: Device = "auto"
    max_new_tokens: int = 128
    chat: bool | None = None
    trust_remote_code: bool = False
    verify: bool = False


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What came out, what was promised and what was measured. ``eta`` is T_bound / T_measured per token.

    ``measured_bytes["ram"]`` is the growth of the resident set's high water over the moment before loading.
    """

    text: str
    token_ids: list[int]
    plan: Plan
    promised_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    s_per_token: float | None
    eta: float | None
    timeline: Timeline = field(compare=False)
    predicted: Timeline = field(compare=False)  # what the plan foresees, from the first measured pass on

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "plan": self.plan.to_json(),
            "promised_bytes": self.promised_bytes,
            "measured_bytes": self.measured_bytes,
            "s_per_token": self.s_per_token,
            "eta": self.eta,
        }


def generate(
    request: Request,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Generate greedily inside the budget. ``on_stage`` hears what is being done, ``on_text`` each piece of text."""
    if request.max_new_tokens < 1:
        raise UsageError(f"{request.max_new_tokens} new tokens were asked for.", "It takes one at least.")
    on_stage("measuring this machine (once)")
    hardware = machine(request.device)
    budget = budgets(hardware, request.vram, request.ram, request.device)
    on_stage("opening the model")
    directory = prepare(request.model, trust_remote_code=request.trust_remote_code)
    if request.verify:
        on_stage("comparing the weights with their checksums")
        verify_files(directory)
    with Monitor() as monitor:
        start_bytes = int(psutil.Process().memory_info().rss)
        opened = open_model(directory, trust_remote_code=request.trust_remote_code)
        if not opened.module.can_generate():  # type: ignore[operator]  # a transformers model
            raise ModelError(
                f"{opened.name} was to generate text.",
                f"{type(opened.module).__name__} does not generate.",
                "Give a model that does (a causal or an encoder-decoder one), or use brim.load for this one.",
            )
        tokenizer = open_tokenizer(opened)
        ids = _encode(tokenizer, request)
        _check_vocabulary(opened.module, opened.name, ids)
        inputs = Inputs(prompt=ids.shape[1], total=ids.shape[1] + request.max_new_tokens)
        _check_length(opened.module, opened.name, inputs)
        on_stage("loading weights")
        module = load_opened(opened, hardware, budget, inputs, start_bytes, request.device)
        handle: WeightStreaming = vars(module)[HANDLE_ATTRIBUTE]
        try:
            on_stage("generating")
            printer = _Printer(tokenizer, ids.shape[1], on_text)
            device = "cuda" if handle.memory.compute.tier == VRAM and torch.cuda.is_available() else "cpu"
            with ComputeSpans(module, [name for name, _ in handle.blocks], handle.memory):
                token_ids = _run(module, ids.to(device), request.max_new_tokens, printer)
        finally:
            handle.close()
        usage = monitor.usage()
    measured = {RAM: usage.ram_growth_bytes, VRAM: usage.vram_reserved_bytes}
    promise = handle.plan.promise
    step_s = printer.s_per_token()
    return Generation(
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
        token_ids=token_ids,
        plan=handle.plan,
        promised_bytes={tier: promise.peak_bytes.get(tier, 0) for tier in (VRAM, RAM)},
        measured_bytes={tier: measured[tier] for tier in (VRAM, RAM)},
        s_per_token=step_s,
        eta=promise.bound_s / step_s if step_s else None,
        timeline=handle.timeline(),
        predicted=foreseen.beside(handle, hardware),
    )


def _encode(tokenizer: Any, request: Request) -> torch.Tensor:
    """The prompt as token ids, shape (1, tokens)."""
    chat = bool(tokenizer.chat_template) if request.chat is None else request.chat
    if chat and not tokenizer.chat_template:
        raise UsageError(
            "The prompt was to be put into a chat template.", "This model's tokenizer has none.", "Use --no-chat."
        )
    if chat:
        messages = [{"role": "user", "content": request.prompt}]
        ids = _apply_template(tokenizer, messages)
    else:
        ids = tokenizer(request.prompt, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise UsageError("The prompt was to be generated from.", "It is empty.", "Give at least one token.")
    return ids.long()


def _apply_template(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise ModelError(
            "The prompt was to be put into the model's chat template.",
            f"The template fails: {error}.",
            "Correct it (chat_template.jinja or tokenizer_config.json), or use --no-chat.",
        ) from error
    made: torch.Tensor = ids["input_ids"]
    return made


def _check_vocabulary(module: Any, name: str, ids: torch.Tensor) -> None:
    rows = module.get_input_embeddings().num_embeddings
    if int(ids.max()) >= rows:
        raise ModelError(
            f"The prompt was to be given to {name}.",
            f"Its tokenizer makes token {int(ids.max())} of it, and the model knows {rows} tokens.",
            "Tokenizer and weights are of different models: fetch them again.",
        )


def _check_length(module: Any, name: str, inputs: Inputs) -> None:
    limit = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and inputs.total > limit:
        raise UsageError(
            f"{inputs.prompt} prompt tokens and {inputs.total - inputs.prompt} new ones were asked of {name}.",
            f"It was made for {limit} in all.",
            "Shorten the prompt or give a smaller --max-new-tokens.",
        )


def _run(module: Any, ids: torch.Tensor, count: int, printer: _Printer) -> list[int]:
    with torch.inference_mode():
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            streamer=printer,
        )
    first = 0 if module.config.is_encoder_decoder else ids.shape[1]
    return [int(token) for token in out[0][first:]]


class _Printer:
    """transformers' streamer interface: hears every token, passes on whole words, notes when they came."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._tokens: list[int] = []
        self._shown = 0
        self._times_s: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # the first call brings the prompt
            self._prompt = False
            return
        self._times_s.append(time.perf_counter())
        self._tokens += [int(token) for token in value.reshape(-1)]
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the middle of a character
            self._show(text)

    def end(self) -> None:
        self._show(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)

    def s_per_token(self) -> float | None:
        """Seconds per token after the first, which waits for the whole prompt; None for a single token."""
        if len(self._times_s) < 2:
            return None
        return (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)


__all__ = ["Generation", "Request", "generate"]
