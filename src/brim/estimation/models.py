"""Resolve MODEL: a hub id, a catalog entry, a folder, a config.json or ``file.py:factory``; no weights are read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from brim import catalog
from brim.catalog.names import key, unknown
from brim.core.files import regular
from brim.errors import BrimError, ModelError, UnsupportedError, UsageError
from brim.estimation.hub import Stored, hub_model, is_hub_id

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_PART = re.compile(r"\d{5}(?=-of-(\d{5})\.\w+$)")
# Not *_layer, which is an index: negative values count from the end.
_SIZE = re.compile(r"(^|_)((hidden|vocab|intermediate)_size|n_layer|layers|heads?|embd|experts|channels)$|^d_")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # transformers' common names
# Settings that become a list or a loop in a library; more than 10,000 is a mistake that would take hours to build.
_COUNT = re.compile(r"(^|_)(n_layer|layers|blocks|depths?|stages|experts|heads?|groups)$")
_MOST = 10_000
_TEXT = re.compile("text|language|llm|decoder|thinker")  # names of the part with most weights in configurations
_NOT_SIZES = ("model_type", "auto_map", "quantization_config")  # keys of a configuration that is passed in, not sizes
_CHECKPOINTS = ("model.safetensors", "model.safetensors.index.json")
# Types of quantized weights; masks among the buffers may have them too.
_PACKED = ("uint8", "int8", "float8", "int32", "uint32")
_PIPELINE = "model_index.json"
_ALONE = "pipeline: this is one of its models; the others (text encoders, VAE or denoiser) are not counted"
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """The floating type of a model's weights, as PyTorch names it (``"bfloat16"``), and its origin."""

    dtype: str
    origin: str

    @property
    def origin_and_type(self) -> str:
        """``by text_config.dtype of its configuration (bfloat16)``."""
        return f"by {self.origin} ({self.dtype})"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to be built.

    ``architecture`` is its class in ``library``; ``factory`` replaces both for user code. ``folder`` holds its
    weights if they are on this machine; ``stored`` has the headers of weights on the hub. ``assumed`` says what
    stands for something that the hub did not give. ``parts`` has the models of a pipeline of diffusers, by their
    names in it. ``is_catalog``: it is described by the catalog, and may be trained in 16 bits also where the
    published weights are quantized.
    """

    name: str
    library: str  # "transformers", "diffusers" or "python"
    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    factory: Callable[[], Any] | None = None
    file: str = ""  # the file that defines the factory
    folder: Path | None = None
    stored: Mapping[str, Stored] | None = None
    assumed: str = ""
    parts: Mapping[str, Source] = field(default_factory=dict)
    is_catalog: bool = False


def find_model(model: str | Path | Callable[[], Any]) -> Source:
    """Resolve MODEL without building anything.

    Raises UsageError for an unknown name (naming the nearest), ModelError for files that are missing or damaged,
    UnsupportedError for a model with custom Python code.
    """
    if callable(model):
        file = getattr(getattr(model, "__code__", None), "co_filename", "")
        return Source(name=getattr(model, "__name__", "build"), library="python", factory=model, file=file)
    text = os.fspath(model)
    if not text:
        raise UsageError("An empty name was given as the model.", todo="Name a model, a folder or file.py:function.")
    path = Path(text)
    if weights := _weights_alone(path):
        raise ModelError(
            f"{text} was given as the model.",
            f"It has weights ({weights.name}) and no config.json: without it the model is unknown.",
            "Add its config.json; brim plan reads a .gguf.",
        )
    file, colon, attribute = text.rpartition(":")
    if colon and file.endswith(".py"):
        return _of_python(Path(file), attribute)
    if text.endswith(".py"):
        raise UsageError(
            f"{text} was given as the model.",
            "It names no function.",
            f"Write {text}:build; brim estimate also takes an unchanged program.",
        )
    if path.is_dir():
        return _of_file(path / "config.json", path)
    if path.exists() or text.endswith((".json", *_WEIGHTS)) or text.startswith((".", "/", "~")):
        return _of_file(path, path)
    return _of_hub(text) if is_hub_id(text) else _of_catalog(text)


def _of_hub(name: str) -> Source:
    """Resolve a hub id; where the hub does not answer, by the catalog's configuration of the same id."""
    try:
        model = hub_model(name)
    except ModelError as error:
        try:
            source = _of_catalog(name)
            assumed = f"configuration: that of the catalog is used. {error.reason} {source.assumed}"
            return replace(source, assumed=assumed.strip())
        except UsageError as unknown_name:
            nearest = unknown_name.todo.partition(" Or ")[0]  # a folder is advised already
            raise ModelError(error.request, error.reason, f"{error.todo} {nearest}") from error
    path = model.folder / "config.json"
    try:
        source = _of_file(path, model.folder)
    except BrimError as error:  # the user knows no folder of the hub's cache
        error.request = error.request.replace(str(path), name)
        raise
    folder = model.folder if model.has_weights else None
    assumed = f"weights: as the configuration describes them, their headers are unknown. {model.problem}"
    return replace(
        source, name=model.repository, folder=folder, stored=model.tensors, assumed=assumed if model.problem else ""
    )


