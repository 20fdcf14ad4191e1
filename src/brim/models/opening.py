"""Open a model without reading its weights: the module on meta, and where each of its tensors is on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from brim.core.files import regular
from brim.core.options import STORED
from brim.errors import ModelError, UnsupportedError
from brim.estimation.models import Source, quantization_of, weight_type
from brim.estimation.workload import ASKED
from brim.memory.checkpoint_files import TensorSource, read_checkpoint
from brim.memory.checksums import read_manifest, verify_hub_blob
from brim.models.architecture import build_module, model_class, read_config
from brim.models.converted import convert_tensors
from brim.models.file_tensor import FileTensor
from brim.models.gguf import convert_gguf
from brim.models.location import locate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A module whose parameters and persistent buffers are on meta, and the files that hold them.

    ``sources`` has one entry per distinct tensor, by its first name in ``module.state_dict()``; the other names of
    tied tensors are in ``tied`` (alias -> name in ``sources``). Non-persistent buffers are real and on the CPU, and
    so is the rare tensor that a checkpoint may lack and transformers computes; neither has a source.
    ``checksums`` has the known checksums by the names in ``sources``; ``unexpected`` lists the checkpoint's
    tensors that the module has no place for; ``quantization`` is the method by which the files quantize weights.
    """

    module: torch.nn.Module
    sources: dict[str, TensorSource]
    tied: dict[str, str]
    path: Path
    name: str
    checksums: dict[str, int] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    quantization: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of all weights, tied ones counted once."""
        return sum(source.bytes for source in self.sources.values())


def open_model(
    model: str | Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    convert: bool = False,
    quantized: bool = True,
) -> OpenedModel:
    """Open a Hugging Face directory, a ``.gguf`` file or a hub id; no weight is read.

    The module is the class that the config names, built by transformers' own loading code, in ``eval()`` mode and
    with its generation config; only the weights are missing. ``dtype`` None means as the config says. Tensors that
    the files hold in another layout than the module wants are converted once into the user's cache folder; with
    ``convert``, so are weights that are stored in another dtype. Quantized weights stay as they are stored; without
    ``quantized`` a checkpoint that has them is refused.

    Raises ModelError when files are missing, damaged or do not fit the config, UnsupportedError for a quantized
    checkpoint that cannot run here, or one that needs remote code.
    """
    directory, name, config = described_by(model, trust_remote_code=trust_remote_code, quantized=quantized)
    stored = read_checkpoint(directory)
    built = build_module(directory, config, stored, dtype=dtype, trust_remote_code=trust_remote_code)
    if not convert:
        check_dtypes(directory, built.tensors, built.dtype)
    sources, checksums = sources_of(directory, built.tensors)
    return OpenedModel(
        module=built.module,
        sources=sources,
        tied=built.tied,
        path=directory,
        name=name,
        checksums=checksums,
        unexpected=built.unexpected,
        quantization=built.quantization,
    )


def described_by(model: str | Path, *, trust_remote_code: bool, quantized: bool) -> tuple[Path, str, Any]:
    """MODEL's folder, its name and its configuration. Raises as ``open_model``."""
    path = locate(model, trust_remote_code=trust_remote_code)
    name = path.stem if path.is_file() else path.resolve().name if Path(model).exists() else str(model)
    directory = path if path.is_dir() else convert_gguf(path)
    config = read_config(directory, trust_remote_code=trust_remote_code)
    if not quantized and (method := quantization_of(config.to_dict())[0]):
        raise UnsupportedError(
            f"{directory} was given as the model.",
            f"Its weights are quantized ({method}). brim runs them as they are, on one device, and trains adapters "
            "over them; it neither widens, trains nor quantizes them again.",
            "Train by --method lora, leave out a given precision, or give weights of float32, bfloat16 or float16.",
        )
    return directory, name, config


