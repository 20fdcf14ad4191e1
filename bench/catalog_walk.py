"""Every model of the catalog through ``brim.estimate``, in every setting by turns: what works, what is refused.

    python bench/catalog_walk.py                     all models: training, generating, and three more settings each
    python bench/catalog_walk.py --only llama --all  every setting for the models whose name matches
    python bench/catalog_walk.py --brief             training and generating alone

Each result must add up: categories and modules to the same sum, with the rounding to the allocated peak, and
allocated <= reserved < process <= upper bound. A refusal is one clear error (a BrimError); anything else is a defect
and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

import brim
from brim import catalog
from brim.errors import BrimError
from brim.estimation.estimate import Estimate
from brim.estimation.workload import PRECISIONS
from brim.predict.optimizer_states import OPTIMIZERS
from brim.units import format_bytes

Settings = dict[str, Any]

_TRAINED = [precision for precision in PRECISIONS if precision not in ("int8", "int4")]
ALWAYS: tuple[Settings, ...] = ({"task": "train"}, {"task": "generate", "new_tokens": 16})
BY_TURNS: tuple[Settings, ...] = (
    *({"task": "train", "precision": precision} for precision in _TRAINED),
    *({"task": "train", "optimizer": optimizer} for optimizer in OPTIMIZERS),
    {"task": "train", "method": "lora"},
    {"task": "train", "method": "lora", "precision": "int4"},
    {"task": "train", "method": "lora", "precision": "int8", "checkpointing": "full"},
    {"task": "train", "checkpointing": "full"},
    {"task": "train", "checkpointing": "selective"},
    {"task": "train", "checkpointing": "full", "precision": "bf16-mixed", "optimizer": "adamw8bit", "batch": 4},
    *({"task": "generate", "precision": kind, "batch": 2} for kind in ("fp32", "bf16", "fp8", "int8", "int4")),
)  # fmt: skip
_EACH = 3  # of the settings that are tried by turns, for one model


def main() -> int:
    options = _options()
    names = [name for name in catalog.model_names() if re.search(options.only, name)]
    table = Table(title="brim estimate over the catalog", title_justify="left")
    for column in ("model", "settings", "allocated", "process", "bound", "s", "outcome"):
        table.add_column(column, justify="left" if column in ("model", "settings", "outcome") else "right")
    defects = 0
    for name, settings in _plan(names, _turns(options)):
        start_s = time.perf_counter()
        cells, outcome = _tried(name, settings | {"gpu": options.gpu})
        defects += outcome.startswith("DEFECT")
        row = (name, _written(settings), *cells, f"{time.perf_counter() - start_s:.1f}", outcome)
        print("\t".join(row), flush=True)
        table.add_row(*row)
    Console(width=200).print(table)
    print(f"{defects} defects")
    return int(defects > 0)


def _turns(options: argparse.Namespace) -> int:
    """How many of the settings that are tried by turns each model gets."""
    return len(BY_TURNS) if options.all else 0 if options.brief else _EACH


def _plan(names: list[str], each: int) -> Iterator[tuple[str, Settings]]:
    for index, name in enumerate(names):
        turns = range(each * index, each * (index + 1))
        for settings in (*ALWAYS, *(BY_TURNS[turn % len(BY_TURNS)] for turn in turns)):
            yield name, settings


def _tried(name: str, settings: Settings) -> tuple[tuple[str, str, str], str]:
    none = ("", "", "")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = brim.estimate(name, **settings)
    except BrimError as error:
        return none, f"{type(error).__name__}: {' '.join(str(error).split())}"
    except Exception:
        traceback.print_exc()
        return none, "DEFECT: an exception that is no BrimError"
    wrong = list(inconsistencies(found))
    peak = found.peak_bytes
    cells = (format_bytes(peak.allocated), format_bytes(peak.process), format_bytes(found.upper_bound_bytes))
    if wrong:
        return cells, f"DEFECT: {'; '.join(wrong)}"
    notes = [str(warning.message) for warning in told]
    notes += [f"not modelled: {', '.join(found.not_modelled)}"] if found.not_modelled else []
    return cells, "; ".join(notes)


def inconsistencies(found: Estimate) -> Iterator[str]:
    """What does not add up in a report."""
    peak, context = found.peak_bytes, found.at_peak_bytes["context"]
    by_category, by_module = sum(found.at_peak_bytes.values()) - context, sum(found.per_module.values())
    if by_category != by_module:
        yield f"categories have {by_category:,} B, modules {by_module:,} B"
    if by_category + found.rounding_bytes != peak.allocated:
        yield f"{by_category:,} B at the peak and {found.rounding_bytes:,} B of rounding are not {peak.allocated:,} B"
    if not peak.allocated <= peak.reserved < peak.process <= found.upper_bound_bytes:
        yield f"peaks are not in order: {peak}, bound {found.upper_bound_bytes:,}"
    if found.flops <= 0 or not found.at_peak_bytes["parameters"]:
        yield "no work or no parameters"
    if found.workload.task == "train" and not found.at_peak_bytes["gradients"] + found.at_peak_bytes["activations"]:
        yield "training without gradients and activations"


def _written(settings: Settings) -> str:
    return " ".join(str(value) if key != "batch" else f"batch={value}" for key, value in settings.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of model names")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--all", action="store_true", help="every setting for every model")
    how_many.add_argument("--brief", action="store_true", help="training and generating only")
    parser.add_argument("--gpu", default="H200")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