def _of_catalog(name: str) -> Source:
    preset = catalog.model(name)
    assumed, config = _ALONE * (preset.library == "diffusers"), preset.config
    if preset.quantized:
        assumed = (
            f"weights: in 16 bits unless precision is stored; those of {preset.hub_ids[0]} are in {preset.quantized}."
        )
    if preset.quantized == "MXFP4":
        config = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    return Source(
        name=preset.name, library=preset.library, architecture=preset.architecture, config=config, assumed=assumed,
        is_catalog=True,
    )  # fmt: skip


def parts_of_file(path: Path) -> list[Path]:
    """Return all files of a checkpoint of which ``path`` is one, as in ``model-00001-of-00003.gguf``.

    Raises ModelError if one is missing.
    """
    match = _PART.search(path.name)
    numbers = range(1, int(match[1]) + 1) if match else [1]
    parts = [path.with_name(_PART.sub(f"{number:05}", path.name)) for number in numbers]
    for part in parts:
        if match and not part.exists():
            raise ModelError(f"{path} was given as the model.", f"There is no {part}.", "Fetch all of its files.")
    return parts


def _weights_alone(path: Path) -> Path | None:
    """Return a weight file of a MODEL that is a checkpoint, or a folder of checkpoints without a config.json."""
    if path.is_file():
        return path if path.suffix in _WEIGHTS else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    return next((file for suffix in _WEIGHTS for file in sorted(path.glob(f"*{suffix}"))), None)


def _of_file(path: Path, argument: Path) -> Source:
    try:
        config = json.loads(regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if path.name == "config.json" and (argument / _PIPELINE).exists():
            return _of_pipeline(argument)
        raise ModelError(
            f"{argument} was given as the model.",
            f"There is no {path}.",
            "Give a folder with a config.json, a config.json, a name of the catalog or file.py:function.",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}.", f"It is not a model's configuration: {error}.") from error
    if not isinstance(config, dict):
        raise ModelError(f"Cannot read {path}.", f"It holds a {type(config).__name__}, not a JSON object.")
    name = argument.name if argument.is_dir() else argument.parent.name or argument.stem
    if isinstance(config.get("_class_name"), str):
        return Source(name=name, library="diffusers", architecture=config["_class_name"], config=config)
    return replace(_of_transformers(path, name, config), folder=path.parent)


def _of_pipeline(folder: Path) -> Source:
    """Resolve a diffusers pipeline: its models are the parts that have a configuration."""
    try:
        index = json.loads(regular(folder / _PIPELINE).read_text(encoding="utf-8"))
        classes = {name: entry[1] for name, entry in index.items() if isinstance(entry, list)}
    except (OSError, ValueError, RecursionError, AttributeError, IndexError) as error:
        raise ModelError(f"Cannot read {folder / _PIPELINE}.", f"It is not a pipeline's index: {error}.") from error
    parts = {
        name: replace(_of_file(folder / name / "config.json", folder / name), architecture=str(kind))
        for name, kind in classes.items()
        if name.isidentifier() and (folder / name / "config.json").exists()  # no path to another folder
    }
    if not parts:
        raise ModelError(f"{folder} was given as the model.", "None of its models has a config.json.")
    return Source(
        name=folder.name, library="diffusers", architecture=str(index.get("_class_name")), parts=parts, folder=folder
    )


def _of_transformers(path: Path, name: str, config: dict[str, Any]) -> Source:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(
            f"Cannot read {path}.", "It names no model_type.", "Give the config.json of a transformers model."
        )
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"Cannot read {path}.", f"Its architectures are {names!r:.100}, not a list of class names.")
    import transformers

    architecture = names[0]
    if config.get("auto_map"):
        architecture = _native_class(names[0])
        if not architecture:
            raise UnsupportedError(
                f"{path} was given as the model.",
                f"Its class {names[0] or kind} is custom Python code, which brim does not run.",
                "Build the model in a file of yours and give it as file.py:function.",
            )
        if kind not in transformers.CONFIG_MAPPING:  # Kimi K2 is DeepSeek V3 by another name
            kind = getattr(transformers, architecture).config_class.model_type
            config = config | {"model_type": kind}
    if kind not in transformers.CONFIG_MAPPING:
        nearest = unknown("model_type", kind, list(transformers.CONFIG_MAPPING)).todo
        raise UsageError(
            f"Cannot build the model of {path}.",
            f"transformers {transformers.__version__} has no model_type {kind!r}.",
            f"Install a newer version of it. {nearest}",
        )
    return Source(name=name, library="transformers", architecture=architecture, config=config)


