"""Generate tokens with a planned model, batch by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from brim.errors import UnsupportedError
from brim.measure.token_clock import Clock
from brim.model_cache import cache_input
from brim.requests.sampling import GREEDY, Sampling, cut, withheld
from brim.run.generate.inputs import Batch
from brim.run.generate.load import Loaded

# A batch sums in another order than a single sequence. Rounding changes scores far less than padding that is attended
# to, whose effect is as large as their spread.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.1
CHECKED_TOKENS = 2  # the prompt's pass, and the first pass that uses the cache
_WHOLE_PROMPT = ("repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty")


@dataclass(eq=False)
class Printer:
    """Receives the tokens of a sequence and passes on full words, up to the first of ``stops``."""

    _tokenizer: Any
    _on_text: Callable[[str], None]
    _stops: Sequence[str] = ()
    _tokens: list[int] = field(default_factory=list)
    _shown: int = 0

    def put(self, tokens: torch.Tensor) -> None:
        self._tokens += [int(token) for token in tokens]
        text = self._text()
        if not text.endswith("\ufffd"):  # an incomplete character
            self._show(text[: len(text) - withheld(text, self._stops)])

    def end(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return cut(text, self._stops)

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._on_text(text[self._shown :])
            self._shown = len(text)


@contextmanager
def seeded(sampling: Sampling) -> Iterator[None]:
    """Draw with ``sampling.seed`` while the context is open; the program's own generators are restored afterwards."""
    if not sampling.draws:
        yield
        return
    assert sampling.seed is not None, "with_seed has set it"
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        yield


