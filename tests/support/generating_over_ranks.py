"""Generations over ranks that torchrun started: one after the other in one group of processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.splitting import torchrun


def generated(ranks: int, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What came of each: ``split`` and fields of ``Request``, those of its ``sampling`` in an object of their own."""
    done = torchrun(ranks, str(Path(__file__)), *map(json.dumps, requests), timeout_s=200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(*requests: str) -> None:
    """On every rank."""
    from brim.requests.sampling import Sampling
    from brim.run.generate.request import Request
    from brim.run.ranks.generate import RanksRequest, generate

    for text in requests:
        given = json.loads(text)
        split = given.pop("split")
        given["sampling"] = Sampling(**given.pop("sampling", {}))
        made = generate(RanksRequest(generation=Request(**given), split=split, timeout_s=60))
        if made is not None:
            print(json.dumps(made.to_json()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
