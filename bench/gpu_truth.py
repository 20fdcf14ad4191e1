"""Runs on a real GPU against what brim predicts for them: allocated, reserved, process, seconds, and a safe bound.

    python bench/gpu_truth.py             predict, measure, append to measurements/gpu_truth.jsonl, compare
    python bench/gpu_truth.py --predict   compare what is recorded there; needs no GPU
    python bench/gpu_truth.py --dry-run   the whole path on the CPU with tiny models; nothing is kept
    python bench/gpu_truth.py --forecast "NVIDIA H200" --predictions FILE     only predict, for a GPU that is not here
    python bench/gpu_truth.py --predictions FILE                              measure, with what was predicted before

Predictions are made first, in processes that see no GPU. Then every family runs in one fresh process, case by case:
peaks after a few steps, the median of three timed steps, and the same case again with memory capped at the predicted
upper bound. ``position`` 0 is a fresh process; later ones have more kernels loaded, so their context is larger. Cases
that the time limit leaves no room for are not recorded. One command does it all in under ten minutes on an H200; run
again it goes on with the cases that are not recorded for this GPU, driver and PyTorch (``--again``: with all). A case
that crashes or hangs is recorded as such, and the next one has a fresh process. Every record is on the disk as soon
as its case is done. bench/allocator_truth.py does the same for the allocator alone.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _gpu_supervisor import Supervisor
from brim import catalog
from support.gpu.records import RECORDS, append, predictions_of, read, show
from support.gpu.runs import Record
from support.gpu.zoo import CASES, Case, has_eight_bits

HERE = Path(__file__).resolve().parent
_CASE_LIMIT_S = {"predict": 120.0, "measure": 60.0}


def main() -> None:
    options = _options()
    if options.predict:
        recorded = read(options.output)
        show(recorded, predictions_of(recorded))
        return
    names = [name for name in CASES if re.search(options.only, name)]
    end_s = time.monotonic() + options.limit_s
    if options.forecast:
        major, minor = (catalog.gpu(options.forecast).compute_capability or "8.0").split(".")
        known = {"device": catalog.gpu(options.forecast).name}
        made = _predict_all(names, (int(major), int(minor)), known, options, end_s)
        append(options.predictions, [record | known for record in made.values()])
        return
    capability, device = _machine(options)
    if not options.again and not options.dry_run:
        names = [name for name in names if name not in done(options.output, device)]
    if options.predictions:
        before = [one for one in read(options.predictions) if one["device"] == device["device"]]
        predicted = {record["case"]["name"]: record for record in before}
    else:
        predicted = _predict_all(names, capability, device, options, end_s)
    bounds = {} if options.uncapped else predicted
    records: list[Record] = []
    for family in dict.fromkeys(CASES[name].family for name in names):

        def keep(record: Record) -> None:
            records.append(record)
            if not options.dry_run:
                append(options.output, [record])

        _work("measure", _cases(names, options, family), options, {"predicted": bounds}, end_s, keep)
    show(records, predicted)


def done(path: Path, device: Mapping[str, Any]) -> set[str]:
    """Cases that were measured on this GPU with these versions."""
    return {
        record["case"]["name"] for record in read(path)
        if not record.get("error") and all(record.get(key) == value for key, value in device.items())
    }  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="only compare what is recorded")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--only", default="", help="a regular expression of case names")
    parser.add_argument("--again", action="store_true", help="also what is recorded already")
    parser.add_argument("--forecast", metavar="GPU", help="only predict, for this GPU (its name in the catalog)")
    parser.add_argument("--predictions", type=Path, help="what --forecast writes, and measuring reads")
    parser.add_argument("--uncapped", action="store_true", help="do not run cases again in the predicted bound")
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--jobs", type=int, default=max(min((os.cpu_count() or 2) - 2, 12), 1))
    parser.add_argument("--output", type=Path, default=RECORDS)
    options = parser.parse_args()
    if options.forecast and not options.predictions:
        parser.error("--forecast needs --predictions, the file to write")
    return options


def _machine(options: argparse.Namespace) -> tuple[tuple[int, int], dict[str, Any]]:
    """The GPU's compute capability, and what a record says of where it was made."""
    if options.dry_run:
        return (8, 0), {"device": "", "torch": "", "driver": ""}
    import torch

    from brim.measure.nvml import driver_version

    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here. Use --predict for recorded runs, or --dry-run.")
    told = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "driver": driver_version()}
    return torch.cuda.get_device_capability(0), told


# -- workers --------------------------------------------------------------------------------------------------------


def _predict_all(
    names: list[str], capability: tuple[int, int], device: dict[str, Any], options: argparse.Namespace, end_s: float
) -> dict[str, Record]:
    """Predictions by name, in several processes that see no GPU."""
    request = {"capability": list(capability), "device": device["device"]}
    parts = [names[start :: options.jobs] for start in range(options.jobs)]

    def part(some: list[str]) -> list[Record]:
        return _work("predict", _cases(some, options), options, request, end_s, lambda record: None)

    with ThreadPoolExecutor(options.jobs) as pool:
        return {record["case"]["name"]: record for made in pool.map(part, parts) for record in made}


def _cases(names: list[str], options: argparse.Namespace, family: str = "") -> list[Case]:
    """These cases (of one family) as they can run here."""
    cases = [CASES[name] for name in names if family in ("", CASES[name].family)]
    if options.dry_run:
        return [case.tiny() for case in cases]
    return [case for case in cases if case.optimizer != "adamw8bit" or has_eight_bits()]


def _work(
    what: str, cases: list[Case], options: argparse.Namespace, request: dict[str, Any], end_s: float,
    told: Callable[[Record], None],
) -> list[Record]:  # fmt: skip
    environment = dict(os.environ)
    if what == "predict":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    supervisor = Supervisor(
        script=HERE / "_gpu_truth_worker.py", environment=environment, case_limit_s=_CASE_LIMIT_S[what], end_s=end_s,
        request=request | {"what": what, "device_type": "cpu" if options.dry_run else "cuda"},
    )  # fmt: skip
    return supervisor.run([asdict(case) for case in cases], told)


if __name__ == "__main__":
    main()
