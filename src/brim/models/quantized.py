"""Open a model with its linear layers quantized, once, into the user's cache folder.

The cached file has the quantized weights and the small tensors between them (norms, biases), so that a block is one
stretch of the file; large wide tensors (embeddings) are read from the original files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from brim.errors import ModelError
from brim.measure.user_cache import build_once, cache_folder, discard, fingerprint
from brim.memory.checkpoint_files import TensorSource, read_checkpoint
from brim.memory.checkpoint_writing import Layout, write_safetensors
from brim.memory.checksums import read_manifest, write_manifest
from brim.models.architecture import BuiltModule
from brim.models.converted import transformers_version
from brim.models.file_tensor import FileTensor
from brim.models.opening import DTYPES, OpenedModel, build, open_model, sources_of
from brim.techniques.blocks import is_transposed, tensor_bytes
from brim.techniques.quantization.linear import quantize_rows
from brim.techniques.quantization.technique import SCHEMES, Quantization, quantize_meta, quantized_layers
from brim.version import __version__

PRECISIONS = (*DTYPES, *SCHEMES)

_SMALL_BYTES = 1 << 20  # of a tensor that is copied into the cached file


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
    model: str | Path,
    quantization: str | Quantization,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> OpenedModel:
    """Open a model as ``open_model`` does, with linear layers as ``QuantizedLinear``.

    The first time, weights are read, quantized and written one at a time; the largest of them, quantized, and a few
    megabytes more are held. What stays wide is in ``dtype``; None: as the config says.

    Raises as ``open_model``, UnsupportedError where nothing can be quantized, ModelError for weights that are not
    finite. A cached file that is not as it was written is made anew, with a warning; values that have changed in it
    are found, by their checksums, when they are read.
    """
    quantization = Quantization.of(quantization)
    directory, name, built = build(model, dtype=dtype, trust_remote_code=trust_remote_code, quantized=False)
    work = _Work(built, quantization)
    quantize_meta(built.module, quantization)
    folder = _written(directory, work, quantization)
    try:
        stored, manifest = _stored(folder, work.layout())
    except ModelError as error:
        warnings.warn(f"{folder} is damaged, so the model is quantized again. {error.found}", stacklevel=2)
        discard(folder)
        folder = _written(directory, work, quantization)
        stored, manifest = _stored(folder, work.layout())
    wide, checksums = sources_of(directory, work.staying())
    tensors = {**wide, **stored}
    return OpenedModel(
        module=built.module,
        sources={n: tensors[n] for n in built.module.state_dict() if n in tensors},
        tied={alias: n for alias, n in built.tied.items() if alias not in work.weights and n in tensors},
        path=directory,
        name=f"{name} ({quantization})",
        checksums={**checksums, **manifest},
        unexpected=built.unexpected,
    )


class _Work:
    """The weights to quantize, and the small tensors that are copied beside them."""

    def __init__(self, built: BuiltModule, quantization: Quantization) -> None:
        self._built, self._quantization = built, quantization
        self.paths = {f"{path}.weight": path for path in quantized_layers(built.module, quantization)}
        self.transposed = {name: is_transposed(built.module.get_submodule(path)) for name, path in self.paths.items()}
        # By its own name, or by that of the wide table that it is tied to.
        self.weights = {name: built.tensors[built.tied.get(name, name)] for name in self.paths}

    def staying(self) -> dict[str, FileTensor]:
        """Tensors read from the original files; also tables that share the values of a layer that is quantized."""
        tensors, tied = self._built.tensors, self._built.tied
        wide = {n: t for n, t in tensors.items() if n not in self.weights and not self._is_small(n)}
        left = {alias: n for alias, n in tied.items() if n in self.weights and alias not in self.weights}
        return wide | {alias: tensors[n] for alias, n in left.items()}

    def _is_small(self, name: str) -> bool:
        return name in self._built.tensors and tensor_bytes(self._built.tensors[name]) <= _SMALL_BYTES

    def layout(self) -> list[Layout]:
        """The file's tensors in the module's order, after its layers are quantized."""
        quantized = {f"{path}.{part}" for path in self.paths.values() for part in ("codes", "scale")}
        state = self._built.module.state_dict()
        return [(n, t.dtype, tuple(t.shape)) for n, t in state.items() if n in quantized or self._is_small(n)]

    def files(self) -> list[Path]:
        """The files that the result depends on."""
        tensors = [*self.weights.values(), *(t for n, t in self._built.tensors.items() if self._is_small(n))]
        return sorted({Path(e.path) for t in tensors for origin in t.origins for e in origin.extents})

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values one at a time."""
        for name, weight in self.weights.items():
            yield from self._quantized(name, weight)
        for name, _, _ in self.layout():
            if self._is_small(name):
                yield name, self._built.tensors[name].materialize()

    def _quantized(self, name: str, weight: FileTensor) -> Iterator[tuple[str, torch.Tensor]]:
        path, turned = self.paths[name], self.transposed[name]
        out, inside = reversed(weight.shape) if turned else weight.shape
        values = weight.materialize() if turned or weight.extents is None else None
        values = values.t() if turned and values is not None else values
        try:
            codes, scale = quantize_rows(self._quantization, out, inside, partial(_rows, weight, values))
        except ValueError as error:
            raise ModelError(
                f"Cannot quantize {name}.", f"The problem: {error}.", "Fetch the checkpoint again."
            ) from error
        yield f"{path}.codes", codes
        yield f"{path}.scale", scale


def _rows(weight: FileTensor, values: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
    """Rows of a weight: read alone where the file has them in one piece."""
    if values is not None:
        return values[start:stop]
    part = weight.detach()[start:stop]
    assert isinstance(part, FileTensor)
    return part.materialize()


def _written(directory: Path, work: _Work, quantization: Quantization) -> Path:
    layout = work.layout()
    versions = (__version__, torch.__version__, transformers_version())
    wide = sorted((name, str(tensor.dtype)) for name, tensor in work.weights.items())
    key = fingerprint(work.files(), *versions, repr(quantization), sorted(map(str, layout)), wide)

    def fill(folder: Path) -> None:
        write_manifest(folder, write_safetensors(folder / "model.safetensors", layout, work.values()))

    return build_once(cache_folder() / "quantized" / f"{directory.resolve().name}-{quantization.scheme}-{key}", fill)


def _stored(folder: Path, layout: list[Layout]) -> tuple[dict[str, TensorSource], dict[str, int]]:
    """The cached folder's tensors and checksums. Raises ModelError where they are not as written."""
    stored, manifest = read_checkpoint(folder), read_manifest(folder) or {}
    expected = {name: (dtype, shape) for name, dtype, shape in layout}
    present = {n: (source.dtype, source.shape) for n, source in stored.items() if n in manifest}
    if expected != present:
        wrong = sorted(name for name in {*expected, *present} if expected.get(name) != present.get(name))
        raise ModelError(
            f"Cannot read the quantized model in {folder}.",
            f"{len(wrong)} of its tensors are not as they were written, or have no checksum, such as {wrong[0]}.",
            "Delete that folder: brim makes it anew.",
        )
    return stored, manifest
