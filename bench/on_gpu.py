"""All that only a GPU can show, in an unknown number of minutes: stages in the order of their worth, resumable.

    python bench/on_gpu.py --limit-s 560 --output measurements/h200
    python bench/on_gpu.py --tiny --output /tmp/rehearsal          every stage as small as it goes, without a GPU

What needs no quiet GPU (writing checkpoints, GPU tests, predicted and measured memory) runs side by side first; then
one stage after another. Each has a limit of its own, its log in DIR/NAME.log and its rows in DIR/NAME.jsonl as soon
as they are there; DIR/NAME.json says how it ended. The same command again runs what has not ended well. At the end
there is a table of figures, each beside its bound, its peer and its promise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from brim.processes import python_command

HERE = Path(__file__).resolve().parent
LEAST_S = 3  # no stage begins with less
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value, and in the same unit what bounds it, what its peer takes and what was promised."""

    name: str
    value: float | None
    unit: str
    bound: float | None = None
    peer: float | None = None
    promise: float | None = None


def _of_training(rows: Rows) -> Iterator[Figure]:
    for document in rows:
        for label, row in document["rows"].items():
            rival = document["rows"].get(
                label.replace("brim_cpu", "brim").replace("brim", "in_vram").replace("streamed", "resident"), {}
            )
            if rival is not row and "step_s" in row:
                promise_s = row.get("promised_s")
                yield Figure(
                    name=f"{document['case']}, {label}", value=row["step_s"], unit="s a step",
                    peer=rival.get("step_s"), promise=promise_s,
                )  # fmt: skip


def _of_generation(rows: Rows) -> Iterator[Figure]:
    for document in rows:
        for memory in ("resident", "budget"):
            own, peer = (document["rows"].get(f"{name} {memory}", {}) for name in ("brim", "transformers"))
            if "load_s" in own:
                promised = (own["promised_bytes"] or {}).get("vram")
                yield Figure(
                    name=f"token, {memory}", value=own["token_s"], unit="s", peer=peer.get("token_s"),
                    bound=document["bounds_s"].get(memory),
                )  # fmt: skip
                yield Figure(name=f"load, {memory}", value=own["load_s"], unit="s", peer=peer.get("load_s"))
                yield Figure(name=f"VRAM, {memory}", value=own["reserved_bytes"], unit="bytes", promise=promised)


def _of_streaming(rows: Rows) -> Iterator[Figure]:
    for document in rows:
        medians = {label: row["forward_s"]["median"] for label, row in document["rows"].items() if "forward_s" in row}
        for workload in ("decode", "prefill"):
            peers = [s for label, s in medians.items() if label.startswith(workload) and not label.endswith(
                ("gpu_brim", "gpu_resident"))]  # fmt: skip
            least_bytes = document["weights_bytes"] - document["budget_bytes"]
            bound_s = max(medians.get(f"{workload}/gpu_resident", 0.0), least_bytes / document["h2d_bytes_per_s"])
            if f"{workload}/gpu_brim" in medians:
                yield Figure(
                    name=f"streamed {workload}", value=medians[f"{workload}/gpu_brim"], unit="s a forward",
                    bound=bound_s, peer=min(peers, default=None),
                )  # fmt: skip


def _of_hybrid(rows: Rows) -> Iterator[Figure]:
    for document in rows:
        medians = {name: row["forward_s"]["median"] for name, row in document["rows"].items()}
        alone_s = [medians.pop(name) for name in ("streaming", "cpu")]
        yield Figure(
            name="CPU and GPU at once", value=min(medians.values()), unit="s a forward", bound=document["bound_s"],
            peer=min(alone_s),
        )  # fmt: skip


def _of_pipelines(rows: Rows) -> Iterator[Figure]:
    for document in rows:
        for name, ways in document.items():
            peers = [row["picture_s"] for way, row in ways.items() if "offload" in way and "picture_s" in row
                     and "brim" not in way]  # fmt: skip
            own_s = ways.get("brim", {}).get("picture_s")
            bound_s = ways.get("resident", {}).get("picture_s")
            yield Figure(
                name=f"{name} in 40 %", value=own_s, unit="s a picture", bound=bound_s, peer=min(peers, default=None)
            )


