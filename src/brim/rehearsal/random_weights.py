"""Replace ``from_pretrained`` of missing transformers models: they are built from their configuration, untrained.

A configuration that is missing too is the catalog's (``brim.catalog.presets``), for hub ids that it has.
Weights are allocated but not initialised: their values are not used.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from brim.catalog import presets
from brim.errors import UsageError

_OF_THE_HUB = frozenset(  # arguments that get_config_dict consumes
    """cache_dir force_download proxies token local_files_only revision trust_remote_code subfolder _from_pipeline
    _from_auto _commit_hash gguf_file""".split()  # noqa: SIM905
)
_CONFIGURATION, _MODELS = "transformers.configuration_utils", "transformers.modeling_utils"


def allow() -> None:
    """Let transformers, once it is imported, build models that are missing."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Patches two modules as soon as they are imported; finds nothing itself."""

    def __init__(self) -> None:
        self._left = {_CONFIGURATION: _use_catalog, _MODELS: _build_missing_models}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._left.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        self._left[fullname] = change  # the spec may have been looked up without an import
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def exec_module(module: types.ModuleType) -> None:
                del vars(loader)["exec_module"]
                loader.exec_module(module)
                self._left.pop(fullname, None)
                change(module)

            vars(loader)["exec_module"] = exec_module
        return spec


def _use_catalog(module: types.ModuleType) -> None:
    original = module.PreTrainedConfig.get_config_dict.__func__

    def get_config_dict(cls: Any, name: Any, /, **named: Any) -> Any:
        try:
            return original(cls, name, **named)
        except OSError:
            try:
                preset = presets.model(str(name))
            except UsageError:
                raise  # with the hub's own error as its context
            return dict(preset.config), {key: value for key, value in named.items() if key not in _OF_THE_HUB}

    module.PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


def _build_missing_models(module: types.ModuleType) -> None:
    original = module.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *arguments: Any, **named: Any) -> Any:
        try:
            return original(cls, name, *arguments, **named)
        except OSError:
            return _build(cls, name, named)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _build(cls: Any, name: Any, named: dict[str, Any]) -> Any:
    import torch

    from brim.estimation.models import Source, weight_type

    config = named.get("config")
    if config is None:
        config = cls.config_class.from_pretrained(name)
    dtype = named.get("dtype", named.get("torch_dtype"))
    if dtype in (None, "auto"):
        described = Source(name=str(name), library="transformers", config=config.to_dict())
        dtype = getattr(torch, weight_type(described).dtype)
    place = named.get("device_map")
    device = torch.device("cuda" if place == "auto" else place) if isinstance(place, (str, int)) else None
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype)
    model.to_empty(device=device or "cpu")
    model.tie_weights()
    model.config.name_or_path = model.name_or_path = str(name)  # trainers look up its tokenizer by it
    return model.eval()
