"""Read and write router statistics: the experts that tokens chose in a short run of a mixture, for plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from brim.core import codec
from brim.core.files import write_text
from brim.errors import FormatError, UsageError
from brim.techniques.experts.router_statistics import RouterStatistics

VERSION = 1

Routers = Mapping[str, RouterStatistics]


@dataclass(frozen=True, kw_only=True)
class Visits:
    """A layer's calls: for each, the share of its tokens that chose an expert, by the expert's number."""

    count: int
    visits: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class RouterFile:
    """A run of ``model`` with ``batch`` sequences at once; ``layers`` by the path of their experts."""

    model: str
    batch: int
    layers: Mapping[str, Visits]


def statistics_of(path: Path, layer: Visits) -> RouterStatistics:
    numbers = {str(number) for number in range(layer.count)}
    if not layer.visits or any(not visit or not visit.keys() <= numbers for visit in layer.visits):
        raise FormatError(
            f"{path} has no valid router statistics.",
            "A layer has no calls, or calls an expert that it does not have.",
            "Name a file that does not exist yet: brim records it in a short run.",
        )
    visits = tuple({int(number): share for number, share in visit.items()} for visit in layer.visits)
    return RouterStatistics(count=layer.count, visits=visits)


def check_routers(routers: Routers, layers: Mapping[str, int], model: str) -> None:
    """Raise UsageError if ``routers`` are not of the layers of ``model`` (path -> number of experts)."""
    counts = {path: router.count for path, router in routers.items()}
    if not counts or counts != {path: layers.get(path) for path in counts}:
        raise UsageError(
            f"Cannot use the router statistics for {model}.",
            f"They describe {len(counts)} layers with experts; the model has {len(layers)}, or other layers.",
            "Give statistics of this model, or --router-statistics auto.",
        )


def named_visit(visit: Mapping[int, float]) -> dict[str, float]:
    return {str(number): share for number, share in visit.items()}


def read_routers(path: Path) -> RouterFile:
    try:
        return codec.read(RouterFile, path, VERSION)
    except FormatError as error:
        raise FormatError(
            f"{path} has no valid router statistics.",
            f"{error.asked} {error.found}",
            "Name a file that does not exist yet: brim records it in a short run.",
        ) from error


def write_routers(path: Path, file: RouterFile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(codec.to_json(file, VERSION)) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write router statistics to {path}.", f"{error}.", "Name another file.") from error
