"""Model configurations by name or hub id, taken from the Hugging Face hub (``models/*.json``)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from brim.catalog import names


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's configuration, enough to build it without a download.

    ``architecture`` is the class in ``library`` (``transformers`` or ``diffusers``) and ``config`` the content of its
    config.json. ``parameters`` is the published count (tied weights once), None if none is exact. ``quantized`` is
    the format of the published weights (``"MXFP4"``) if ``config`` describes them in 16 bits.
    """

    name: str
    architecture: str
    library: str
    source: str
    hub_ids: tuple[str, ...]
    parameters: int | None
    config: Mapping[str, Any]
    quantized: str = ""


def model(name: str) -> Preset:
    """Return the configuration of a name (``llama-3-8b``) or hub id (``meta-llama/Llama-3.1-8B``), in any case.

    Raises UsageError with the nearest names.
    """
    presets, asked_name = _presets(), name.strip().lower()
    preset = presets.get(asked_name) or _by_hub_id().get(asked_name)
    if preset is None:
        raise names.unknown("model", name, tuple(presets), _same_repository(asked_name))
    return preset


def model_names() -> tuple[str, ...]:
    """Return the names of all models, sorted."""
    return tuple(_presets())


def _same_repository(name: str) -> tuple[str, ...]:
    """Return the models whose names differ in punctuation only (``llama3-8b``), to suggest them first."""
    return tuple(
        preset.name
        for preset in _presets().values()
        if names.key(name.rpartition("/")[2])
        in {names.key(n.rpartition("/")[2]) for n in (preset.name, *preset.hub_ids)}
    )


@functools.cache
def _presets() -> dict[str, Preset]:
    files = resources.files("brim.catalog").joinpath("models").iterdir()
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".json")]
    presets = [Preset(**entry | {"hub_ids": tuple(entry["hub_ids"])}) for entry in entries]
    return {preset.name: preset for preset in sorted(presets, key=lambda preset: preset.name)}


@functools.cache
def _by_hub_id() -> dict[str, Preset]:
    return {hub_id.lower(): preset for preset in _presets().values() for hub_id in preset.hub_ids}
