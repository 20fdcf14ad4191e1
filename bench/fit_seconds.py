"""Fit the shares of peak rates that kernels reach (catalog/shares.json) to published and recorded seconds.

    python bench/fit_seconds.py --table FOLDER           errors with the shares of the catalog
    python bench/fit_seconds.py --table FOLDER --fit     fit two thirds of the families, print the shares and errors;
                                                         the H200's are of its measured rates, the catalog's of peaks
    ... --of-family 4                                    the most models of a family (2)

A share is of one kind of kernel on one generation of GPUs. Nothing else is fitted; no model or row has a number of
its own. A third of the families (by a hash of the name) is not fitted to; the two are printed apart. The sets: timm's
models (training on an RTX 3090, inference on an RTX 4090 and a 5090), which need timm and the published tables beside
the repository, and the runs on an H200 of measurements/gpu_truth.jsonl. FOLDER keeps the traces; the first call takes
some seconds a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from brim import catalog
from brim.core import Hardware, Trace
from brim.errors import BrimError
from brim.predict import cost
from support.accuracy import ground_truth, step_seconds
from support.accuracy.table import quantile
from support.gpu import records
from support.gpu.zoo import Case, build

H200 = "gpu_truth H200"
# Where a fit begins, and to where it is drawn where a set says little.
START = {
    "product.flops": 1.0, "convolution.flops": 0.9, "grouped.flops": 0.6, "batched.flops": 0.5,
    "depthwise.flops": 0.05, "attention.flops": 0.5, ".bytes": 0.85, "normalization.bytes": 0.5,
    "pooling.bytes": 0.4, "depthwise.bytes": 0.4, "planar.bytes": 0.5, "kernel_s": 3e-6, "dispatch_s": 17e-6,
}  # fmt: skip
_DRAWN = 0.3
_UNTRACED = (BrimError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, KeyError)
_OUTLIER = 0.25  # an error, as a logarithm, from which a row pulls less
_STEPS = 30


@dataclass(frozen=True)
class Row:
    name: str
    group: str
    held_out: bool
    step_s: float
    trace: Trace


class Model:
    """The seconds of all rows of a set as ``cost.step_s`` predicts them, for many shares quickly."""

    def __init__(self, rows: Sequence[Row], hardware: Hardware) -> None:
        bare = replace(hardware, shares={".flops": 1.0})
        self.names = [name for name in START if name != "dispatch_s"] + ["dispatch_s"]
        self.measured_s = np.array([row.step_s for row in rows])
        self._steps = []
        for row in rows:
            kinds: dict[Any, int] = {}
            order = [kinds.setdefault(replace(op, at=0, module=""), len(kinds)) for op in row.trace.ops]
            limits = np.array([cost.op_limits(op, bare) for op in kinds])
            parts = [
                (cost.share_name(op, "flops"), cost.share_name(op, "bytes"), cost.adds_up(op), cost.launches(op))
                for op in kinds
            ]
            self._steps.append((np.array(order), limits, parts))
        self._columns = {name: at for at, name in enumerate(self.names)}
        at = self._columns
        self._packed = [
            (
                order, limits[:, 0], limits[:, 1],
                np.array([at.get(flops, -1) for flops, _, _, _ in parts]),
                np.array([at.get(bytes, at[".bytes"]) for _, bytes, _, _ in parts]),
                np.array([adds for _, _, adds, _ in parts]), np.array([count for _, _, _, count in parts], float),
            )
            for order, limits, parts in self._steps
        ]  # fmt: skip

    def seconds(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shares = np.append(values, 1.0)  # the last is of kinds without a share
        kernel_s, dispatch_s = values[self._columns["kernel_s"]], values[self._columns["dispatch_s"]]
        result = []
        for order, compute, memory, flops, bytes, adds, count in self._packed:
            arithmetic, moved = compute / shares[flops], memory / shares[bytes]
            device = (np.where(adds, arithmetic + moved, np.maximum(arithmetic, moved)) + kernel_s * count)[order]
            done = np.cumsum(device)
            # A kernel starts when it was launched and the one before is done: the latest start decides.
            issued = np.cumsum(dispatch_s * count[order])
            result.append(float(np.max(issued - done + device) + done[-1]))
        return np.array(result)


def fit(model: Model, use: np.ndarray[Any, Any]) -> dict[str, float]:
    """Least squares of logarithms by Levenberg and Marquardt's method, drawn to START."""
    start = np.log([START[name] for name in model.names])

    def residuals(point: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        errors = np.log(model.seconds(np.exp(point)) / model.measured_s)[use]
        return np.concatenate([errors / (1 + (errors / _OUTLIER) ** 2) ** 0.25, _DRAWN * (point - start)])

    point, damping = start.copy(), 1e-2
    now = residuals(point)
    for _ in range(_STEPS):
        slopes = np.stack([(residuals(point + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(point))], axis=1)
        squares = slopes.T @ slopes
        while damping < 1e6:
            step = np.linalg.solve(squares + damping * np.diag(np.diag(squares) + 1e-6), -slopes.T @ now)
            then = residuals(point + np.clip(step, -0.7, 0.7))
            if then @ then < now @ now:
                point, now, damping = point + np.clip(step, -0.7, 0.7), then, max(damping / 4, 1e-6)
                break
            damping *= 4
        else:
            break
    return {name: float(f"{value:.3g}") for name, value in zip(model.names, np.exp(point), strict=True)}


def timm_rows(name: str, folder: Path, of_family: int) -> list[Row]:
    rows = []
    for measured in step_seconds.published(name, of_family):
        try:
            made = step_seconds.traced(measured, folder)
        except (
            BrimError,
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            NotImplementedError,
            KeyError,
        ) as error:
            print(f"{name} {measured.model}: not traced: {str(error)[:100]}", file=sys.stderr)
            continue
        rows.append(Row(measured.model, measured.task, measured.is_held_out, measured.step_s, made))
    return rows


def h200_rows(folder: Path) -> list[Row]:
    rows = []
    for record in records.read(records.RECORDS):
        if record.get("error"):
            continue
        case = Case.of(record["case"])
        made = step_seconds.stored(folder / f"h200-{case.name}.json", partial(_h200_trace, case, record))
        # Convolutional networks ran on a slower host: 35 us a launch would fit them, 19 us the others.
        held_out = case.family == "cnn" or step_seconds.is_held_out(case.model)
        group = "convolutional networks" if case.family == "cnn" else "others"
        rows.append(Row(case.name, group, held_out, record["measured"]["step_s"], made))
    return rows


def _h200_trace(case: Case, record: Mapping[str, Any]) -> Trace:
    steps = min(case.steps, 2)  # as many as an optimizer needs for its states
    return step_seconds.trace(lambda: build(case, "cuda"), steps=steps, capability=tuple(record["capability"]))


def show(title: str, rows: Sequence[Row], errors: Sequence[float]) -> None:
    """Median, ninth tenth and largest error of the rows that were fitted and of those held out."""
    for label, held_out in (("fitted", False), ("held out", True)):
        sizes = [abs(error) for row, error in zip(rows, errors, strict=True) if row.held_out == held_out]
        if sizes:
            middle, high = quantile(sizes, 0.5), quantile(sizes, 0.9)
            print(
                f"{title:28} {label:9} {len(sizes):4} median {middle:6.1%}  p90 {high:6.1%}  largest {max(sizes):.0%}"
            )


def main() -> None:
    options = _options()
    options.table.mkdir(parents=True, exist_ok=True)
    sets: dict[str, tuple[str, list[Row]]] = {H200: ("NVIDIA H200", h200_rows(options.table))}
    if not ground_truth.folder().exists() or not step_seconds.has_timm():
        print("timm's rows are left out: timm is not installed, or the published tables are absent.", file=sys.stderr)
    else:
        for name, (gpu, _) in step_seconds.SETS.items():
            sets[name] = (gpu, timm_rows(name, options.table, options.of_family))
    for name, (gpu, rows) in sets.items():
        hardware = catalog.gpu(gpu).hardware()
        if options.fit:
            model = Model(rows, hardware)
            values = fit(model, np.array([not row.held_out for row in rows]))
            print(json.dumps({name: values}))
            shares = {key: value for key, value in values.items() if not key.endswith("_s")}
            times = {key: value for key, value in values.items() if key.endswith("_s")}
            hardware = replace(hardware, shares=shares, **times)
        errors = [cost.step_s(row.trace, hardware) / row.step_s - 1 for row in rows]
        show(name, rows, errors)
        for group in sorted({row.group for row in rows}) if name == H200 else ():
            some = [(row, error) for row, error in zip(rows, errors, strict=True) if row.group == group]
            show(f"  {group}", [row for row, _ in some], [error for _, error in some])
        if options.rows:
            for row, error in sorted(zip(rows, errors, strict=True), key=lambda pair: pair[1]):
                print(f"    {row.name:40} {'held out' if row.held_out else '':9} {row.step_s:9.4f} s {error:+.1%}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="a folder that keeps the traces")
    parser.add_argument("--fit", action="store_true", help="fit, and print the shares")
    parser.add_argument("--rows", action="store_true", help="print the error of each row")
    parser.add_argument("--of-family", type=int, default=2, help="the most models of a family")
    return parser.parse_args()


if __name__ == "__main__":
    main()
