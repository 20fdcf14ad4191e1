"""Rehearse programs that were not written for it, unchanged: how many run, what they take, and why the others do not.

    python bench/rehearsal_programs.py --python PYTHON [--only NAME...] [--json rows.json]
    python bench/rehearsal_programs.py --real FILE       on a GPU: run them to their end, keep what each took
    python bench/rehearsal_programs.py --python PYTHON --card H200 --measured FILE       rehearse those, and compare

Programs are those that packages bring with them (the scripts of TRL and Accelerate, OpenCLIP's training) and, in
``bench/rehearsed``, what the documentation of packages shows; ``tests/scripts`` are those of `brim run`'s tests.
PYTHON is an environment with these packages (``--packages`` lists them) and a CUDA build of PyTorch, or brim fetched
one for it. Nothing is downloaded: models are made from configurations, data is made up.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.device.environment import Environment, find
from brim.device.settings import DeviceSettings
from brim.processes import python_command
from brim.units import format_bytes

HERE = Path(__file__).parent
WRITTEN, SCRIPTS = HERE / "rehearsed", HERE.parent / "tests" / "scripts"
PACKAGES = """transformers accelerate peft trl diffusers datasets sentence-transformers lightning timm kornia monai
    torchvision segmentation-models-pytorch torch_geometric x-transformers vit-pytorch denoising-diffusion-pytorch
    vector-quantize-pytorch stable-baselines3 torchrl gpytorch pyro-ppl open_clip_torch bitsandbytes deepspeed fastai
    pytorch-forecasting pytorch-tabnet pytorch-metric-learning pytorch-ignite skorch ultralytics triton
    """.split()  # noqa: SIM905
CARD = "RTX 4090"
LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program: a file, or with ``module`` a dotted name. ``arguments`` name inputs as {model}, {images}, ..."""

    name: str
    target: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # brim rehearse's own


def _written(name: str, *arguments: str, options: tuple[str, ...] = ()) -> Program:
    return Program(name=name, target=str(WRITTEN / f"{name}.py"), arguments=arguments, options=options)


def _module(name: str, target: str, *arguments: str, options: tuple[str, ...] = ()) -> Program:
    return Program(name=name, target=target, module=True, arguments=arguments, options=options)


def _trl(kind: str, data: str, *arguments: str, name: str = "") -> Program:
    common = (
        "--model_name_or_path", "{model}", "--dataset_name", f"{{{data}}}", "--output_dir", "out", "--max_steps", "6",
        "--per_device_train_batch_size", "4", "--report_to", "none", "--save_strategy", "no",
    )  # fmt: skip
    return _module(f"trl {name or kind}", f"trl.scripts.{kind}", *common, *arguments, options=("--random-weights",))


def _ranks(gpus: int, *ranks: int) -> tuple[str, ...]:
    return ("--gpus", str(gpus), "--rank", ",".join(map(str, ranks)))


_WITH_OPTIONS = {
    "accelerate_fsdp": _written("accelerate_fsdp", options=_ranks(8, 0)),
    "ddp_resnet": _written("ddp_resnet", options=_ranks(8, 0, 7)),
    "deepspeed_zero": _written("deepspeed_zero", "2", options=_ranks(8, 0)),
    "lightning_fsdp": _written("lightning_fsdp", options=_ranks(4, 0)),
    "tensor_parallel": _written("tensor_parallel", options=_ranks(16, 0, 15)),
    "trainer_deepspeed": _written("trainer_deepspeed", options=_ranks(2, 0)),
    "sentence_transformers_pairs": _written("sentence_transformers_pairs", "{model}", options=("--random-weights",)),
    "device_map_two_gpus": _written("device_map_two_gpus", "{model}", options=("--gpus", "2")),
}
_READING = {
    "denoising_diffusion": "{images}/train/first",
    "fastai_vision": "{images}/train",
    "ultralytics_detection": "{boxes}/data.yaml",
    **dict.fromkeys(
        """diffusers_pipeline generate_chat peft_methods qlora trainer_causal
        """.split(),  # noqa: SIM905
        "{model}",
    ),
}
# Of the programs of `brim run`'s tests those that use CUDA where there is one.
_OF_RUN = ("mnist", "with_accelerate", "with_diffusers", "with_trainer")


