"""Every architecture of transformers that a few small settings make small, run for real on a CPU and predicted.

    python bench/cpu_sweep.py                      all kinds
    python bench/cpu_sweep.py causal --only olmo   decoders whose name matches

A configuration class gets those of ``SMALL`` that it knows; what is still large, or refuses them, is named and left
out. Nothing is chosen for a family, so this is a look at families that nobody looked at.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import warnings
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.cpu.sweep import KINDS, outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], default=list(KINDS))
    parser.add_argument("--only", default="", help="a regular expression of names")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries that build the models
    console = Console(width=160, highlight=False)
    for kind in given.kinds:
        for family, named in KINDS[kind].items():
            architecture = named if isinstance(named, str) else named[0]
            if not re.search(given.only, family):
                continue
            for infer in (False, True):
                told = outcome(kind, family, architecture, infer=infer)
                console.print(f"{family:24} {'inference' if infer else 'training':10} {told}", markup=False)
                gc.collect()


if __name__ == "__main__":
    main()