def prepare(model: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Return the local folder of MODEL, downloaded or converted if needed, with its code imported.

    ``open_model`` does the actual loading afterwards, so its memory can be measured alone.
    """
    path = locate(model, trust_remote_code=trust_remote_code)
    directory = path if path.is_dir() else convert_gguf(path)
    model_class(directory, read_config(directory, trust_remote_code=trust_remote_code), trust_remote_code)
    return directory


def verify_files(directory: Path) -> None:
    """Compare every weight file with its checksum; this reads all of their bytes.

    Raises ModelError for a damaged file, UnsupportedError if there is no checksum to compare with: only hub
    downloads (named by their SHA-256) and files that brim wrote (checked whenever they are read) have checksums.
    """
    if read_manifest(directory) is not None:
        return
    for path in sorted(directory.glob("*.safetensors")):
        if not verify_hub_blob(path):
            raise UnsupportedError(
                f"Cannot verify {path}.",
                "It is not in a hub's cache folder, and there are no checksums beside it.",
                "Leave out the verification, or compare it with its source by other means.",
            )


def precision_of(opened: OpenedModel, given: str | None) -> tuple[str, str]:
    """The precision of an opened model, and its origin."""
    if given is not None:
        return given, ASKED
    if opened.quantization:
        return STORED, f"by quantization_config of its configuration ({opened.quantization})"
    config = json.loads(regular(opened.path / "config.json").read_bytes())
    source = Source(name=opened.name, library="transformers", config=config, folder=opened.path)
    return dtype_name(opened.module), weight_type(source).origin_and_type


def dtype_name(module: torch.nn.Module) -> str:
    """``fp32``, ``bf16`` or ``fp16``: the dtype of most weights."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(max(counts, key=lambda dtype: counts[dtype]), "fp32") if counts else "fp32"


def open_tokenizer(opened: OpenedModel) -> Any:
    """The tokenizer beside the model, chat template included. Raises ModelError when there is none."""
    return read_tokenizer(opened.path, opened.name)


def read_tokenizer(folder: Path, name: str) -> Any:
    """The tokenizer in ``folder``, of the model ``name``. Raises ModelError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises any exception of its parsers
        raise ModelError(
            f"Cannot read the tokenizer of {name} from {folder}.",
            f"{' '.join(str(error).split()) or type(error).__name__:.300}",
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) into that folder.",
        ) from error


def sources_of(directory: Path, tensors: dict[str, FileTensor]) -> tuple[dict[str, TensorSource], dict[str, int]]:
    """The tensors' places on disk in the module's layout, converted now if needed, and the known checksums."""
    manifest = read_manifest(directory) or {}
    sources, checksums, rest = {}, {}, {}
    for name, tensor in tensors.items():
        if tensor.extents is None:
            rest[name] = tensor
            continue
        sources[name] = TensorSource(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), extents=tensor.extents)
        whole = len(tensor.origins) == 1 and tensor.origins[0].bytes == sources[name].bytes
        if whole and tensor.origins[0].name in manifest:
            checksums[name] = manifest[tensor.origins[0].name]
    if rest:
        converted, converted_checksums = convert_tensors(directory, rest)
        sources.update(converted)
        checksums.update(converted_checksums)
    return {name: sources[name] for name in tensors}, checksums


def check_dtypes(directory: Path, tensors: dict[str, FileTensor], main: torch.dtype) -> None:
    """Raise ModelError where stored and required dtypes differ by more than transformers' usual exceptions.

    ``main`` is the dtype the model is built in. Exceptions that are converted: a few tensors stored wider than
    ``main`` (float32 norms of a bfloat16 model), and those that the model itself keeps in another dtype.
    """
    casts = {
        name: (stored, tensor.dtype)
        for name, tensor in tensors.items()
        for stored in {origin.dtype for origin in tensor.origins}
        if stored != tensor.dtype
    }
    for name, (stored, wanted) in casts.items():
        if not _may_cast(stored, wanted, main):
            raise ModelError(
                f"{directory}: the model needs {name} in {_word(wanted)}.",
                f"It is stored in {_word(stored)}.",
                "The checkpoint does not match the dtype in its config.json: fetch it again or save it anew.",
            )
    cast_bytes = sum(origin.bytes for name in casts for origin in tensors[name].origins)
    all_bytes = sum(origin.bytes for tensor in tensors.values() for origin in tensor.origins)
    if 2 * cast_bytes > all_bytes:
        name, (stored, wanted) = max(casts.items(), key=lambda item: tensors[item[0]].numel())
        raise ModelError(
            f"Cannot open {directory} in {_word(main)}.",
            f"Most of its weights, such as {name}, are stored in {_word(stored)}.",
            f"Weights are streamed as they are stored: ask for {_word(stored)}, or save the model in {_word(wanted)} "
            "first (from_pretrained(DIR, dtype=...).save_pretrained(NEW_DIR)).",
        )


def _may_cast(stored: torch.dtype, wanted: torch.dtype, main: torch.dtype) -> bool:
    if not stored.is_floating_point or not wanted.is_floating_point:
        return not stored.is_floating_point and not wanted.is_floating_point
    if stored.itemsize < 2 or wanted.itemsize < 2:
        return False  # eight bits are a quantization: they need their scales
    return wanted != main or torch.promote_types(stored, wanted) == stored


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
