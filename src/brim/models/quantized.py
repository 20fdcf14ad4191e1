"""Open a checkpoint of 16 bits in 8 or 4: bitsandbytes quantizes its weights, once, into the user's cache folder.

The cached folder is a checkpoint as transformers writes it, and is opened as any other that is quantized. Weights are
quantized on the CPU, also where there is a GPU, so the cached values are the same for all devices.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brim.core.files import regular
from brim.errors import ModelError, UnsupportedError, UsageError
from brim.measure.user_cache import build_once, cache_folder, discard, fingerprint
from brim.memory.checkpoint_files import read_checkpoint
from brim.memory.checkpoint_writing import Layout, write_safetensors
from brim.memory.checksums import read_manifest, write_manifest
from brim.models.architecture import BuiltModule, build_module
from brim.models.converted import transformers_version
from brim.models.opening import DTYPES, OpenedModel, described_by, open_model
from brim.models.prequantized import Quantizer
from brim.requests.plan import LOSSY
from brim.version import __version__

PRECISIONS = (*DTYPES, *LOSSY)

_WEIGHTS = "model.safetensors"
_COPIED = ("generation_config.json", "*.py")  # of the model's folder: code is imported only if the user allows it


def open_as(
    model: str | Path, precision: str | None, *, trust_remote_code: bool = False, quantized: bool = True
) -> OpenedModel:
    """Open ``model`` in one of ``PRECISIONS``, converted where it is stored in another; None: as it is stored, unless
    it is quantized and ``quantized`` is False."""
    if precision is None or precision in DTYPES:
        dtype = DTYPES[precision] if precision else None
        quantized, convert = quantized and precision is None, precision is not None
        return open_model(
            model, dtype=dtype, trust_remote_code=trust_remote_code, convert=convert, quantized=quantized
        )
    return open_quantized(model, precision, trust_remote_code=trust_remote_code)


def open_quantized(
    model: str | Path, precision: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> OpenedModel:
    """Open a model as ``open_model`` does, with its linear layers quantized by bitsandbytes.

    The first time, weights are read, quantized and written one at a time. What stays wide is in ``dtype``; None: as
    the config says.

    Raises as ``open_model``, UsageError for an unknown precision, UnsupportedError without bitsandbytes or where
    nothing can be quantized, ModelError for weights that are not finite. A cached folder that is not as it was
    written is made anew, with a warning; values that changed in it are found by their checksums when they are read.
    """
    if precision not in LOSSY:
        raise UsageError(
            f"Cannot quantize to {precision!r}.",
            f"Known: {', '.join(LOSSY)}, both by bitsandbytes.",
            "A checkpoint that is stored in another form (float8 by compressed-tensors or torchao) runs as it is.",
        )
    directory, name, config = described_by(model, trust_remote_code=trust_remote_code, quantized=False)
    work = _Work(directory, config, precision, dtype, trust_remote_code)
    folder = work.written()
    try:
        opened = _opened(folder, dtype, trust_remote_code)
    except ModelError as error:
        warnings.warn(f"{folder} is damaged, so the model is quantized again. {error.reason}", stacklevel=2)
        discard(folder)
        opened = _opened(work.written(), dtype, trust_remote_code)
    return replace(opened, path=directory, name=f"{name} ({precision})")


def _opened(folder: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> OpenedModel:
    """Open the cached folder. Raises ModelError where it is not as it was written."""
    wrong = sorted(set(read_checkpoint(folder)) ^ set(read_manifest(folder) or {}))
    if wrong:
        raise ModelError(
            f"Cannot read the quantized model in {folder}.",
            f"{len(wrong)} of its tensors have no checksum, or are missing, such as {wrong[0]}.",
            "Delete that folder: brim makes it anew.",
        )
    return open_model(folder, dtype=dtype, trust_remote_code=trust_remote_code)


def settings_of(precision: str, dtype: torch.dtype | None) -> Any:
    """transformers' configuration of bitsandbytes for ``precision``; products are computed in ``dtype``."""
    from transformers import BitsAndBytesConfig

    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def give_quantized_layers(model: nn.Module, name: str, precision: str) -> None:
    """Give a model without values the layers and parameters of one that is opened in ``precision``.

    Raises UnsupportedError without bitsandbytes, or where nothing can be quantized.
    """
    quantizer = Quantizer(Path(name), "bitsandbytes", (), settings_of(precision, model.dtype))  # type: ignore[arg-type]
    quantizer.give_layers(model)
    _check_any(quantizer, model, precision)


def _check_any(quantizer: Quantizer, model: nn.Module, precision: str) -> None:
    if not quantizer.wide:
        raise UnsupportedError(
            f"Cannot use precision {precision} for {type(model).__name__}.",
            "None of its layers are linear ones that can be quantized.",
            "Use bf16.",
        )


class _Work:
    """A model to quantize, and its folder in the cache."""

    def __init__(
        self, directory: Path, config: Any, precision: str, dtype: torch.dtype | None, trust_remote_code: bool
    ) -> None:
        self._directory, self._config, self._trust_remote_code = directory, config, trust_remote_code
        self._dtype = dtype or getattr(config, "dtype", None)
        self._precision, self._settings = precision, settings_of(precision, self._dtype)
        self._stored = read_checkpoint(directory)

    def written(self) -> Path:
        """The folder, filled if it is not there."""
        versions = (__version__, torch.__version__, transformers_version())
        copied = [path for pattern in _COPIED for path in self._directory.glob(pattern)]
        files = {Path(extent.path) for source in self._stored.values() for extent in source.extents}
        key = fingerprint(sorted({*files, *copied}), *versions, self._settings.to_json_string(), self._raw_config())
        name = f"{self._directory.resolve().name}-{self._precision}-{key}"

        def fill(folder: Path) -> None:
            built = build_module(
                self._directory,
                self._config,
                self._stored,
                dtype=self._dtype,
                trust_remote_code=self._trust_remote_code,
                settings=self._settings,
            )
            assert built.quantizer is not None
            _check_any(built.quantizer, built.module, self._precision)
            layout, values = _layout(built, built.quantizer), _values(built, built.quantizer)
            write_manifest(folder, write_safetensors(folder / _WEIGHTS, layout, values, {"format": "pt"}))
            for path in copied:
                shutil.copy(path, folder)
            stated = {
                "quantization_config": self._settings.to_dict(),
                "dtype": str(built.dtype).removeprefix("torch."),
            }
            (folder / "config.json").write_text(json.dumps(self._raw_config() | stated, indent=2) + "\n")

        return build_once(cache_folder() / "quantized" / name, fill)

    def _raw_config(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads(regular(self._directory / "config.json").read_bytes())
        return raw


def _layout(built: BuiltModule, quantizer: Quantizer) -> list[Layout]:
    """The file's tensors in the module's order."""
    layout: list[Layout] = []
    for name, tensor in built.tensors.items():
        parts: dict[str, torch.Tensor] = {name: tensor}
        if name in quantizer.wide:
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            parts = quantizer.quantized(built.module, name, shape)
        layout += [(part, value.dtype, tuple(value.shape)) for part, value in parts.items()]
    return layout


def _values(built: BuiltModule, quantizer: Quantizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and values one weight at a time."""
    for name, tensor in built.tensors.items():
        if name in quantizer.wide:
            yield from quantizer.quantized(built.module, name, tensor.materialize()).items()
        else:
            yield name, tensor.materialize()
