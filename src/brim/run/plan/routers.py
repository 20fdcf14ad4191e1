"""Router statistics for a plan: read from a file, or recorded by a short run of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from brim.errors import UsageError
from brim.estimation.step_memory import Inputs
from brim.measure.user_cache import cache_folder, fingerprint
from brim.models.opening import prepare, read_tokenizer
from brim.models.quality import bundled_text
from brim.planning.request import Request
from brim.planning.router_file import (
    VERSION,
    RouterFile,
    Routers,
    Visits,
    named_visit,
    read_routers,
    statistics_of,
    write_routers,
)
from brim.run.generate.load import load
from brim.techniques.experts.router_statistics import router_statistics

AUTO = "auto"
_PROMPT_TOKENS, _NEW_TOKENS = 32, 32  # routers are told apart by then, and a streamed model is run in a minute


def routers_of(request: Request, where: str) -> Routers:
    """The statistics in the file ``where``; "auto" is one in the user's cache folder.

    Where there is no such file yet, the model is run for a few tokens, inside the budget of ``request`` where that is
    one of this machine, and the file is written. Raises UsageError for a model without weights or with other layers
    than the file has, FormatError for a file that is none, UnsupportedError for a model without routers.
    """
    path = _remembered(request) if where == AUTO else Path(where).expanduser()
    if not path.exists():
        write_routers(path, _watched(request))
    file = read_routers(path)
    if file.batch != request.batch:
        raise UsageError(
            f"Cannot use the router statistics in {path} for --batch {request.batch}.",
            f"They were recorded with {file.batch} sequences at once, which choose other experts together.",
            "Name another file; it is made if it does not exist.",
        )
    return {name: statistics_of(path, layer) for name, layer in file.layers.items()}


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
        name: Visits(count=layer.count, visits=tuple(named_visit(visit) for visit in layer.visits[1:]))
        for name, layer in seen.items()
    }
    return RouterFile(model=str(request.model), batch=request.batch, layers=layers)
