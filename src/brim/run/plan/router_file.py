"""What the routers of a mixture of experts were seen to do, for plans: from a short run, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brim.core import codec
from brim.core.files import write_text
from brim.errors import FormatError, UsageError
from brim.measure.user_cache import cache_folder, fingerprint
from brim.run.fit.step_memory import Inputs
from brim.run.generate.load import load
from brim.run.model.opening import prepare, read_tokenizer
from brim.run.model.quality import bundled_text
from brim.run.plan.request import Request
from brim.techniques.experts.router_statistics import RouterStatistics, router_statistics

AUTO = "auto"
VERSION = 1
_PROMPT_TOKENS, _NEW_TOKENS = 32, 32  # routers are told apart by then, and a streamed model is run in a minute

Routers = Mapping[str, RouterStatistics]


@dataclass(frozen=True, kw_only=True)
class Visits:
    """One layer: of each call, the share of its tokens that chose an expert (by its number)."""

    count: int
    visits: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class RouterFile:
    """``model`` is what was run, with ``batch`` sequences at once; ``layers`` by the path of their experts."""

    model: str
    batch: int
    layers: Mapping[str, Visits]


def routers_of(request: Request, where: str) -> Routers:
    """The statistics in the file ``where``; "auto" is one in the user's cache folder.

    Where there is no such file yet, the model is run for a few tokens, inside the budget of ``request`` where that is
    one of this machine, and the file is written. Raises UsageError for a model without weights or with other layers
    than the file has, FormatError for a file that is none, UnsupportedError for a model without routers.
    """
    path = _remembered(request) if where == AUTO else Path(where).expanduser()
    if not path.exists():
        _write(path, _watched(request))
    file = _read(path)
    if file.batch != request.batch:
        raise UsageError(
            f"Cannot use the router statistics in {path} for --batch {request.batch}.",
            f"They were recorded with {file.batch} sequences at once, which choose other experts together.",
            "Name another file; it is made if it does not exist.",
        )
    return {name: _statistics(path, layer) for name, layer in file.layers.items()}


def _statistics(path: Path, layer: Visits) -> RouterStatistics:
    numbers = {str(number) for number in range(layer.count)}
    if not layer.visits or any(not visit or not visit.keys() <= numbers for visit in layer.visits):
        raise FormatError(
            f"{path} has no valid router statistics.",
            "A layer has no calls, or calls an expert that it does not have.",
            "Name a file that does not exist yet: it is made by a short run.",
        )
    visits = tuple({int(number): share for number, share in visit.items()} for visit in layer.visits)
    return RouterStatistics(count=layer.count, visits=visits)


def check_routers(routers: Routers, layers: Mapping[str, int], model: str) -> None:
    """Raise UsageError if ``routers`` are not of the layers of ``model`` (path -> number of experts)."""
    counts = {path: router.count for path, router in routers.items()}
    if not counts or counts != {path: layers.get(path) for path in counts}:
        raise UsageError(
            f"Cannot use the router statistics for {model}.",
            f"They are of {len(counts)} layers with experts; the model has {len(layers)}, or other ones.",
            "Give statistics of this model, or --router-statistics auto.",
        )


def _remembered(request: Request) -> Path:
    folder = _folder(request)
    name = fingerprint(sorted(folder.glob("*.safetensors")), VERSION, request.batch, _PROMPT_TOKENS, _NEW_TOKENS)
    return cache_folder() / f"routers-{name}.json"


def _folder(request: Request) -> Path:
    path = Path(request.model).expanduser()
    if not path.exists():
        raise UsageError(
            f"Cannot record router statistics of {request.model}.",
            "That takes a short run, and only its configuration is known.",
            "Give a folder with weights, or a file of statistics.",
        )
    return prepare(path)


def _watched(request: Request) -> RouterFile:
    folder = _folder(request)
    tokenizer = read_tokenizer(folder, str(request.model))
    ids = tokenizer(bundled_text(), return_tensors="pt").input_ids[0]
    rows = [ids.roll(-_PROMPT_TOKENS * row)[:_PROMPT_TOKENS] for row in range(request.batch)]
    here = request.gpu is None
    module = load(
        folder,
        vram=request.vram if here else None,
        ram=request.ram if here else None,
        inputs=Inputs(batch=request.batch, prompt=_PROMPT_TOKENS, total=_PROMPT_TOKENS + _NEW_TOKENS),
    )
    try:
        inputs = {"input_ids": torch.stack(rows), "attention_mask": torch.ones(len(rows), _PROMPT_TOKENS)}
        seen = router_statistics(module, inputs, new_tokens=_NEW_TOKENS)
    finally:
        handle: Any = module.brim
        handle.close()  # without bringing it all into memory
    # The first call is the prompt's: what a token asks for is in the others.
    layers = {
        name: Visits(count=layer.count, visits=tuple(_named(visit) for visit in layer.visits[1:]))
        for name, layer in seen.items()
    }
    return RouterFile(model=str(request.model), batch=request.batch, layers=layers)


def _named(visit: Mapping[int, float]) -> dict[str, float]:
    return {str(number): share for number, share in visit.items()}


def _read(path: Path) -> RouterFile:
    try:
        return codec.read(RouterFile, path, VERSION)
    except FormatError as error:
        raise FormatError(
            f"{path} has no valid router statistics.",
            f"{error.asked} {error.found}",
            "Name a file that does not exist yet: it is made by a short run.",
        ) from error


def _write(path: Path, file: RouterFile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(codec.to_json(file, VERSION)) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write router statistics to {path}.", f"{error}.", "Name another file.") from error


__all__ = ["AUTO", "RouterFile", "Routers", "Visits", "check_routers", "routers_of"]
