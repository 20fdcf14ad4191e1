"""What MODEL names: a catalog entry, a folder, a config.json or ``file.py:factory``; no weights are read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim import catalog
from brim.catalog.names import unknown
from brim.core.files import regular
from brim.errors import ModelError, UnsupportedError, UsageError

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SIZE = re.compile(r"(^|_)(hidden_size|vocab_size|intermediate_size|layers?|heads?|embd|experts|channels)$|^d_")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # by transformers' common names
_MOST_LAYERS = 10_000  # deeper than any model: a mistake that would take hours to build


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to be built. ``architecture`` is its class in ``library``; ``factory`` replaces both for user code, and
    ``program``, which trains or runs a model when it is called, all three."""

    name: str
    library: str  # "transformers", "diffusers" or "python"
    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    factory: Callable[[], Any] | None = None
    program: Callable[[], Any] | None = None
    file: str = ""  # that the factory is in


def find_model(model: str | Path | Callable[[], Any]) -> Source:
    """Resolve MODEL without building anything.

    Raises UsageError for an unknown name (naming the nearest), ModelError for files that are missing or damaged,
    UnsupportedError for a model that needs Python code of its own.
    """
    if callable(model):
        file = getattr(getattr(model, "__code__", None), "co_filename", "")
        return Source(name=getattr(model, "__name__", "build"), library="python", factory=model, file=file)
    text = os.fspath(model)
    if not text:
        raise UsageError("An empty name was given as the model.", todo="Name a model, a folder or file.py:function.")
    if weights := weights_of(Path(text)):
        raise ModelError(
            f"{text} was given as the model.",
            f"It has weights ({weights[0].name}) and no config.json: without it the model is unknown.",
            "Add its config.json, or use --explain-formula, which needs the weights alone.",
        )
    file, colon, attribute = text.rpartition(":")
    if colon and file.endswith(".py"):
        return _of_python(Path(file), attribute)
    if text.endswith(".py"):
        raise UsageError(
            f"{text} was given as the model.",
            "It names no function.",
            f"Write {text}:build; brim estimate also takes a program as it is.",
        )
    path = Path(text)
    if path.is_dir():
        return _of_file(path / "config.json", path)
    if path.exists() or text.endswith(".json") or text.startswith((".", "/", "~")):
        return _of_file(path, path)
    preset = catalog.model(text)
    return Source(
        name=preset.name, library=preset.library, architecture=preset.architecture, config=preset.config
    )  # fmt: skip


def weights_of(path: Path) -> list[Path]:
    """The weights' files where MODEL is only that: a checkpoint, or a folder of them without a config.json."""
    if path.is_file():
        return [path] if path.suffix in _WEIGHTS else []
    if not path.is_dir() or (path / "config.json").exists():
        return []
    files_by_suffix = (sorted(path.glob(f"*{suffix}")) for suffix in _WEIGHTS)
    return next((files for files in files_by_suffix if files), [])


def _of_file(path: Path, asked: Path) -> Source:
    try:
        config = json.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        hint = "Give a folder with a config.json, a config.json, a name of the catalog or file.py:function."
        if (asked / "model_index.json").exists():
            hint = "This is a diffusers pipeline: give the folder of one of its models, as in unet/."
        raise ModelError(f"{asked} was given as the model.", f"There is no {path}.", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}.", f"It is not a model's configuration: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"Cannot read {path}.", f"It holds a {type(config).__name__}, not a JSON object.")
    name = asked.name if asked.is_dir() else asked.parent.name or asked.stem
    if isinstance(config.get("_class_name"), str):
        return Source(name=name, library="diffusers", architecture=config["_class_name"], config=config)
    return _of_transformers(path, name, config)


def _of_transformers(path: Path, name: str, config: dict[str, Any]) -> Source:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(
            f"Cannot read {path}.", "It names no model_type.", "Give the config.json of a transformers model."
        )
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise UnsupportedError(
                f"{path} was given as the model.",
                f"It needs Python code of its own ({kind}), which brim does not run.",
                "Build the model in a file of yours and give it as file.py:function.",
            )
        raise unknown("model_type", kind, list(CONFIG_MAPPING))
    if config.get("quantization_config"):
        raise UnsupportedError(
            f"{path} was given as the model.",
            "Its weights are quantized, and quantized checkpoints are not modelled yet.",
            "Remove quantization_config to estimate the model in a floating precision.",
        )
    names = config.get("architectures") or [""]
    if config.get("auto_map") and not _known(str(names[0])):
        raise UnsupportedError(
            f"{path} was given as the model.",
            f"Its class {names[0]} is Python code of its own, which brim does not run.",
            "Build the model in a file of yours and give it as file.py:function.",
        )
    return Source(name=name, library="transformers", architecture=str(names[0]), config=config)


def _known(architecture: str) -> bool:
    import transformers

    return hasattr(transformers, architecture)


def transformers_config(source: Source) -> Any:
    """The transformers config object. Raises ModelError where transformers does not accept it."""
    from transformers import AutoConfig

    settings = {key: value for key, value in source.config.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(str(source.config["model_type"]), **settings)
        layers = getattr(config, "num_hidden_layers", 0) or 0
    except Exception as error:
        raise ModelError(
            f"Cannot read the configuration of {source.name}.",
            f"transformers does not accept it: {short(error)}",
            "Correct it.",
        ) from error
    if layers > _MOST_LAYERS:
        raise ModelError(f"Cannot build {source.name}.", f"Its configuration has {layers:,} layers.", "Correct it.")
    _check_sizes(source, config)
    return config


def _check_sizes(source: Source, config: Any) -> None:
    """transformers builds a model of -3 layers without a word: it has none."""
    wrong = [(name, value) for name, value in source.config.items()
             if _SIZE.search(name) and type(value) is int and value < 0]  # fmt: skip
    wrong += [(name, 0) for name in _NEEDED if getattr(config, name, None) == 0]
    if wrong:
        name, value = wrong[0]
        raise ModelError(f"Cannot build {source.name}.", f"Its configuration has {name}={value}.", "Correct it.")


def class_of(config: Any, names: Iterable[str], autos: Iterable[str]) -> Any:
    """transformers' class of one of these names, else what one of these auto classes has for the config, or None."""
    import transformers

    for name in names:
        candidate = getattr(transformers, name, None)
        if isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel):
            return candidate
    for auto in autos:
        mapping = getattr(transformers, auto)._model_mapping
        if type(config) in mapping:
            candidate = mapping[type(config)]
            return candidate[0] if isinstance(candidate, tuple) else candidate
    return None


def _of_python(path: Path, attribute: str) -> Source:
    if not path.is_file():
        raise ModelError(f"{path}:{attribute} was given as the model.", f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"_brim_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, beside)  # for what it imports, now and in the function
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = place_in(error, str(module.__file__)).strip()
        reason = f"It fails {where}: {short(error)}" if where else short(error)
        raise ModelError(f"Cannot run {path} for its {attribute}.", reason, "Correct the file.") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UsageError(
            f"{path}:{attribute} was given as the model.",
            f"The file has no function {attribute!r}.",
            f"It has {', '.join(functions) or 'none'}.",
        )
    return Source(name=f"{path.stem}:{attribute}", library="python", factory=factory, file=str(module.__file__))


def place_in(error: BaseException, file: str) -> str:
    """`` at model.py:12``: the last line of that file in the error's traceback, if there is one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f" at {file}:{lines[-1]}" if lines else ""


def short(error: BaseException) -> str:
    """An exception in one line, for an error message."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.400}"
