"""How right the predictions are: every published measurement that can be built, and real runs on this machine's CPU.

One source per option, all when none is named. With ``--resume FILE`` every row is kept in the file as soon as it is
predicted, and is not predicted again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.accuracy import table

SOURCES = ("liger", "xmem", "peft", "qlora", "torchtune", "gpumemnet", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for source in SOURCES:
        parser.add_argument(f"--{source}", action="store_true")
    parser.add_argument("--only", default="", help="rows whose model's name has this text in it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", type=Path, help="rows of an earlier run that was stopped, and of this one")
    given = parser.parse_args()
    chosen = [source for source in SOURCES if getattr(given, source)] or SOURCES
    warnings.simplefilter("ignore")  # of the libraries that build the models
    console, documents = Console(width=200), []
    for source in chosen:
        module: Any = importlib.import_module(f"support.accuracy.{source}")
        if given.resume and hasattr(module, "predict"):
            module.predict = table.remembered(module.predict, given.resume)
        rows = module.rows(given.only)
        if rows:
            table.show(source, rows, console)
            documents.append(table.document(source, rows))
    if given.json:
        given.json.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
