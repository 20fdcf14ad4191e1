"""Draw predicted against measured memory as docs/demo.png, the picture in the README.

python examples/demo.py --json run.json && python bench/picture.py run.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MIB = 1 << 20


def main(source: Path, target: Path = Path("docs/demo.png")) -> None:
    run = json.loads(source.read_text())
    figure, axes = pyplot.subplots(figsize=(8, 3.6), dpi=150)
    for name, colour, label in (
        ("unrestricted", "#999999", "unrestricted run, measured"),
        ("brim", "#0072B2", "brim, measured"),
    ):
        axes.plot(run[name]["s"], [b / MIB for b in run[name]["bytes"]], color=colour, label=label)
    for key, style, colour in (("promised_bytes", "--", "#D55E00"), ("budget_bytes", ":", "#000000")):
        label = f"{key.removesuffix('_bytes')}: {run[key] / MIB:.0f} MiB"
        axes.axhline(run[key] / MIB, linestyle=style, color=colour, label=label)
    axes.set_xlabel("seconds since the moment before loading")
    axes.set_ylabel("growth of the resident set, MiB")
    weights = f"{run['weights_bytes'] / MIB:.0f} MiB"
    axes.set_title(f"SmolLM2-135M ({weights} of fp32 weights), the same text from both runs")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center right", frameon=False)
    figure.tight_layout()
    figure.savefig(target)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
