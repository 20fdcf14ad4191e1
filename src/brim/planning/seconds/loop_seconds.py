"""Measure a token's seconds outside of the model's pass, in the loop of transformers' ``generate``, on this machine.

The loop is the same Python for every model: inputs are prepared, scores are copied to 32 bits and looked at, criteria
to stop are asked, a streamer hears the token. It is timed with a model that does next to nothing, whose own passes
are timed as well and taken off.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from brim.measure.probe import probe
from brim.measure.token_clock import Clock
from brim.measure.waiting import Stopwatch
from brim.model_cache import cache_input, cache_of
from brim.planning.seconds.measurement_cache import Remembered

_METHOD = 2  # raised when what is measured, or how, changes
_TOKENS, _ROUNDS = 16, 3
_SMALL = 8  # of everything but the vocabulary


def loop_seconds(vocabulary: int, batch: int) -> float:
    """Seconds of the loop for each token of ``batch`` sequences; measured once, in a fraction of a second."""
    facts = (_METHOD, probe(device="cpu").name, torch.__version__, transformers.__version__, torch.get_num_threads())
    memory, name = Remembered("loop-seconds", facts), f"{vocabulary} {batch}"
    seconds = memory.get(name, count=1)
    if seconds is None:
        seconds = [_measured(vocabulary, batch)]
        memory.keep({name: seconds})
    return seconds[0]


def _measured(vocabulary: int, batch: int) -> float:
    config = LlamaConfig(
        hidden_size=_SMALL,
        intermediate_size=_SMALL,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        model: Any = LlamaForCausalLM(config)
        model.eval()
    ids = torch.zeros(batch, _SMALL, dtype=torch.long)
    rounds = [(_generated_s(model, ids), _passed_s(model, ids)) for _ in range(_ROUNDS)]
    return max(0.0, statistics.median(generated_s - passed_s for generated_s, passed_s in rounds))


def _generated_s(model: Any, ids: torch.Tensor) -> float:
    entries, watches = 0, list[Stopwatch]()

    class Times(Clock):
        def put(self, value: torch.Tensor) -> None:
            nonlocal entries
            entries += 1
            if entries == 2:  # the first is the prompt, the second its token, which waits for the whole of it
                watches.append(Stopwatch())

    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=_TOKENS, do_sample=False, streamer=Times()
        )
    return watches[0].read_s() / (entries - 2)


def _passed_s(model: Any, ids: torch.Tensor) -> float:
    """Time the same passes without the loop."""
    with torch.inference_mode():
        output = model(ids, use_cache=True)
        token, watch = ids[:, :1], Stopwatch()
        for _ in range(_TOKENS - 1):
            output = model(token, **cache_input(model, cache_of(output)), use_cache=True, logits_to_keep=1)
        return watch.read_s() / (_TOKENS - 1)
