"""Figures in the pages are those of the rows under measurements/, which the commands beside them wrote."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.catalog.gpus import gpu_names
from brim.catalog.presets import model_names
from support import benches

ROOT = Path(__file__).parents[2]
GIB, MIB = 1 << 30, 1 << 20


def rows(name: str) -> list[Any]:
    text = (ROOT / "measurements" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("jsonl") else [json.loads(text)]


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").replace("**", "").split())


def compared() -> dict[str, Any]:
    """The comparison of all ways to stream: the row with the most of them."""
    found: dict[str, Any] = max((row["contenders"] for row in rows("streaming_cpu.jsonl")), key=len)
    return found


def spread(value: dict[str, float], form: str) -> str:
    return f"{value['median']:{form}} ({value['least']:{form}}-{value['most']:{form}})"


@pytest.mark.thorough  # nine seconds each: a step of a model of a billion parameters is traced
@pytest.mark.parametrize("name", ["README.md", "docs/ranks.md"])
def test_a_page_shows_what_its_command_prints(name: str):
    block = re.search(r"^```\n\$ brim (.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    command, *shown = block[1].splitlines()
    line = [sys.executable, "-m", "brim", *shlex.split(command)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {" ".join(line.split()) for line in shown} - {""} <= printed


def test_the_catalog_is_as_large_as_is_said():
    said = f"the catalog: {len(gpu_names())} GPUs and {len(model_names())} model configurations"
    assert said in page("README.md")


def test_the_front_page_has_the_measured_times():
    ways = compared()
    times = {name: way["steady_s_over_brim"] for name, way in ways.items()}
    said = (
        f"brim takes {ways['brim_load']['steady_s']['median']:.2f} s for a forward pass of a 6.6 GB model. "
        f"RamTorch takes {times['ramtorch_nvme']:.1f} times as long, "
        f'and `device_map="auto"` {times["transformers_auto"]:.1f} times'
    )
    assert said in page("README.md")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("all weights in RAM (6.6 GB)", "resident"),
        ("brim", "brim_load"),
        ("RamTorch `nvme_layers`", "ramtorch_nvme"),
        ('transformers `device_map="auto"`', "transformers_auto"),
        ("mmapped state dict", "mmap_state"),
        ("`accelerate.disk_offload`", "accelerate_disk"),
        ("AirLLM 4", "airllm_cpu"),
    ],
)
def test_streaming(label: str, name: str):
    seconds, text = compared()[name]["steady_s"], page("docs/benchmarks.md")
    assert f"| {label} | {spread(seconds, '.2f')} |" in text


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("plain PyTorch", "train_plain"),
        ("`torch.autograd.graph.save_on_cpu`", "train_save_on_cpu"),
        ("FSDP2 `CPUOffloadPolicy`, one rank", "train_fsdp"),
        ("RamTorch", "train_ramtorch"),
        *((f"brim train, {budget}", f"train_brim {budget}") for budget in ("3.38 GiB", "2.82 GiB", "2.22 GiB")),
        *((f"brim train, {budget}", f"train_brim {budget}") for budget in ("1.8 GiB", "1.47 GiB", "1.13 GiB")),
        *((f"brim train, {budget}", f"train_brim {budget}") for budget in ("924 MiB", "693 MiB")),
    ],
)
def test_training(label: str, name: str):
    row = rows("training_cpu.jsonl")[0]["rows"][name]
    grown = row["peak_growth_bytes"]
    size = f"{grown / MIB:.0f} MiB" if "MiB" in label else f"{grown / GIB:.2f} GiB"
    assert f"| {label} | {spread(row['tokens_per_s'], '.0f')} | {size} |" in page("docs/benchmarks.md")


def test_budgets_of_parts_of_the_model():
    ways = next(
        row["contenders"] for row in reversed(rows("streaming_cpu.jsonl")) if "limit at 25%" in row["contenders"]
    )
    parts = ("25%", "50%", "75%")
    brim, limit = (
        [f"{ways[f'{name} at {part}']['steady_s']['median']:.2f}" for part in parts] for name in ("brim", "limit")
    )
    eta = [f"{ways[f'brim at {part}']['eta']:.2f}" for part in parts]
    text = page("docs/benchmarks.md")
    assert (
        f"brim took {brim[0]}, {brim[1]} and {brim[2]} s, that limit {limit[0]}, {limit[1]} and {limit[2]} s" in text
    )
    assert f"eta was {eta[0]}, {eta[1]} and {eta[2]}" in text


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("all in RAM (6.7 GB)", "resident"),
        ("planned streaming: `brim.load`", "brim_load"),
        ("layer by layer: AirLLM's way", "airllm_cpu"),
        ("layer by layer: accelerate's disk offload", "accelerate_disk"),
        ('layer by layer: `transformers` with `device_map="auto"`', "transformers_auto"),
        ("paging: the checkpoint mapped, the kernel pages", "mmap_state"),
    ],
)
def test_ways_to_run_what_does_not_fit(label: str, name: str):
    way = compared()[name]
    seconds, read_gb = way["steady_s"]["median"], way["steady_read_bytes"] / 1e9
    text = page("docs/existing_code.md")
    assert f"| {label} | {seconds:.2f} | {f'{read_gb:.1f}' if read_gb else '0'} |" in text


def test_training_beside_others():
    document, text = rows("training_cpu.jsonl")[0], page("docs/benchmarks.md")
    fsdp, ramtorch = (document["brim_against"][name] for name in ("train_fsdp", "train_ramtorch"))
    speeds = [found["train_brim_speed_at_equal_memory"] for found in (fsdp, ramtorch)]
    memory = [found["train_brim_memory_at_equal_speed"] for found in (fsdp, ramtorch)]
    assert f"brim is {speeds[0]:.2f} times as fast as FSDP2 and {speeds[1]:.2f} times as fast as RamTorch" in text
    assert f"at equal speed it takes {memory[0]:.2f} and {memory[1]:.2f} times their memory" in text


def test_brim_fit_in_a_run_of_its_own():
    measured = rows("training_fit_cpu.jsonl")[0]["rows"]
    tokens = {name.removeprefix("train_brim_fit "): row["tokens_per_s"]["median"] for name, row in measured.items()}
    said = (
        f"made {tokens['2.31 GiB']:.0f} tokens/s at 2.31 GiB, {tokens['1.5 GiB']:.0f} at 1.5 GiB and "
        f"{tokens['944 MiB']:.0f} at 944 MiB; plain PyTorch made {tokens['train_plain']:.0f}. "
        f"The last took {measured['train_brim_fit 944 MiB']['peak_growth_bytes'] / MIB:.0f} MiB"
    )
    assert said in page("docs/benchmarks.md")


def test_plans():
    summary = benches.load("_planner_report").summarize([row for row in rows("planner_cpu.jsonl") if not row["tiny"]])
    text, lines = page("docs/benchmarks.md"), summary["rows"]
    slower = sorted(line["slower_than_best"] for line in lines if line["slower_than_best"])
    assert f"ran and measured {summary['points']} plans of three models" in text
    assert summary["problems"] == summary["over_budget"] == []
    said = f"Of {len(lines)} choices, {len(lines) - len(slower)} were the fastest measured in their budget"
    assert said in text
    assert "the others were {:.0f}, {:.0f} and {:.0f} % slower".format(*(100 * share for share in slower)) in text
    assert f"Predicted seconds were {100 * summary['error_median']:.0f} % off in the median" in text


def test_every_row_of_the_training_table_is_told():
    measured = {
        name.removeprefix("train_brim ") for name in rows("training_cpu.jsonl")[0]["rows"] if "_brim " in name
    }
    text = page("docs/benchmarks.md")
    assert all(f"| brim train, {budget} |" in text for budget in measured)


def test_xmems_published_runs():
    (found,) = rows("accuracy_xmem.json")[0]
    ours, theirs = found["summary"], found["rivals"]["xMem"]
    assert ours["rows"] == theirs["rows"] == len(found["rows"])
    said = (
        f"xMem's authors published {ours['rows']} runs on real GPUs. brim's predictions of these runs have a median "
        f"error of {ours['median']:.1%}, and xMem's own predictions one of {theirs['median']:.1%} ("
    )
    assert said.replace("%", " %") in page("README.md")
    for name, figures in {"brim": ours, "xMem": theirs}.items():
        shares = " | ".join(f"{100 * figures[key]:.2f} %" for key in ("median", "p95", "max"))
        assert f"| {name} | {figures['rows']} | {shares} |" in page("docs/accuracy.md")


def test_batches_of_prompts():
    row = rows("throughput_cpu.json")[0]
    weights, budget = row["weights_bytes"] / GIB, row["budget_bytes"] / MIB
    said = (
        f"With {weights:.2f} GiB of weights on disk and {budget:.0f} MiB of RAM, "
        f"16 prompts at once give {row['rows']['16']['times_batch_1']:.1f} times the tokens per second of one prompt"
    )
    assert said in page("docs/using.md")


def test_what_quantization_costs():
    perplexity = rows("quantization_quality.json")[0]["perplexity"]
    more = {name: 100 * (value / perplexity["fp32"] - 1) for name, value in perplexity.items()}
    assert f"rises by {more['int8']:.1f} % in int8 and {more['int4']:.0f} % in int4" in page("docs/using.md")


def test_what_a_rehearsal_takes():
    for row in rows("rehearsal_overhead.json")[0]:
        said = (
            f"| {row['model']} | {'GPU' if row['made_on'] == 'cuda' else 'CPU'} | {row['seconds']:.0f} | "
            f"{row['cpu_seconds']} | "
            f"{row['host_peak_bytes'] / MIB:.0f} MiB | {row['reserved_bytes'] / GIB:.1f} GiB |"
        )
        assert said in page("docs/rehearsal.md")


def test_programs_that_were_rehearsed():
    programs = rows("rehearsal_programs.json")[0]
    assert f"Of {len(programs)} programs, unchanged, {sum(one['ran'] for one in programs)} run" in page(
        "docs/rehearsal.md"
    )


def test_advice_that_was_followed():
    (tried,), text = rows("advice.json"), page("docs/rehearsal.md")
    out = [one for one in tried if one["ran_out"]]
    false = sum(one["said_to_fit"] is True and not one["fits"] for one in out)
    fit = sum(one["fits"] for one in out)
    said = f"{len(tried)} were tried and {len(out)} ran out: with the first advice {fit} fit"
    assert said in text and f"of those said to fit, {false} did not" in text


def test_operators_and_programs_against_the_cuda_build():
    text, operators = page("docs/accuracy.md"), rows("operators.json")[0]
    verdicts = ", ".join(f"{count:,} {what}" for what, count in sorted(operators["verdicts"].items(), key=_by_count))
    assert f"{operators['samples']:,} samples: {verdicts}" in text
    assert all(line in text for line in rows("ordinary_programs.json")[0]["summary"])


def _by_count(verdict: tuple[str, int]) -> int:
    return -verdict[1]


def test_attacks():
    text, kinds = page("docs/reliability.md"), rows("attacks.json")[0]
    assert all(f"| {one['kind']} | {one['tried']} | {one['held']} |" in text for one in kinds)
    assert f"| all | {sum(one['tried'] for one in kinds)} | {sum(one['held'] for one in kinds)} |" in text


KILLED_TRAININGS = {
    "": "everything in memory",
    " --offload-optimizer disk --offload-activations 2 --clip-norm 1": "",
    " --ranks 4 --zero 3 --batch 4": ": four ranks over gloo, killed at once",
    " --method lora": "",
}
KILLED_CACHES = {
    "generate": "`generate MODEL ROOT {}`: `brim generate --precision int8`",
    "rehearse": "`rehearse PACKAGES ROOT {}`: the device that `brim rehearse` builds",
    "rehearsal": "`rehearsal KEPT ROOT 30`: `brim rehearse` itself",
}


def test_kills():
    text, found = page("docs/reliability.md"), {row["command"]: row for row in rows("kills.json")[0]}
    told = set()
    for options, label in KILLED_TRAININGS.items():
        row = found[f"killed_trainings.py{options}"]
        told.add(row["command"])
        name = f"`{options.strip()}`{label}" if options else label
        counts = f"{row['kills']} | {row['whole']} of {row['runs']} | {row['wrong']} | {row['left_behind']}"
        assert f"| {name} | {counts} |" in text
    for kind, label in KILLED_CACHES.items():
        row = found[f"killed_caches.py {kind}"]
        told.add(row["command"])
        assert f"| {label.format(row['kills'])} | {row['kills']} | {row['whole']} of {row['runs']} |" in text
        assert row["wrong"] == row["left_behind"] == 0
    row = found["interrupted_saves.py"]
    told.add(row["command"])
    assert (
        f"DATA ROOT {row['kills']}`. All {row['whole']} runs ended with exit code 130." in text and row["wrong"] == 0
    )
    for name in ("rename", "fsync", "pwrite", "write", "mmap", "allocation"):
        row = found[f"failed_calls.py {name}"]
        told.add(row["command"])
        counts = " | ".join(str(row[key]) for key in ("calls", "failed", "refused", "finished", "wrong", "hung"))
        assert f"| {name}{' of a tensor' if name == 'allocation' else ''} | {counts} |" in text
    assert told == found.keys()


def test_fuzzing():
    text, rows_found = page("docs/reliability.md"), rows("fuzz.jsonl")
    found = [row for row in rows_found if "inputs" in row]
    for row in {row["growth"]: row for row in rows_found if "growth" in row}.values():
        assert f"| {row['growth']} | {row['bytes']:,} | {row['cpu_s']:.2f} s | {row['twice_cpu_s']:.2f} s |" in text
        assert row["linear"]
    for reader in {row["reader"] for row in found}:
        mine = [row for row in found if row["reader"] == reader]
        inputs, peak = sum(row["inputs"] for row in mine), max(row["peak_rss_mib"] for row in mine)
        assert f"| {reader} | {inputs:,} | 0 | {peak} MiB |" in text
    assert f"| all | {sum(row['inputs'] for row in found):,} | 0 | |" in text
    assert sum(row["crashes"] for row in found) == 0


def test_what_running_a_program_adds():
    found, text = rows("run_overhead_cpu.jsonl")[-1], page("docs/existing_code.md")
    for label, name in (
        ("a transformer under AdamW, ample budget", "train"),
        ("the same in 1.2 times what it takes", "tight"),
        ("forward passes of a small network, 1.2 times", "forward"),
    ):
        row = found[name]
        assert f"| {label} | {row['added_s']['median']:.2f} s | {row['step_ratio']['median']:.2f} times |" in text


def test_the_first_token():
    ratio = rows("first_token_cpu.json")[0]["ratio"]
    assert ratio <= 1.3
    fresh, text = rows("first_token_cpu.json")[0]["fresh"], " ".join(page("docs/existing_code.md").split())
    assert f"takes {ratio:.2f} times the CPU seconds" in text
    first, load = fresh["first_token"]["ratio"], fresh["load"]["ratio"]
    assert first <= 1.3 >= load
    assert f"takes {first:.2f} times as long, and `brim.load` {load:.2f} times as long as" in text


def test_help_and_mistakes_take_less_than_a_third_of_a_second():
    """Of a processor: they wait for nothing but, on a busy machine, for other programs."""
    found = rows("first_token_cpu.json")[0]["start_up"]["rows"]
    assert {"--help", "a model that is not there"} <= found.keys()
    assert all(row["cpu_s"] <= 0.3 for row in found.values())


def test_explaining_a_large_recording():
    found = {(row["contender"], row["input"]): row for row in rows("explain_cpu.jsonl") if row["events"] == 5_000_000}
    ours, theirs = found["brim explain --html", "pickle"], found["_memory_viz trace_plot", "pickle"]
    said = (
        f"a page of {ours['output_bytes'] / MIB:.1f} MiB in {ours['peak_rss_bytes'] / GIB:.1f} GiB of RAM and "
        f"{ours['cpu_s']:.0f} s of a core, "
        f"where PyTorch's `trace_plot` writes {theirs['output_bytes'] / 1e9:.1f} GB in "
        f"{theirs['peak_rss_bytes'] / GIB:.1f} GiB and {theirs['wall_s']:.0f} s"
    )
    assert said in page("docs/benchmarks.md")


def test_what_was_promised_on_a_gpu_is_as_measured():
    cases = {row["case"]: row for row in rows("promises_gpu.jsonl")}
    ram, disk = cases["from_ram"], cases["from_disk"]
    assert f"| from RAM | {ram['promised_s'] * 1e3:.1f} ms | {ram['forward_s'] * 1e3:.1f} ms |" in page(
        "docs/benchmarks.md"
    )
    said = f"| {disk['promised_s'] * 1e3:,.0f} ms | {disk['forward_s'] * 1e3:,.0f} ms |"
    assert said in page("docs/benchmarks.md")
    reserved, promised = disk["reserved_bytes"], disk["promised_bytes"]["vram"]
    assert f"| {reserved / GIB:.2f} of {promised / GIB:.2f} GiB |" in page("docs/benchmarks.md")
    assert f"exceeded its promise by {(reserved - promised) / MIB:.0f} MiB" in page("docs/benchmarks.md")
    assert ram["reserved_bytes"] == ram["promised_bytes"]["vram"]
    assert ram["logits_equal"] and disk["logits_equal"]