def programs() -> list[Program]:
    """All of them, each once."""
    shipped = [
        _trl("sft", "chats", "--gradient_checkpointing", "--packing", "--max_length", "128"),
        _trl("dpo", "preferences", "--beta", "0.1"),
        _trl("kto", "judged"),
        _trl("reward", "rated"),
        _trl(
            "grpo", "prompts", "--reward_funcs", "get_soft_overlong_punishment", "--num_generations", "4",
            "--max_completion_length", "16",
        ),
        _trl(
            "sft", "chats", "--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--bf16", "true",
            name="sft with LoRA",
        ),
        _module("accelerate operations", "accelerate.test_utils.scripts.test_ops"),
        _module("accelerate synchronisation", "accelerate.test_utils.scripts.test_sync"),
        _module("accelerate script", "accelerate.test_utils.scripts.test_script"),
        _module(
            "open_clip synthetic", "open_clip_train.main", "--dataset-type", "synthetic", "--train-num-samples", "64",
            "--batch-size", "8", "--precision", "amp", "--workers", "0", "--epochs", "1", "--model", "RN50",
        ),
    ]  # fmt: skip
    stage_3 = _written("deepspeed_zero", "3", options=_ranks(8, 0))
    stage_3 = Program(name="deepspeed_zero 3", target=stage_3.target, arguments=("3",), options=stage_3.options)
    own = [
        _WITH_OPTIONS.get(path.stem) or _written(path.stem, *filter(None, [_READING.get(path.stem)]))
        for path in sorted(WRITTEN.glob("[!_]*.py"))
    ]
    scripts = [Program(name=f"run's {name}", target=str(SCRIPTS / f"{name}.py")) for name in _OF_RUN]
    return [*shipped, *own, stage_3, *scripts]


def rehearsed(program: Program, python: Path, inputs: Path, folder: Path, card: str = CARD) -> dict[str, Any]:
    """What `brim rehearse` says of it, as a row. ``folder`` is where it works."""
    names = {path.name: str(path) for path in inputs.iterdir()}
    arguments = [text.format(**names) for text in program.arguments]
    target = ["-m", program.target] if program.module else [_copied(program.target, folder)]
    gpu = ["--gpu", card, f"--python={python}", "--json"]
    command = python_command("-m", "brim", "rehearse", *gpu, *program.options, *target, *arguments)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(inputs.parent / "hub")}
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            command, env={**os.environ, **offline}, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"name": program.name, "ran": False, "why": f"It did not end in {LIMIT_S} s."}
    row: dict[str, Any] = {"name": program.name, "seconds": round(time.monotonic() - begun_s, 1)}
    try:
        processes = json.loads(done.stdout)["processes"]
    except ValueError:
        return row | {"ran": False, "why": done.stderr.strip()[-600:]}
    row["ran"] = all(one["ended"] in ("finished", "enough") for one in processes)
    peaks = [device for one in processes for device in one["devices"]]
    row["allocated_bytes"] = max((one["allocated_bytes"] for one in peaks), default=0)
    row["reserved_bytes"] = max((one["reserved_bytes"] for one in peaks), default=0)
    row |= {name: max(one[name] for one in processes) for name in ("host_peak_bytes", "steps", "ended")}
    row["decided_by_made_up"] = sum(read["decides"] for one in processes for read in one["reads"])
    row["why"] = "" if row["ran"] else _reason(processes, done.stderr)
    if not row["reserved_bytes"]:
        row |= {"ran": False, "why": row["why"] or "It did not use CUDA."}
    return row


def _copied(target: str, folder: Path) -> str:
    """Programs write beside themselves."""
    copied = folder / Path(target).name
    copied.write_bytes(Path(target).read_bytes())
    return str(copied)


