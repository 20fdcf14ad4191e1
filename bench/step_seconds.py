"""Seconds of a step by roofline from this machine's probe, against the same step run here.

    python bench/step_seconds.py            eight models; appends to measurements/step_seconds_cpu.jsonl
    python bench/step_seconds.py --dry-run  one small model; nothing is kept

The fastest of some runs is taken: a machine that does other things slows a step down, never speeds it up. The probe
is measured in the same minute. Nothing of the prediction was fitted to these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.accuracy.table import summary
from support.cpu.zoo import Build, hugging_face, image, text

RECORDS = Path(__file__).resolve().parent.parent / "measurements" / "step_seconds_cpu.jsonl"
_RUNS = 5
_DECODER = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "vocab_size": 8000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA = hugging_face("LlamaForCausalLM", "LlamaConfig", **_DECODER, num_key_value_heads=4)
_BERT = hugging_face("BertForMaskedLM", "BertConfig", **_DECODER)
_GPT2 = hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=512, n_layer=4, n_head=8, vocab_size=8000)
_VIT = hugging_face("ViTForImageClassification", "ViTConfig", hidden_size=384, intermediate_size=1536,
                    num_hidden_layers=6, num_attention_heads=6, num_labels=10)  # fmt: skip
_RESNET = hugging_face("ResNetForImageClassification", "ResNetConfig", depths=[2, 2, 2, 2], layer_type="basic",
                       hidden_sizes=[64, 128, 256, 512], num_labels=10)  # fmt: skip
_CONVNEXT = hugging_face("ConvNextForImageClassification", "ConvNextConfig", num_labels=10)
CASES: dict[str, Build] = {
    "llama": text(_LLAMA, 4, 256),
    "llama-infer": text(_LLAMA, 8, 256, infer=True),
    "llama-sgd": text(_LLAMA, 1, 512, optimizer="sgd"),
    "bert": text(_BERT, 4, 256),
    "gpt2": text(_GPT2, 4, 256),
    "vit": image(_VIT, (8, 3, 224, 224)),
    "resnet18": image(_RESNET, (8, 3, 224, 224)),
    "convnext-infer": image(_CONVNEXT, (4, 3, 224, 224), infer=True),
}
SMALL: dict[str, Build] = {"llama-small": text(hugging_face("LlamaForCausalLM", "LlamaConfig", **{
    **_DECODER, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}), 2, 32)}  # fmt: skip


def main() -> None:
    options = _options()
    from brim.measure.probe import probe

    hardware = probe(refresh=not options.dry_run, device="cpu")
    rows = [measured(name, build, hardware) for name, build in (SMALL if options.dry_run else CASES).items()]
    table = Table(title=f"seconds of a step on {hardware.name}", title_justify="left")
    for column in ("case", "predicted", "measured", "error", "GFLOP"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        error = row["predicted_s"] / row["measured_s"] - 1
        table.add_row(
            row["case"], f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}", f"{error:+.1%}",
            f"{row['flops'] / 1e9:.1f}",
        )  # fmt: skip
    Console(width=100).print(table)
    told = summary([row["predicted_s"] / row["measured_s"] - 1 for row in rows])
    print({key: round(value, 4) for key, value in told.items()})
    if not options.dry_run:
        with RECORDS.open("a", encoding="utf-8") as handle:
            for row in rows:
                handle.write(json.dumps(row) + "\n")


def measured(name: str, build: Build, hardware: Any) -> dict[str, Any]:
    """One row: the roofline's seconds for the second step, and the fastest of some later ones."""
    import torch

    from brim.predict import cost
    from brim.predict.tracer import trace

    torch.manual_seed(0)
    made = trace(build, steps=2, target="cpu")
    step = build()
    for _ in range(2):
        step()
    return {
        "case": name, "predicted_s": cost.step_s(made, hardware),
        "measured_s": min(_seconds(step) for _ in range(_RUNS)),
        "flops": sum(op.flops for op in made.ops if op.step == 1), "hardware": hardware.name,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _seconds(step: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="one small model; nothing is kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
