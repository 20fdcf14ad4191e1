"""Imported by Python in every process with this folder on its path; then imports the sitecustomize that it hides."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _import_hidden() -> None:
    here = Path(__file__).resolve().parent
    paths = [path for path in sys.path if Path(path).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_import_hidden()

if os.environ.get("BRIM_REHEARSAL_VALUES"):
    from brim.rehearsal.force import by_environment

    by_environment()

if os.environ.get("BRIM_REHEARSAL_OTHERS"):
    from brim.rehearsal.others import record_use_of_cuda

    record_use_of_cuda()