def quantization_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the method by which a configuration quantizes its weights and its settings; ``"", {}`` for floating
    weights, ``"unknown"`` for a method without a name."""
    for _, part in parts_of(config):
        for quantization in (part.get("quantization_config"), part.get("quantization")):
            if isinstance(quantization, dict) and quantization:
                return str(quantization.get("quant_method") or "unknown"), quantization
            if quantization:
                return str(quantization), {}
    return "", {}


def quantized_by(source: Source) -> str:
    """Return the method that quantized the model's weights; ``""`` for floating weights.

    Not every configuration names the method (NVIDIA's are in a file of their own), so the files' types count too:
    then the method is the type.
    """
    dtypes = stored_dtypes(source).items()
    packed = (dtype for name, dtype in dtypes if name.endswith("weight") and dtype.startswith(_PACKED))
    return quantization_of(source.config)[0] or next(packed, "")


def check_not_quantized(source: Source) -> None:
    """Raise UnsupportedError for quantized weights, where only the quantization of ``--precision`` is modelled."""
    if (method := quantized_by(source)) and not source.is_catalog:
        raise UnsupportedError(
            f"{source.name} was given as the model.",
            f"Its weights are quantized ({method}). brim estimate and brim plan take them as they are stored, to "
            "generate on one GPU; brim train --method lora and plan files need them in a folder on this machine.",
            "Give --precision bf16, or another, for the unpacked model.",
        )


def weight_type(source: Source) -> WeightType:
    """The type in which transformers loads the weights: the configuration's, else the checkpoint's, else that of a
    part of the configuration. float32, PyTorch's default, where none is given."""
    if source.library != "transformers":
        return WeightType(dtype="float32", origin="default")
    named = [(path, dtype) for path, part in parts_of(source.config) if (dtype := _dtype_of(part))]
    if named and not named[0][0]:
        return WeightType(dtype=named[0][1], origin="dtype of its configuration")
    # That of the first floating tensor, which transformers uses too.
    if stored := next((dtype for dtype in stored_dtypes(source).values() if dtype in _FLOATS), None):
        return WeightType(dtype=stored, origin="the weights of its checkpoint")
    if named:
        return WeightType(dtype=named[0][1], origin=f"{named[0][0]}.dtype of its configuration")
    return WeightType(dtype="float32", origin="default: its configuration names no dtype")


def parts_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the configuration and nested ones with their paths: outer before nested, text before other parts."""
    level: list[tuple[str, Mapping[str, Any]]] = [("", config)]
    while level:
        yield from level
        inner = [
            (f"{path}.{name}".removeprefix("."), value)
            for path, part in level
            for name, value in part.items()
            if name.endswith("config") and isinstance(value, dict)
        ]
        level = sorted(inner, key=lambda entry: _TEXT.search(entry[0].rpartition(".")[2]) is None)


def _dtype_of(part: Mapping[str, Any]) -> str | None:
    for name in ("dtype", "torch_dtype"):
        dtype = str(part.get(name)).removeprefix("torch.")
        if dtype in _FLOATS:
            return dtype
    return None


def stored_dtypes(source: Source) -> dict[str, str]:
    """The types of the tensors in the model's files by their names (``"bfloat16"``); empty if they are unknown."""
    from brim.memory.checkpoint_files import DTYPES  # it imports PyTorch, which takes seconds

    dtypes = {name: DTYPES.get(tensor.dtype) for name, tensor in stored_tensors(source).items()}
    return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}


