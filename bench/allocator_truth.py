"""Random requests on PyTorch's real caching allocator, replayed event by event by brim's; recorded as exact tests.

    python bench/allocator_truth.py                      on a CUDA GPU: records under measurements/allocator_truth/
    python bench/allocator_truth.py --dry-run            the simulated allocator in the place of the real one

Every setting and seed runs in a process of its own, as PyTorch reads its settings once: requests of a realistic
mixture of sizes on two streams, tensors used on both, frees, emptied caches, and requests beyond the limit. PyTorch's
own memory history says what happened; the replay must give every address, segment and peak. A record is that history
without stacks, compressed; tests/agreement/test_allocator_truth.py replays whatever lies there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.allocator_runs import FOLDER, LIMIT_BYTES, SETTINGS, Backend, Simulated, replayed, run

_WIDTH = 120
_FIELDS = ("segments", "device_traces", "allocator_settings")


class Cuda:
    """PyTorch's allocator on the GPU, its history recorded from the first request on."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
        self.streams = (torch.cuda.default_stream(), torch.cuda.Stream())
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1 << 20)

    def malloc(self, bytes: int, stream: int) -> Any:
        try:
            with self.torch.cuda.stream(self.streams[stream]):
                return self.torch.empty(bytes, dtype=self.torch.uint8, device="cuda")
        except self.torch.OutOfMemoryError:
            return None

    def free(self, handle: Any) -> None:
        handle.set_()  # lets the storage go whoever still names the tensor

    def use(self, handle: Any, stream: int) -> None:
        with self.torch.cuda.stream(self.streams[stream]):
            handle[:1].fill_(1)  # work that the free has to wait for
        handle.record_stream(self.streams[stream])

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def dump(self) -> bytes:
        document = self.torch.cuda.memory._snapshot()
        return pickle.dumps(trimmed(document))


def trimmed(document: dict[str, Any]) -> dict[str, Any]:
    """What a replay reads, of the first device, without stacks."""
    kept = {name: document[name] for name in _FIELDS if name in document}
    kept["device_traces"] = [[_without(event) for event in kept["device_traces"][0]]]
    kept["segments"] = [
        _without(segment) | {"blocks": [_without(block) for block in segment["blocks"]]}
        for segment in kept["segments"]
        if segment.get("device", 0) == 0
    ]
    return kept


def _without(event: dict[str, Any]) -> dict[str, Any]:
    left_out = ("frames", "history", "compile_context", "user_metadata", "forward_frames")
    return {key: value for key, value in event.items() if key not in left_out}


def main() -> None:
    options = _options()
    if options.worker:
        request = json.loads(options.worker)
        backend: Backend = Simulated(request["setting"]) if request["dry_run"] else Cuda()
        data = run(backend, request["seed"], request["events"])
        Path(request["result"]).write_bytes(gzip.compress(data, mtime=0))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.dry_run else options.output
        folder.mkdir(parents=True, exist_ok=True)
        paths = [_worker(name, seed, folder, options) for name in SETTINGS for seed in range(options.seeds)]
        _show([path for path in paths if path is not None])


def _worker(name: str, seed: int, folder: Path, options: argparse.Namespace) -> Path | None:
    path = folder / f"{name}-{seed}.pickle.gz"
    request = {"setting": SETTINGS[name], "seed": seed, "events": options.events, "dry_run": options.dry_run,
               "result": str(path)}  # fmt: skip
    environment = os.environ | {"PYTORCH_ALLOC_CONF": SETTINGS[name], "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[name]}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(request)]
    done = subprocess.run(command, env=environment)
    if done.returncode:
        print(f"{path.stem}: the worker ended with {done.returncode}", file=sys.stderr)
        return None
    return path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU; nothing is kept")
    parser.add_argument("--events", type=int, default=2500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _show(paths: list[Path]) -> None:
    table = Table(title="real allocator, replayed", title_justify="left")
    for column in ("run", "allocations", "addresses", "segments", "matched", "ooms", "peak reserved", "exact", "KiB"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for path in paths:
        found = replayed(path)
        table.add_row(
            path.name.partition(".")[0], str(found.allocations), str(found.addresses_matched), str(found.segments),
            str(found.segments_matched), str(found.ooms), str(found.peak_reserved_measured_bytes >> 20),
            "yes" if found.exact else "NO", str(path.stat().st_size >> 10),
        )  # fmt: skip
    Console(width=_WIDTH).print(table)


if __name__ == "__main__":
    main()
