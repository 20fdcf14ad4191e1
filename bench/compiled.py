"""Time a compiled model whose weights all stay in memory, fitted and not.

    python bench/compiled.py [--pairs 60]

A Llama of 8 layers by Inductor on the CPU, 128 tokens. The two take turns in one process, each first in every other
pair; the first five pairs do not count. Medians and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import brim
from brim.units import format_seconds

_WARM_UP = 5


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
                                        num_attention_heads=8, vocab_size=2000)).eval()  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    inputs = {"input_ids": torch.arange(128)[None], "use_cache": False}
    alone, fitted = model(), model()
    brim.fit(fitted, ram="8GiB", device="cpu", example=inputs)
    runs = {"alone": torch.compile(alone), "fitted": torch.compile(fitted)}
    torch.testing.assert_close(runs["alone"](**inputs).logits, runs["fitted"](**inputs).logits)
    took_s: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(options.pairs + _WARM_UP):
        for name in runs if pair % 2 else reversed(runs):
            start = time.perf_counter()
            runs[name](**inputs)
            took_s[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds[_WARM_UP:]) for name, seconds in took_s.items()}
    print(", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in medians.items()))
    print(f"fitted / alone: {medians['fitted'] / medians['alone']:.3f}")


if __name__ == "__main__":
    main()
