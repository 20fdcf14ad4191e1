"""``brim generate --gpus N``: each rank runs its part of the model, rank 0 prints the text."""

from __future__ import annotations

import os
import sys

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.generate.options import GenerateOptions
from brim.cli.options import print_json
from brim.cli.split_options import under_torchrun
from brim.core.options import build, words
from brim.errors import UsageError
from brim.requests.generate import Request
from brim.requests.train import TIMEOUT_S
from brim.units import format_bytes, format_seconds


def over_ranks(options: GenerateOptions) -> bool:
    """Return whether this generation runs over ranks. Raises UsageError where its options contradict each other."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if under_torchrun():
        if options.gpus not in (None, world):
            raise UsageError(
                f"Cannot use --gpus {options.gpus}.",
                f"torchrun has started {world} ranks.",
                "Leave out one of the two.",
            )
        return True
    alone = options.gpus in (None, 1)
    for name in ("split", "timeout"):
        if alone and getattr(options, name) is not None:
            raise UsageError(f"--{name} was given.", "It needs several ranks.", "Give --gpus 2, or leave it out.")
    return not alone


def run(options: GenerateOptions) -> int | None:
    """Generate with the other ranks, or start them all; return the exit code if not 0. Only rank 0 prints."""
    from brim.run.ranks.generate import RanksRequest, generate

    as_json = options.as_json
    request = RanksRequest(
        generation=build(Request, vars(options)), split=options.split or "layers",
        timeout_s=options.timeout or TIMEOUT_S,
    )  # fmt: skip
    if not under_torchrun():
        request.check()
        return _started(options, options.gpus or 1)

    def on_text(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    result = generate(request, on_text=on_text)
    if result is None:
        return None
    if as_json:
        print_json(result.to_json())
        return None
    sys.stdout.write("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(verdict.of_precision(*result.precision))
    weights = ", ".join(format_bytes(count) for count in result.weights_bytes)
    took = "" if result.s_per_token is None else f"; {format_seconds(result.s_per_token)} per token"
    console.print(f"{result.split} split: {weights} of weights on ranks 0 to {len(result.weights_bytes) - 1}{took}")
    return None


def _started(options: GenerateOptions, gpus: int) -> int | None:
    """Start the ranks as ``torchrun --nproc-per-node GPUS --no-python brim generate`` would."""
    import torch

    from brim.run.ranks.start import start

    there = torch.cuda.device_count()
    if there and there < gpus:
        raise UsageError(
            f"--gpus {gpus} was given.", f"This machine has {there}.",
            f"Give --gpus {there}, or start the ranks of several machines by torchrun --no-python brim generate ...",
        )  # fmt: skip
    return start(gpus, ["generate", *words(options)]) or None