def _reason(processes: list[dict[str, Any]], said: str) -> str:
    message = next(one["message"] for one in processes if one["ended"] not in ("finished", "enough"))
    places = re.findall(r'File "([^"]+)", line (\d+)', said)
    return f"{message[:400]} ({places[-1][0]}:{places[-1][1]})" if places else message[:400]


def _make_inputs(environment: Environment, folder: Path) -> None:
    """With the environment's own packages, which may need a CUDA build of PyTorch to be imported."""
    folder.mkdir()
    variables = environment.variables(DeviceSettings.of(CARD))
    subprocess.run([environment.python, WRITTEN / "_inputs.py", folder], env=variables, check=True)


def told(row: dict[str, Any]) -> str:
    if not row["ran"]:
        return f"{row['name']:32} {row.get('seconds', 0):5.0f} s  did not run: {row['why']}"
    return (
        f"{row['name']:32} {row['seconds']:5.0f} s  {format_bytes(row['reserved_bytes']):>9} reserved, {row['ended']}"
        f" after {row['steps']} steps, {format_bytes(row['host_peak_bytes'])} RAM"
    )


def _wanted(program: Program, words: list[str] | None) -> bool:
    return not words or any(word in program.name for word in words)


def off(row: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """How far a rehearsal is off from what was measured."""
    if measured is None or not row["ran"]:
        return ""
    both = ("allocated", "reserved")
    return ", ".join(f"{what} {row[f'{what}_bytes'] / measured[what] - 1:+.2%}" for what in both)


def run_for_real(path: Path, words: list[str] | None) -> None:
    """The programs that need one process, to their ends; each appends a line to ``path``."""
    path = path.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / "inputs"
        inputs.mkdir()
        subprocess.run([sys.executable, WRITTEN / "_inputs.py", inputs], check=True)
        names = {entry.name: str(entry) for entry in inputs.iterdir()}
        for program in programs():
            if program.options or not _wanted(program, words):
                continue
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                target = ["-m", program.target] if program.module else [_copied(program.target, Path(folder))]
                arguments = [text.format(**names) for text in program.arguments]
                command = [sys.executable, WRITTEN / "_peak.py", path, program.name, *target, *arguments]
                offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path(scratch) / "hub")}
                ended = subprocess.run(command, cwd=folder, env={**os.environ, **offline}).returncode
            print(f"{program.name}: exit code {ended}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--only", nargs="+", help="programs whose names hold one of these words")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--card", default=CARD, help=f"as a program sees it (default: {CARD})")
    parser.add_argument("--measured", type=Path, help="what --real kept: compare")
    parser.add_argument("--real", type=Path, help="run on the GPU of this machine, and keep what each took here")
    parser.add_argument("--packages", action="store_true", help="print what PYTHON needs, and end")
    given = parser.parse_args()
    if given.packages:
        print(*PACKAGES)
        return
    if given.real:
        run_for_real(given.real, given.only)
        return
    measured: dict[str, dict[str, Any]] = {}
    if given.measured:
        lines = [json.loads(line) for line in given.measured.read_text(encoding="utf-8").splitlines()]
        measured = {line["name"]: line for line in lines if "allocated" in line}
    environment = find(given.python)
    if environment is None:
        raise SystemExit("There is no CUDA build of PyTorch: see `brim rehearse --help`.")
    rows: dict[str, dict[str, Any]] = {}
    if given.json and given.json.exists() and given.only:  # the other rows stay
        rows = {row["name"]: row for row in json.loads(given.json.read_text(encoding="utf-8"))}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = Path(scratch) / "inputs"
        _make_inputs(environment, inputs)
        for program in programs():
            if not _wanted(program, given.only) or (measured and program.name not in measured):
                continue
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                row = rows[program.name] = rehearsed(program, environment.python, inputs, Path(folder), given.card)
            print(told(row), off(row, measured.get(program.name)), flush=True)
            if given.json:
                given.json.write_text(json.dumps(list(rows.values()), indent=2) + "\n", encoding="utf-8")
    print(f"{sum(row['ran'] for row in rows.values())} of {len(rows)} run")


if __name__ == "__main__":
    main()
