"""Programs that run out of memory, rehearsed; is the first advice right? Each is followed in the program's own text.

    python bench/advice.py [--only TRAINER...] [--json rows.json] [--jobs 2]

Each of ``bench/running_out`` is rehearsed on a card without end, then on one that is 15 % smaller than its tensors
take, where it runs out; `brim rehearse` says what would help. Then it is rehearsed with its own ``--apply``, which
does in its text what the first advice says. PyTorch's CUDA build, transformers, peft, accelerate, diffusers and
pytorch-lightning have to be there; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from brim.units import format_bytes

PROGRAMS = Path(__file__).parent / "running_out"
CARD = "RTX 4090"
ENDLESS = "2TiB"
SHARE = 0.85  # of what the tensors take
LIMIT_S = 1800
ALLOCATOR = "allocator:"

# Trainer -> case -> batch.
CASES: dict[str, dict[str, int]] = {
    "plain_loop": {
        "forward": 256, "loss": 64, "optimizer": 2, "states": 2, "gradients": 2, "loading": 2, "checkpoint": 2,
        "evaluation": 256, "outputs": 256,
    },
    "trainer": {
        "forward": 64, "attention": 8, "loss": 32, "optimizer": 2, "states": 2, "gradients": 2, "evaluation": 32,
        "outputs": 32,
    },
    "adapters": {
        "forward": 32, "attention": 8, "loss": 32, "optimizer": 2, "evaluation": 32, "outputs": 8, "generation": 64,
        "loading": 2,
    },
    "lightning_loop": {
        "forward": 256, "loss": 64, "optimizer": 2, "states": 2, "gradients": 2, "outputs": 16, "loading": 2,
    },
    "accelerate_diffusers": {
        "forward": 32, "optimizer": 2, "states": 2, "gradients": 2, "evaluation": 32, "decoding": 8, "outputs": 64,
        "loading": 2,
    },
}  # fmt: skip


def rehearsed(words: list[str], vram: str, *, trials: int | None = None, alloc_conf: str = "") -> dict[str, Any]:
    """What `brim rehearse` says of a program and its arguments on a card of ``vram``, as its JSON."""
    options = ["--gpu", CARD, "--vram", vram, "--json", *([] if trials is None else ["--trials", str(trials)])]
    settings = {"PYTORCH_ALLOC_CONF": alloc_conf, "PYTORCH_CUDA_ALLOC_CONF": alloc_conf} if alloc_conf else {}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "brim", "rehearse", *options, *words],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    try:
        (process,) = json.loads(done.stdout)["processes"]
    except ValueError:
        raise SystemExit(f"{' '.join(words)} cannot be rehearsed: {done.stderr[-2000:]}") from None
    if process["ended"] == "failed":
        raise SystemExit(f"{' '.join(words)} failed: {process['message']}\n{done.stderr[-2000:]}")
    return dict(process)


def tried(trainer: str, case: str, batch: int) -> dict[str, Any]:
    """A program that runs out, its first advice, and whether it fits when that is followed."""
    words = [str(PROGRAMS / f"{trainer}.py"), "--case", case, "--batch", str(batch)]
    whole = rehearsed(words, ENDLESS, trials=0)
    (device,) = whole["devices"]
    card_bytes = device["process_bytes"] - device["reserved_bytes"] + int(SHARE * device["allocated_bytes"])
    row: dict[str, Any] = {
        "trainer": trainer,
        "case": case,
        "allocated_bytes": device["allocated_bytes"],
        "card_bytes": card_bytes,
    }
    failed = rehearsed(words, str(card_bytes))
    if failed["fits"] is not False:
        return row | {"ran_out": False}
    (memory,) = (one for one in failed["memory"] if one["failed"])
    first = memory["advice"][0]
    result = first["rehearsed"]
    row |= {"ran_out": True, "phase": memory["phase"], "advice": first["text"], "change": first["change"]}
    row["said_to_fit"] = None if result is None else result["fits"]
    changes = [change for change in first["change"].split(" + ") if not change.startswith(ALLOCATOR)]
    conf = "".join(one.removeprefix(ALLOCATOR) for one in first["change"].split(" + ") if one.startswith(ALLOCATOR))
    arguments = words[1:] if result is None else result["arguments"]
    arguments = [*arguments, "--apply", " + ".join(changes)] if changes else arguments
    applied = rehearsed([words[0], *arguments], str(card_bytes), trials=0, alloc_conf=conf)
    return row | {"fits": applied["fits"], "applied_bytes": max(one["process_bytes"] for one in applied["devices"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="trainers, or trainer/case")
    parser.add_argument("--json", type=Path, help="where rows go; those that are there already are kept")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    known = json.loads(given.json.read_text(encoding="utf-8")) if given.json and given.json.exists() else []
    rows = {(row["trainer"], row["case"]): row for row in known}
    todo = [
        (trainer, case, batch)
        for trainer, cases in CASES.items()
        for case, batch in cases.items()
        if not given.only or {trainer, f"{trainer}/{case}"} & set(given.only)
    ]

    def run(what: tuple[str, str, int]) -> None:
        row = rows[what[:2]] = tried(*what)
        print(in_words(row), flush=True)
        if given.json:
            with tempfile.NamedTemporaryFile("w", dir=given.json.parent, delete=False) as file:
                json.dump([rows[key] for key in sorted(rows)], file, indent=1)
                file.write("\n")
            Path(file.name).replace(given.json)

    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(run, what) for what in todo]
    for one in runs:
        one.result()  # raises what it raised
    print(summary(list(rows.values())))


def in_words(row: dict[str, Any]) -> str:
    name = f"{row['trainer']}/{row['case']}"
    if not row["ran_out"]:
        return f"{name}: it does not run out on {format_bytes(row['card_bytes'])}"
    said = {None: "not rehearsed", True: "said to fit", False: "said to run out"}[row["said_to_fit"]]
    return (
        f"{name}: {row['phase']}; {row['change'] or row['advice']} ({said}): {'fits' if row['fits'] else 'runs out'}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Of those that ran out: how often following the first advice was enough, and how often that was said falsely."""
    out = [row for row in rows if row["ran_out"]]
    fits = sum(row["fits"] for row in out)
    false = sum(row["said_to_fit"] is True and not row["fits"] for row in out)
    phases = ", ".join(f"{phase or 'not known'} {count}" for phase, count in Counter(r["phase"] for r in out).items())
    return (
        f"{len(out)} of {len(rows)} ran out ({phases}); with the first advice {fits} fit; {false} said to fit do not"
    )


if __name__ == "__main__":
    main()