def _of_kernels(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        yield Figure(name=f"kernels, {row['kernel']}", value=row["share"], unit="of the peak", promise=row["catalog"])


def _nothing(_: Rows) -> Iterator[Figure]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command, its seconds at most, and its figures. ``quiet``: it wants the GPU for itself.

    ``{output}`` is the file of its rows, ``{directory}`` where weights are. ``tiny`` are other arguments for a run
    without a GPU; None: it is left out there.
    """

    name: str
    command: tuple[str, ...]
    tiny: tuple[str, ...] | None
    limit_s: float = 100.0
    quiet: bool = True
    figures: Callable[[Rows], Iterator[Figure]] = _nothing


def _bench(script: str, *options: str) -> tuple[str, ...]:
    return str(HERE / script), *options, "--output", "{output}"


def _training(*options: str) -> tuple[str, ...]:
    return _bench("training_gpu.py", "--directory", "{directory}", *options)


_TINY = ("--device", "cpu", "--tiny", "--rounds", "1")
_TESTS = ("-m", "pytest", "-p", "no:benchmark", "-q", "-m", "gpu and not slow", str(HERE.parent / "tests" / "gpu"))
STAGES = (
    Stage(
        name="checkpoints",
        command=(__file__, "--write-checkpoints", "{directory}"),
        tiny=(__file__, "--write-checkpoints", "{directory}", "--tiny"),
        quiet=False,
    ),
    Stage(name="tests", command=_TESTS, tiny=None, quiet=False),
    Stage(
        name="memory",
        command=_bench("gpu_truth.py", "--limit-s", "95", "--jobs", "4"),
        tiny=_bench("gpu_truth.py", "--dry-run", "--only", "^resnet-infer$"),
        quiet=False,
    ),
    Stage(
        name="kernel-classes",
        command=(__file__, "--measure-kernels", "{output}"),
        tiny=(__file__, "--measure-kernels", "{output}", "--tiny"),
        figures=_of_kernels,
    ),
    Stage(
        name="adam",
        command=_training("--cases", "adam", "--batches", "8", "32", "--rounds", "1"),
        tiny=_training("--cases", "adam", "--steps", "2", *_TINY),
        figures=_of_training,
    ),
    Stage(
        name="lora",
        command=_training("--cases", "lora", "--rounds", "1", "--steps", "4"),
        tiny=None,
        figures=_of_training,
    ),
    Stage(
        name="generation",
        command=_bench("generation_gpu.py", "--directory", "{directory}", "--rounds", "1"),
        tiny=_bench("generation_gpu.py", "--directory", "{directory}", *_TINY),
        figures=_of_generation,
    ),
    Stage(
        name="decode",
        command=_bench(
            "streaming_gpu.py", "--workloads", "decode", "--layers", "10", "--vram", "3GiB", "--rounds", "1"
        ),
        tiny=_bench("streaming_gpu.py", "--workloads", "decode", "--only", "gpu_accelerate", *_TINY),
        figures=_of_streaming,
    ),
    Stage(
        name="prefill",
        command=_bench(
            "streaming_gpu.py", "--workloads", "prefill", "--layers", "10", "--vram", "3GiB", "--rounds", "1"
        ),
        tiny=None,
        figures=_of_streaming,
    ),
    Stage(
        name="pipelines",
        command=(str(HERE / "pipelines.py"), "--only", "sdxl", "--rounds", "1", "--json", "{output}"),
        tiny=None,
        figures=_of_pipelines,
    ),
    Stage(
        name="activations",
        command=_training("--cases", "activations", "--rounds", "2"),
        tiny=None,
    ),
    Stage(
        name="hybrid",
        command=_bench("hybrid_gpu.py", "--rounds", "2"),
        tiny=_bench("hybrid_gpu.py", "--device", "emulated", "--tiny", "--rounds", "1"),
        figures=_of_hybrid,
    ),
    Stage(name="unified", command=_bench("unified_gpu.py", "--rounds", "1"), tiny=None),
    Stage(
        name="full",
        command=_training("--cases", "full", "--rounds", "1", "--steps", "3"),
        tiny=None,
        figures=_of_training,
    ),
)


class Running:
    """A stage's process, in a group of its own, so that its end ends what it started."""

    def __init__(self, stage: Stage, arguments: tuple[str, ...], folder: Path, limit_s: float) -> None:
        self._stage, self._folder = stage, folder
        self._begin_s = time.monotonic()
        self._limit_s = limit_s
        (folder / f"{stage.name}.jsonl").unlink(missing_ok=True)
        with (folder / f"{stage.name}.log").open("w") as log:
            self._process = subprocess.Popen(
                python_command(*arguments), stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Wait for the end, or end it at its limit, and write how it ended."""
        state = "cut"
        try:
            code = self._process.wait(max(self._limit_s - (time.monotonic() - self._begin_s), 0))
            state = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        document = {"state": state, "took_s": time.monotonic() - self._begin_s, "code": self._process.returncode}
        (self._folder / f"{self._stage.name}.json").write_text(json.dumps(document) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {self._stage.name}: {state} after {document['took_s']:.0f} s", flush=True)


def run(options: argparse.Namespace) -> None:
    """Run the stages that have not ended well, as long as there is time."""
    end_s = time.monotonic() + options.limit_s
    chosen = [
        stage for stage in STAGES if stage.name in options.only and (stage.tiny is not None or not options.tiny)
    ]
    left = [stage for stage in chosen if _state(options.output, stage.name) != "done"]

    def begin(stage: Stage) -> Running | None:
        limit_s = min(stage.limit_s, end_s - time.monotonic())
        if limit_s < min(LEAST_S, stage.limit_s):
            print(f"{stage.name}: no time left", flush=True)
            return None
        arguments = stage.tiny if options.tiny and stage.tiny is not None else stage.command
        places = {"output": options.output / f"{stage.name}.jsonl", "directory": options.directory}
        return Running(stage, tuple(word.format(**places) for word in arguments), options.output, limit_s)

    for running in [begin(stage) for stage in left if not stage.quiet]:
        if running is not None:
            running.wait()
    for stage in left:
        if stage.quiet and (quiet := begin(stage)) is not None:
            quiet.wait()


def _state(folder: Path, name: str) -> str:
    file = folder / f"{name}.json"
    return str(json.loads(file.read_text())["state"]) if file.exists() else "not run"


def _rows(file: Path) -> Rows:
    if not file.exists():
        return []
    return [json.loads(line) for line in _documents(file.read_text())]


def _documents(text: str) -> list[str]:
    """Return JSON documents: one in each line, or one over several lines."""
    return [text] if text.startswith("{\n") else [line for line in text.splitlines() if line.strip()]


def show(folder: Path) -> None:
    """Print the table of figures, and how each stage ended."""
    table = Table("figure", "measured", "bound", "peer", "promised", "")
    for stage in STAGES:
        for figure in stage.figures(_rows(folder / f"{stage.name}.jsonl")):
            values = (figure.value, figure.bound, figure.peer, figure.promise)
            table.add_row(figure.name, *("-" if value is None else f"{value:,.4g}" for value in values), figure.unit)
    console = Console(width=120)
    console.print(table)
    console.print(", ".join(f"{stage.name} {_state(folder, stage.name)}" for stage in STAGES))


def write_checkpoints(directory: Path, *, tiny: bool) -> None:
    """Write the weights of the training and generation stages, where they are not yet."""
    import _gpu_checkpoint
    from training_gpu import SHAPES, TINY

    for size, shape in {"tiny": TINY}.items() if tiny else ((name, SHAPES[name]) for name in ("3B", "7B")):
        _gpu_checkpoint.write_bf16(directory / f"llama-bf16-{size}", shape)


def measure_kernels(output: Path, *, tiny: bool) -> None:
    """Write which share of the vendor's peaks each class of kernels reaches, measured as by ``brim probe``, and which
    the catalog has for this GPU."""
    import torch

    from brim import accelerator, catalog
    from brim.core.hardware import Hardware
    from brim.measure import device_rates

    if tiny:
        on = accelerator.Accelerator(type="cpu", module=torch.cpu, device=torch.device("cpu"))
        card, bytes_per_s, rates = catalog.gpu("H200"), 1e10, {"float16": 1e10, "float32": 1e10}
    else:
        on = accelerator.available(accelerator.CUDA)
        card = catalog.gpu(on.name)
        device_rates.warm_clocks(on)
        bytes_per_s, rates = device_rates.vram_read_rate(on), device_rates.matrix_rates(on)
    peaks, known = card.hardware(measured=False), card.hardware()
    shares = device_rates.kernel_shares(on, rates, bytes_per_s)
    tiers = (replace(known.tiers[0], bytes_per_s=bytes_per_s),)
    measured = replace(known, tiers=tiers, flops_per_s=rates, shares=shares)

    def rate(hardware: Hardware, kernel: str) -> float:
        of_products = hardware.flops_per_s["float32" if kernel.startswith("depthwise") else "float16"]
        return hardware.share(kernel) * (hardware.tiers[0].bytes_per_s if kernel.endswith("bytes") else of_products)

    with output.open("w") as file:
        for kernel in shares:
            own, theirs = (rate(hardware, kernel) / rate(peaks, kernel) for hardware in (measured, known))
            row = {"gpu": card.name, "kernel": kernel, "share": own, "catalog": theirs, "ratio": own / theirs}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "brim" / "bench"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=560.0, help="seconds for all stages")
    parser.add_argument("--output", type=Path, default=Path("measurements/on_gpu"), help="folder of the results")
    parser.add_argument("--directory", type=Path, default=cache, help="where weights go")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--tiny", action="store_true", help="as small as it goes, without a GPU")
    parser.add_argument("--write-checkpoints", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-kernels", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_checkpoints:
        write_checkpoints(options.write_checkpoints, tiny=options.tiny)
        return
    if options.measure_kernels:
        measure_kernels(options.measure_kernels, tiny=options.tiny)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    options.directory.mkdir(parents=True, exist_ok=True)
    run(options)
    show(options.output)


if __name__ == "__main__":
    main()
