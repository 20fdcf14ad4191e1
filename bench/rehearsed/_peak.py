"""Runs a program and appends what it took of the GPU to a file.

python _peak.py FILE NAME [-m] PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
from pathlib import Path


def keep(path: str, name: str) -> None:
    import torch

    if torch.cuda.is_initialized():
        took = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **took}) + "\n")


def main() -> None:
    path, name, *rest = sys.argv[1:]
    atexit.register(keep, path, name)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
