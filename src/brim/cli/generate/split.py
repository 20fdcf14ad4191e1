"""``brim generate --gpus N``: each rank its part of the model, one text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from brim.cli import verdict
from brim.cli.console import Console
from brim.cli.options import print_json
from brim.cli.split_options import under_torchrun
from brim.errors import UsageError
from brim.units import format_bytes, format_seconds

# Option as the command line has it -> its value where it was not given.
SPLIT = {"gpus": None, "split": None, "timeout": None}
_PASSED_ON = ("precision", "max_new_tokens")


def asked_for(split: Mapping[str, Any]) -> bool:
    """Whether this generation is one over ranks. Raises UsageError where its options do not go together."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if under_torchrun():
        if split["gpus"] not in (None, world):
            raise UsageError(
                f"Cannot use --gpus {split['gpus']}.",
                f"torchrun has started {world} ranks.",
                "Leave out one of the two.",
            )
        return True
    split_options = [name for name in ("split", "timeout") if split[name] is not None]
    if split["gpus"] in (None, 1) and split_options:
        raise UsageError(
            f"--{split_options[0]} was given.", "It needs several ranks.", "Give --gpus 2, or leave it out."
        )
    return split["gpus"] not in (None, 1)


def run(
    model: str, prompt: str, split: Mapping[str, Any], options: Mapping[str, Any], *, as_json: bool
) -> int | None:
    """Generate with the others, or start them all; the exit code where it is not 0. Only rank 0 says anything."""
    from brim.run.generate.request import Request
    from brim.run.ranks.generate import RanksRequest, generate
    from brim.requests.train import TIMEOUT_S

    request = RanksRequest(
        generation=Request(model=model, prompt=prompt, **options), split=split["split"] or "layers",
        timeout_s=split["timeout"] or TIMEOUT_S,
    )  # fmt: skip
    if not under_torchrun():
        request.check()
        return _started(request, int(split["gpus"]), as_json=as_json)

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
    console.print(verdict.of_precision(*result.precision), markup=False)
    weights = ", ".join(format_bytes(count) for count in result.weights_bytes)
    took = "" if result.s_per_token is None else f"; {format_seconds(result.s_per_token)} per token"
    console.print(f"{result.split} split: {weights} of weights on ranks 0 to {len(result.weights_bytes) - 1}{took}")
    return None


def _started(request: Any, gpus: int, *, as_json: bool) -> int | None:
    """As ``torchrun --nproc-per-node GPUS --no-python brim generate`` would start them."""
    import torch

    from brim.run.ranks.start import start

    there = torch.cuda.device_count()
    if there and there < gpus:
        raise UsageError(
            f"--gpus {gpus} was given.", f"This machine has {there}.",
            f"Give --gpus {there}, or start the ranks of several machines by torchrun --no-python brim generate ...",
        )  # fmt: skip
    asked = request.generation
    words = ["generate", str(asked.model), "--prompt", asked.prompt, "--gpus", str(gpus), "--split", request.split]
    words += ["--timeout", str(request.timeout_s)]
    for name in _PASSED_ON:
        value = getattr(asked, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    for name in ("temperature", "top_p", "top_k", "seed"):
        value = getattr(asked.sampling, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += [word for text in asked.stop for word in ("--stop", text)]
    words += [] if asked.system is None else ["--system", asked.system]
    words += [] if asked.chat is None else ["--chat" if asked.chat else "--no-chat"]
    flags = {"--verify": asked.verify, "--trust-remote-code": asked.trust_remote_code, "--json": as_json}
    return start(gpus, [*words, *(flag for flag, enabled in flags.items() if enabled)]) or None