class Ending(StoppingCriteria):
    """Ends each sequence whose new text has one of ``stops``, and all sequences when ``stopped()`` is True.

    ``begin``: number of tokens before the first new one. ``lengths``: row -> number of its new tokens, for rows that
    ended so; later tokens of these rows belong to no text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], stopped: Callable[[], bool] = lambda: False, *, begin: int
    ) -> None:
        self._tokenizer, self._stops, self._stopped, self._begin = tokenizer, tuple(stops), stopped, begin
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **_: Any) -> Any:
        rows = input_ids[:, self._begin :].tolist()
        if self._stops:
            for row, tokens in enumerate(rows):
                if row not in self.lengths and self._ends(tokens):
                    self.lengths[row] = len(tokens)
        if self._stopped():
            for row, tokens in enumerate(rows):
                self.lengths.setdefault(row, len(tokens))
        done = [row in self.lengths for row in range(len(rows))]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)

    def _ends(self, tokens: list[int]) -> bool:
        texts = (self._tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (True, False))
        return any(stop in text for text in texts for stop in self._stops)


def run_batch(
    loaded: Loaded,
    batch: Batch,
    new_tokens: int,
    clock: Clock | None = None,
    *,
    processors: Any = (),
    sampling: Sampling = GREEDY,
    ending: Ending | None = None,
    cache: Any = None,
) -> list[list[int]]:
    """The new tokens of every sequence, each up to its end. Sequences that have ended are masked until all have.

    ``cache``: a planned cache to continue from; None creates one, and frees it at the end. Tokens are drawn by
    torch's own generators (``seeded``).
    """
    module: Any = loaded.module
    count, longest = batch.ids.shape
    device = loaded.handle.memory.device
    chunk = loaded.strategy.sizes.chunk
    options: dict[str, Any] = {"prefill_chunk_size": chunk} if chunk < longest else {}
    if count > 1:
        options["pad_token_id"] = pad_token(module)
    options |= sampling.options(module.generation_config)
    if ending is not None:
        options["stopping_criteria"] = StoppingCriteriaList([ending])
    cache_context: AbstractContextManager[dict[str, Any]] = _cache(loaded, count, longest, new_tokens)
    if cache is not None:
        cache_context = nullcontext(cache_input(module, cache) | {"use_cache": True})
    turn = loaded.handle.turns.lock  # the cache's buffers serve a single batch at a time
    with turn, cache_context as state, torch.inference_mode():
        out = module.generate(
            batch.ids.to(device),
            attention_mask=batch.mask.to(device),
            max_new_tokens=new_tokens,
            num_beams=1,
            num_return_sequences=1,
            cache_implementation=None,
            return_dict_in_generate=False,
            streamer=clock,
            logits_processor=LogitsProcessorList(processors),
            **options,
            **state,
        )
    ends = _ends(module)
    lengths = ending.lengths if ending is not None else {}
    begin = begin_of(module, batch)
    continuations = [_until_end(row[begin:].tolist()[: lengths.get(index)], ends) for index, row in enumerate(out)]
    if module.config.is_encoder_decoder:  # the first output token may be an end token
        return [[int(row[0]), *tokens] for row, tokens in zip(out, continuations, strict=True)]
    return continuations


def begin_of(module: Any, batch: Batch) -> int:
    """Number of tokens before the first generated one in the result of ``generate``."""
    return 1 if module.config.is_encoder_decoder else batch.ids.shape[1]


@contextmanager
def _cache(loaded: Loaded, count: int, longest: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    cache = loaded.cache(count, longest, new_tokens)
    if cache is None:
        yield {}
        return
    try:
        yield cache_input(loaded.module, cache) | {"use_cache": True}
    finally:
        cache.remove()


def _ends(module: Any) -> set[int]:
    ends = module.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


def pad_token(module: Any) -> int:
    """Token that fills up ended sequences. It is masked: any token would do."""
    config = module.generation_config
    return int(config.pad_token_id if config.pad_token_id is not None else min(_ends(module), default=0))


# -- sequences that may share a batch


def must_compare(loaded: Loaded, batch: Batch) -> bool:
    """True if only a comparison shows whether a sequence's tokens depend on the others in its batch.

    Attention treats each sequence by itself, except for padding; about other states nothing is known.
    """
    shape = loaded.strategy.shape
    return len(batch.ids) > 1 and (batch.padded or shape is None or not shape.only_attention)


def check_batch(loaded: Loaded, batch: Batch, new_tokens: int, name: str) -> Any:
    """Generate the most padded sequence of ``batch`` alone; returns a processor that compares the batch with it.

    A model may let padding into its states, count it as positions, or have no mask: its configuration does not say
    so, two passes show it. Raises UnsupportedError if the model's interface rules it out already.
    """
    if batch.padded:
        _refuse_unmasked(loaded.module, name)
    row = int(batch.mask.sum(1).argmin())
    ids = batch.ids[row][batch.mask[row].bool()][None]
    recorded = _RecordedScores()
    alone = Batch(first=row, ids=ids, mask=torch.ones_like(ids))
    run_batch(loaded, alone, min(new_tokens, CHECKED_TOKENS), processors=[recorded])
    # Scores are float32 in every model; kernels for quantized weights round as bfloat16 does.
    tolerance = max((_TOLERANCE.get(p.dtype, _HALF_TOLERANCE) for p in loaded.module.parameters()), default=1e-3)
    return _ComparedScores(row, recorded.scores, name, tolerance)


def _refuse_unmasked(module: Any, name: str) -> None:
    takes = inspect.signature(module.forward).parameters
    config = module.generation_config
    reading = [key for key in _WHOLE_PROMPT if getattr(config, key, None) not in (None, 0, 1, 1.0)]
    if "attention_mask" not in takes:
        raise _not_batchable(
            name, f"{type(module).__name__} takes no attention mask, so the model would read padding as text."
        )
    if reading:
        raise _not_batchable(
            name, f"Its generation config sets {', '.join(reading)}, which would count padding as text."
        )


def _not_batchable(name: str, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot process several prompts with {name} together.", problem, "Give --batch 1, or prompts of one length."
    )


class _RecordedScores(LogitsProcessor):
    """Records the first scores of a sequence and changes nothing."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(self.scores) < CHECKED_TOKENS:
            self.scores.append(scores[0].float().cpu().clone())
        return scores


class _ComparedScores(LogitsProcessor):
    """Compares the first scores of a sequence in its batch with its scores alone."""

    def __init__(self, row: int, alone: list[torch.Tensor], name: str, tolerance: float) -> None:
        self._row, self._alone, self._name, self._tolerance = row, list(alone), name, tolerance

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._alone:
            expected, actual = self._alone.pop(0), scores[self._row].float().cpu()
            finite = expected.isfinite()
            if not bool(actual[finite].isfinite().all()):
                raise _not_batchable(self._name, "Padding makes its logits infinite or NaN.")
            spread = float(expected[finite].std(correction=0)) if bool(finite.any()) else 0.0
            off = float((expected - actual)[finite].abs().max()) / max(spread, 1e-30) if spread else 0.0
            if off > self._tolerance:
                raise _not_batchable(
                    self._name, f"Batching changes its results: logits differ by {off:.2g} standard deviations."
                )
        return scores
