"""What each rank's tensors take on 1, 2 and 4 ranks, measured over gloo and predicted.

``python bench/ranks.py [PLOT]`` prints a table, writes JSON to ``bench_ranks.json`` in the current folder, and the
plot as SVG. With shards in RAM both are told: what is there, and what a GPU would have, which the CPU plays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from brim.processes import python_command

BATCH, SEQ, LAYERS, HIDDEN = 4, 32, 4, 64
IN_RAM = {"offload_shards": True}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero": 0}, "ZeRO-3": {"zero": 3},
    "tensors in pairs": {"tp": 2, "sequence_parallel": True, "zero": 1}, "pipeline": {"pp": 0, "micro_batch": 1},
    "interleaved": {"pp": 2, "interleave": 2, "zero": 1, "micro_batch": 1},
    "pipeline, ZeRO-3": {"pp": 2, "zero": 3, "micro_batch": 1}, "ZeRO-3, shards in RAM": {"zero": 3, **IN_RAM},
    "ZeRO-1, shards in RAM": {"zero": 1, **IN_RAM}, "tensors, shards in RAM": {"tp": 2, "zero": 3, **IN_RAM},
    "sequences": {"cp": 0, "zero": 1, "micro_batch": 1},
}  # fmt: skip


def splits(ranks: int) -> dict[str, dict[str, Any]]:
    """Each way on so many ranks; a pipeline has a stage on each. One rank splits nothing."""
    if ranks == 1:
        return {"one": {"micro_batch": 1}}
    found = {}
    for name, way in WAYS.items():
        made = {key: ranks if (key, value) in (("pp", 0), ("cp", 0)) else value for key, value in way.items()}
        found[name] = {"micro_batch": 1, **made}
    return found


def train(folder: str, output: str, ways: str) -> None:
    """On every rank, one way after the other."""
    from brim.run.ranks.request import SplitRequest
    from brim.run.ranks.train import train as run
    from brim.run.train.request import Request

    for number, (name, way) in enumerate(json.loads(ways).items()):
        split = {key: value for key, value in way.items() if key != "micro_batch"}
        training = Request(
            model=folder, data=Path(folder) / "text.txt", output=Path(output) / str(number), batch=BATCH, seq=SEQ,
            steps=4, micro_batch=way["micro_batch"],
        )  # fmt: skip
        made = run(SplitRequest(training=training, **split))
        if made is not None:
            print(json.dumps([name, made.allocated_bytes]), flush=True)
            if made.ram_bytes:
                print(json.dumps([f"{name}: RAM", made.ram_bytes]), flush=True)


def measured(ranks: int, folder: Path, output: Path) -> dict[str, list[int]]:
    words = python_command("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    words += ["--nproc-per-node", str(ranks), __file__, str(folder), str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, json.dumps(splits(ranks))], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def predicted(ranks: int, folder: Path) -> dict[str, tuple[int, ...]]:
    from brim.estimation.ranks.split import Split
    from support.rank_checks import cpu_bytes

    found = {}
    for name, way in splits(ranks).items():
        split = Split(gpus=ranks, gpus_per_node=ranks, global_batch=BATCH, **way)
        found[name] = cpu_bytes(folder, split, seq=SEQ)
        if split.offload_shards:
            found[f"{name}: RAM"] = cpu_bytes(folder, split, seq=SEQ, in_ram=True)
    return found


def main(plot: Path) -> None:
    from brim.report.line_plot import picture
    from support.tiny_model import save_llama

    rows = []
    drawn = [name for name, way in WAYS.items() if "offload_shards" not in way]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in drawn}
    with tempfile.TemporaryDirectory() as made:
        folder = save_llama(Path(made) / "llama", layers=LAYERS, hidden=HIDDEN, positions=128)
        (folder / "text.txt").write_text("a little piece of text, and another one. " * 200)
        for ranks in (1, 2, 4):
            found, said = measured(ranks, folder, Path(made) / str(ranks)), predicted(ranks, folder)
            for name, counts in found.items():
                worst, expected = max(counts), max(said[name])
                off = max(abs(p / m - 1) for p, m in zip(said[name], counts, strict=True))
                rows.append({"ranks": ranks, "way": name, "measured": counts, "predicted": said[name], "off": off})
                print(f"{ranks} {name:27} measured {worst:>12,}  predicted {expected:>12,}  largest error {off:.2%}")
                for line in drawn if name == "one" else {name}.intersection(drawn):
                    lines[line].append((ranks, worst / 1e6))
    Path("bench_ranks.json").write_text(json.dumps(rows, indent=1) + "\n")
    title = f"Tensors of the largest rank: Llama, {LAYERS} layers of {HIDDEN}, measured"
    plot.write_text(picture(title, lines, x_label="ranks", y_label="bytes", unit="MB"))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    if len(sys.argv) == 4:
        train(*sys.argv[1:])
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "ranks.svg"))