def stored_tensors(source: Source) -> Mapping[str, Stored]:
    """Return the headers of the model's files by the tensors' names; empty if they are unknown."""
    from brim.memory.checkpoint_files import DTYPES, read_checkpoint

    if source.stored is not None or source.folder is None:
        return source.stored or {}
    if not any((source.folder / name).exists() for name in _CHECKPOINTS):
        return {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: Stored(
            dtype=names[tensor.dtype], bytes=sum(extent.bytes for extent in tensor.extents), shape=tensor.shape
        )
        for name, tensor in read_checkpoint(source.folder).items()
    }


def check_shapes(model: Any, source: Source) -> None:
    """Raise ModelError where a tensor of the files has another size than the model gives it; some are transposed."""
    stored = stored_tensors(source)
    for name, parameter in model.named_parameters():
        tensor = stored.get(name)
        if tensor and tensor.dtype in ("F32", "F16", "BF16") and prod(tensor.shape) != parameter.numel():
            raise other_shape(source.name, name, parameter.shape, tensor.shape)


def other_shape(model: Any, name: str, described: Sequence[int], stored: Sequence[int]) -> ModelError:
    return ModelError(
        f"{model}: by its config, {name} has the shape {list(described)}.",
        f"In the checkpoint its shape is {list(stored)}.",
        "config.json and weights are of different models: fetch them again.",
    )


def keep_apart(config: Any, kind: Any, source: Source) -> None:
    """Change ``config`` not to tie weights of which the files have both, unless the configuration states it.

    transformers loads such weights apart if their values differ.
    """
    if any("tie_word_embeddings" in part for _, part in parts_of(source.config)):
        return
    tied = [name.rpartition(".")[0].rpartition(".")[2] for name in getattr(kind, "_tied_weights_keys", None) or ()]
    if tied and any(name.endswith(f"{part}.weight") for name in stored_dtypes(source) for part in tied):
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False


def _native_class(name: str) -> str:
    """Return transformers' name of the class, which may have other punctuation than in custom code; "" for none."""
    import transformers

    alike = [name, *(candidate for candidate in dir(transformers) if key(candidate) == key(name))]
    return next((name for name in alike if hasattr(getattr(transformers, name, None), "config_class")), "")


def transformers_config(source: Source) -> Any:
    """Build the transformers config object. Raises ModelError where transformers rejects it."""
    from transformers import AutoConfig

    settings = {key: value for key, value in source.config.items() if key not in _NOT_SIZES}
    if wrong := wrong_size(settings):
        raise ModelError(
            f"Cannot build {source.name}.", f"Its configuration has {wrong[0]}={wrong[1]!s:.40}.", "Correct it."
        )
    try:
        config = AutoConfig.for_model(str(source.config["model_type"]), **settings)
    except Exception as error:
        raise ModelError(
            f"Cannot read the configuration of {source.name}.",
            f"transformers does not accept it: {short(error)}",
            "Correct it.",
        ) from error
    if zero := next((name for name in _NEEDED if getattr(config, name, None) == 0), ""):
        raise ModelError(f"Cannot build {source.name}.", f"Its configuration has {zero}=0.", "Correct it.")
    return config


def wrong_size(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first impossible size in a configuration or a part of it. Checked before building: transformers
    builds a model of -3 layers without an error, with no layers."""
    todo: list[tuple[str, Any]] = [*config.items()][::-1]
    while todo:
        name, value = todo.pop()
        if isinstance(value, Mapping):
            todo += [*value.items()][::-1]
        elif isinstance(value, list):
            todo += [(name, item) for item in reversed(value) if not isinstance(item, list)]
        elif type(value) in (int, float):
            is_size = _SIZE.search(name) or name.startswith("num_")
            if (is_size and not value >= 0) or (_COUNT.search(name) and value > _MOST):
                return name, value
    return None


def class_of(config: Any, names: Iterable[str], autos: Iterable[str]) -> Any:
    """transformers' class of one of ``names``, else that of an auto class in ``autos`` for the config, or None."""
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
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, beside)  # for its imports, now and in the function
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
