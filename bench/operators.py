"""Samples of PyTorch's operators (OpInfo's, with their gradients), traced in one process and on the rehearsal device.

    python bench/operators.py --python VENV/bin/python --output measurements/operators.json
    python bench/operators.py --python VENV/bin/python --most 5 sort topk     # some, more of each

A sample is exact where both allocate as much at the peak, blocks of 512 bytes and libraries' workspaces included. The
rehearsal device does not compute: operators of which a sample is not exact are run once more with values, which the
CPU computes, without the temporaries of kernels that count and sort. By values: what neither run can tell, as sizes
hang on what a device computes. Refused is right only with a BrimError that names a line. A process that ends is begun
again behind the sample that ended it, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brim.device.environment import find
from brim.device.settings import DeviceSettings
from brim.rehearsal import force

CARD = "H100"
LAYOUTS = ("plain", "transposed", "cut", "channels-last")  # cut: out of rows that are longer
# Their outputs are as long as there are values that fit: the rehearsal device finds none.
_BY_VALUES = {
    "argwhere", "combinations", "index_put", "masked_scatter", "masked_select", "nonzero", "nonzero_static",
    "repeat_interleave", "unique", "unique_consecutive", "where",
}  # fmt: skip
_NOT_TOLD = ("off", "not on the device", "by values")


def run(
    how: str, python: str, variables: dict[str, str], options: argparse.Namespace, names: list[str]
) -> Iterator[dict[str, Any]]:
    """What the worker says of each sample, in processes as many as it takes."""
    kind = [options.layout, "half" if options.half else "first", str(options.rows)]
    worker, begin = str(Path(__file__).with_name("_operators_worker.py")), 0
    while True:
        command = [python, worker, how, str(options.most), str(begin), *kind, *names]
        current: dict[str, Any] | None = None
        with subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"number"'):
                    current = json.loads(line)
                elif line.startswith('{"name"'):
                    yield json.loads(line)
                    begin, current = (current["number"] + 1 if current else begin), None
        if current is None:
            return
        yield {"name": current["name"], "aborted": process.returncode}
        begin = current["number"] + 1


def verdict(trace: dict[str, Any], *devices: dict[str, Any] | None) -> str:
    """``devices``: without values, and with them."""
    if "aborted" in trace:
        return "aborted"
    if "failed" in trace:
        return "failed"
    if "refused" in trace and any("failed" in device for device in devices if device is not None):
        return "fails on the device too"
    if "refused" in trace:
        return "refused" if trace["names_line"] else "refused without a line"
    peaks = [device["peak"] for device in devices if device is not None and "peak" in device]
    if trace["peak"] in peaks:
        return "exact"
    if not peaks:
        return "not on the device"
    values_decide = trace["asked"] or any("that values decide" in name for name in trace["not_modelled"])
    return "by values" if trace["name"].partition(":")[0] in _BY_VALUES or values_decide else "off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operators (default: all)")
    parser.add_argument("--python", type=Path, required=True, help="a Python that `brim rehearse` runs with")
    parser.add_argument("--most", type=int, default=3, help="samples of each operator (default: 3)")
    parser.add_argument("--layout", choices=LAYOUTS, default="plain", help="how the elements of inputs lie")
    parser.add_argument(
        "--half", action="store_true", help="in bfloat16 (default: the first type that a sample takes)"
    )
    parser.add_argument(
        "--rows", type=int, default=1, help="times as many rows, where operators take them: of the samples' own few "
        "a block of 512 bytes hides what is copied (default: 1)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    environment = find(options.python)
    if environment is None:
        raise SystemExit("There is no CUDA build of PyTorch: see `brim rehearse --help`.")
    source = Path(__file__).parents[1] / "src"
    paths = [str(source), os.environ.get("PYTHONPATH", "")]
    plain = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    device_variables = environment.variables(DeviceSettings.of(CARD), plain)
    traces = {one["name"]: one for one in run("trace", sys.executable, plain, options, options.names)}
    found = run("device", str(environment.python), device_variables, options, options.names)
    devices = {one["name"]: one for one in found}
    others = {name.partition(":")[0] for name, one in traces.items() if verdict(one, devices.get(name)) in _NOT_TOLD}
    computing = device_variables | force.environment("all", device_variables)
    again = run("device", str(environment.python), computing, options, sorted(others)) if others else ()
    computed = {one["name"]: one for one in again}
    rows = [
        {"name": name, "verdict": verdict(one, devices.get(name), computed.get(name)), "peak_bytes": one.get("peak"),
         "device_peak_bytes": devices.get(name, {}).get("peak"),
         "computing_device_peak_bytes": computed.get(name, {}).get("peak"),
         "said": one.get("refused") or one.get("failed", "")}
        for name, one in traces.items()
    ]  # fmt: skip
    counts = Counter(row["verdict"] for row in rows)
    for row in rows:
        if row["verdict"] not in ("exact", "by values", "fails on the device too"):
            print(
                f"{row['name']:55} {row['verdict']:25} {row['peak_bytes']} {row['device_peak_bytes']} "
                f"{row['computing_device_peak_bytes']} {row['said']}"
            )
    print(f"{len(rows)} samples: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    if options.output:
        table = {"card": CARD, "samples": len(rows), "verdicts": dict(counts), "rows": [
            row for row in rows if row["verdict"] != "exact"
        ]}  # fmt: skip
        text = json.dumps(table, indent=1).replace(f"{Path(__file__).parents[1]}/", "")
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
