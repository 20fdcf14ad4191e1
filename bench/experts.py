"""Which experts to keep: hit rates of caches by use on router traces, from the latest use alone to all uses ever.

    python bench/experts.py --output measurements/experts.jsonl

Traces: what the routers of a Qwen3-MoE with random weights do while it generates (real routers, little preference),
and drawn ones: ``favourites``, fixed popularities (Zipf); ``subjects``, popularities that change every 64 tokens in
the mean; ``sticky``, uniform but with each expert of the last token kept with the probability that gives the
repetitions reported for Mixtral (Jiang et al., 2024, table 5: about a quarter of first choices, an eighth by chance).
Hit rate: the share of needed experts that are there, over the second half of a trace. ``belady`` evicts what is
needed furthest in the future, which no cache can know.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from brim.techniques.experts.router_statistics import router_statistics, simulate

HALF_LIVES = (0.05, 1.0, 4.0, 16.0, 32.0, 64.0, 256.0, 4096.0)  # the first is LRU, the last LFU
SLOT_SHARES = (0.125, 0.25, 0.5, 0.75)
Visits = Sequence[Mapping[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--output", type=Path, help="append one JSON line here")
    options = parser.parse_args()
    document = run(options.tokens, options.experts, options.chosen)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as handle:
            handle.write(json.dumps(document) + "\n")
    show(document)


def run(tokens: int, experts: int, chosen: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    traces: dict[str, list[Visits]] = {
        "random Qwen3-MoE": _of_a_model(tokens, experts, chosen),
        "favourites": [_drawn(rng, tokens, experts, chosen, change=0.0, keep=0.0, skew=1.0)],
        "subjects": [_drawn(rng, tokens, experts, chosen, change=1 / 64, keep=0.0, skew=1.0)],
        "sticky": [_drawn(rng, tokens, experts, chosen, change=0.0, keep=0.15, skew=0.0)],
    }
    rows = []
    for name, layers in traces.items():
        for share in SLOT_SHARES:
            slots = max(chosen, int(experts * share))
            rates = {str(half_life): _rate(layers, slots, half_life) for half_life in HALF_LIVES}
            best = sum(_belady(visits, slots) for visits in layers) / len(layers)
            rows.append({"trace": name, "slots": slots, "rates": rates, "belady": best})
    return {
        "benchmark": "experts",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tokens": tokens,
        "experts": experts,
        "chosen": chosen,
        "rows": rows,
        "mean": {str(h): sum(row["rates"][str(h)] for row in rows) / len(rows) for h in HALF_LIVES},
    }


def _of_a_model(tokens: int, experts: int, chosen: int) -> list[Visits]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is one of its keywords
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1000,
        num_experts=experts,
        num_experts_per_tok=chosen,
        max_position_embeddings=tokens + 16,
    )
    ids = torch.arange(8)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    found = router_statistics(Qwen3MoeForCausalLM(config).eval(), inputs, new_tokens=tokens)
    return [layer.visits for layer in found.values()]


def _drawn(
    rng: np.random.Generator, tokens: int, experts: int, chosen: int, *, change: float, keep: float, skew: float
) -> Visits:
    popularity = rng.permutation(1.0 / np.arange(1, experts + 1) ** skew)
    visits: list[Mapping[int, float]] = []
    last: list[int] = []
    for _ in range(tokens):
        if rng.random() < change:
            popularity = rng.permutation(popularity)
        kept = [expert for expert in last if rng.random() < keep]
        others = popularity.copy()
        others[kept] = 0
        drawn = rng.choice(experts, chosen - len(kept), replace=False, p=others / others.sum())
        last = [*kept, *(int(expert) for expert in drawn)]
        visits.append(dict.fromkeys(sorted(last), 1.0))
    return visits


def _rate(layers: list[Visits], slots: int, half_life: float) -> float:
    hits = needed = 0
    for visits in layers:
        found = simulate(visits, slots, half_life=half_life, skip=len(visits) // 2)
        hits, needed = hits + found[0], needed + found[1]
    return hits / needed


def _belady(visits: Visits, slots: int) -> float:
    following: dict[int, list[int]] = {}
    for number in range(len(visits) - 1, -1, -1):
        for expert in visits[number]:
            following.setdefault(expert, []).append(number)  # the next one last
    held: set[int] = set()
    hits = needed = 0
    for number, visit in enumerate(visits):
        if number >= len(visits) // 2:
            hits, needed = hits + len(held & visit.keys()), needed + len(visit)
        for expert in visit:
            following[expert].pop()
        others = sorted(held - visit.keys(), key=lambda e: following[e][-1] if following[e] else len(visits))
        held = {*visit, *others[: slots - len(visit)]}
    return hits / needed


def show(document: dict[str, Any]) -> None:
    table = Table("trace", "slots", *(f"half-life {h:g}" for h in HALF_LIVES), "belady")
    for row in document["rows"]:
        table.add_row(
            row["trace"],
            str(row["slots"]),
            *(f"{row['rates'][str(h)]:.3f}" for h in HALF_LIVES),
            f"{row['belady']:.3f}",
        )
    table.add_row("mean", "", *(f"{document['mean'][str(h)]:.4f}" for h in HALF_LIVES), "")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
