"""Run Python on the rehearsal device, every operator computed; fetches PyTorch's CUDA build where there is none.

BRIM_REHEARSAL_PYTHON names another Python than the one that runs this: it has a CUDA build, or one is fetched for it.

python tests/rehearsal/on_the_device.py [--card H100] [--gpus 2] [--order late] -m pytest tests/gpu
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from brim.device.environment import prepare
from brim.device.settings import DeviceSettings
from brim.errors import BrimError
from brim.rehearsal import force

CHECKOUT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="H100")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--order", default="at_once")
    parser.add_argument("--prepare", action="store_true", help="fetch and build, and run nothing")
    options, arguments = parser.parse_known_args()
    try:
        named = os.environ.get("BRIM_REHEARSAL_PYTHON")
        python = prepare(
            Path(named) if named else None,
            confirm=lambda what: not print(what),
            folder=CHECKOUT / ".rehearsal",
            compiler=options.prepare,
        )
        settings = DeviceSettings.of(options.card, gpus=options.gpus, order=options.order)
        variables = python.variables(settings)
    except BrimError as error:
        sys.exit(f"Error: {error}")
    variables |= force.environment("all", variables) | {"OMP_NUM_THREADS": "1"}
    if not options.prepare:
        os.execve(python.python, [str(python.python), *arguments], variables)


if __name__ == "__main__":
    main()
