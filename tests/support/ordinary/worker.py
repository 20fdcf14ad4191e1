"""Runs ordinary programs on a device, each in a fork of this process, and prints a line of JSON for each."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import traceback
import warnings
from typing import Any

import numpy as np
import torch

from support.ordinary import Program, programs

STEPS = 2


def measured(one: Program, events: bool) -> dict[str, Any]:
    seed()
    if events:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, context=None)
    step = one.build()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    if events:
        history = torch.cuda.memory._snapshot()["device_traces"][0]
        found["events"] = [(event["action"], event["size"]) for event in history]
    return found


def seed() -> None:
    """Both sides draw the same on the CPU, as far as what they draw before is the same."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    gc.collect()


def main() -> None:
    wanted, events = set(sys.argv[1].split(",")), "--events" in sys.argv
    warnings.simplefilter("ignore")
    for one in programs():
        if one.name not in wanted:
            continue
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                answer = measured(one, events)
            except BaseException as error:
                answer = {"error": "".join(traceback.format_exception(error))[-3000:]}
            with os.fdopen(write, "w") as out:
                out.write(json.dumps({"name": one.name} | answer))
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as source:
            text = source.read()
        os.waitpid(child, 0)
        print(text or json.dumps({"name": one.name, "error": "the process ended"}), flush=True)


if __name__ == "__main__":
    main()
