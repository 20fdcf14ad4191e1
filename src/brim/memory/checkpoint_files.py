"""Read and check safetensors headers and shard indexes, which locate a checkpoint's tensors; weights stay on disk.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from brim.core.files import regular
from brim.errors import ModelError
from brim.memory.file_versions import FileVersion, check_version, remember

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reference implementation
LENGTH_BYTES = 8  # the header's length comes first, little endian
MOST_TENSORS = 1 << 18  # of a checkpoint: twice as many as the largest mixtures of experts store
_MOST_EMPTY_TENSORS = 1 << 10  # they take time and memory, but no bytes of the file
_MOST_DIMENSIONS = 64  # as in PyTorch's own kernels

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# The names that transformers and diffusers write, in the order in which they look.
_WEIGHT_STEMS = ("model", "diffusion_pytorch_model")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Contiguous bytes in a file."""

    path: str
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """A tensor on disk: its bytes, row-major, are the concatenated extents."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_mappable(self) -> bool:
        """True if the mapped file contains the tensor in one piece, aligned for its dtype."""
        return len(self.extents) == 1 and self.extents[0].offset % self.dtype.itemsize == 0


def leading_slices(source: TensorSource) -> list[TensorSource]:
    """Return the sources of ``tensor[0]``, ``tensor[1]``, ... of a source with at least one dimension."""
    count = source.shape[0]
    each = source.bytes // max(1, count)
    slices, extents = [], list(reversed(source.extents))  # the next one last
    for index in range(count):
        parts, missing = [], each if source.extents else 0
        while missing:
            extent = extents.pop()
            part_bytes = min(missing, extent.bytes)
            parts.append(replace(extent, bytes=part_bytes))
            missing -= part_bytes
            if part_bytes < extent.bytes:
                extents.append(replace(extent, offset=extent.offset + part_bytes, bytes=extent.bytes - part_bytes))
        name = f"{source.name}[{index}]"
        slices.append(replace(source, name=name, shape=source.shape[1:], extents=tuple(parts)))
    return slices


def merge_extents(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Join adjacent extents and drop empty ones."""
    merged: list[Extent] = []
    for extent in extents:
        last = merged[-1] if merged else None
        if extent.bytes == 0:
            continue
        if last is not None and last.path == extent.path and last.offset + last.bytes == extent.offset:
            merged[-1] = Extent(path=last.path, offset=last.offset, bytes=last.bytes + extent.bytes)
        else:
            merged.append(extent)
    return tuple(merged)


def read_safetensors_header(path: str | Path) -> dict[str, TensorSource]:
    """Return every tensor of a safetensors file, in the order of their bytes.

    Raises ModelError if the file is missing, shorter or longer than its header says, if the header is invalid, or if
    the tensors' ranges do not cover the data exactly once; TransferError if the file is written to meanwhile.
    """
    path = Path(path).absolute()  # valid after a change of the working directory
    try:
        with regular(path).open("rb") as file:
            version = FileVersion.of(os.fstat(file.fileno()))
            size = version.bytes
            header_bytes = _header_length(path, file.read(LENGTH_BYTES), size)
            raw = file.read(header_bytes)
            check_version(str(path), file.fileno(), version)
    except OSError as error:
        raise ModelError(
            f"Cannot read {path}.", f"{error.strerror}.", "Check the path and the file's permissions."
        ) from error
    _check_count(path, raw.count(b'"data_offsets"'))
    header = _parse_header(path, raw)
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + header_bytes
    sources = [_source(path, name, entry, data_start) for name, entry in header.items()]
    sources.sort(key=lambda source: (source.extents[0].offset, source.bytes))
    _check_ranges(path, sources, data_start, size)
    empty = sum(source.bytes == 0 for source in sources)
    if empty > _MOST_EMPTY_TENSORS:
        raise _damaged(path, f"{empty:,} of its tensors hold no bytes; at most {_MOST_EMPTY_TENSORS:,} may.")
    remember(str(path), version)
    return {source.name: source for source in sources}


def read_checkpoint(directory: str | Path) -> dict[str, TensorSource]:
    """Return every tensor of the checkpoint in ``directory``: a safetensors file, or shards listed by an index.

    Raises ModelError if there is none, if a shard is missing or damaged, if the index names a file outside the
    folder, or if a tensor is not in the shard that the index names. Pickles are never opened.
    """
    directory = Path(directory)
    for stem in _WEIGHT_STEMS:
        single = directory / f"{stem}.safetensors"
        if single.exists() or single.is_symlink():
            return read_safetensors_header(single)
        index = directory / f"{stem}.safetensors.index.json"
        if index.exists():
            return _read_shards(index)
    if any((directory / name).exists() for name in _PICKLES):
        raise ModelError(
            f"Cannot read {directory} as a checkpoint.",
            "It holds its weights as a pickle (.bin) only, and brim never loads pickles: they can run any code.",
            "Convert it once, on a machine where you trust it: "
            "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors.",
        )
    raise ModelError(
        f"Cannot read {directory} as a checkpoint.",
        "It holds neither model.safetensors nor model.safetensors.index.json."
        if directory.is_dir()
        else "There is no such folder.",
        "Give the folder that save_pretrained wrote.",
    )


def _damaged(path: Path, reason: str) -> ModelError:
    todo = "Fetch it again; if brim wrote it into its cache, delete its folder."
    return ModelError(f"Cannot read {path} as safetensors.", reason, todo)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise _damaged(
            path, f"It is {size} bytes long; {LENGTH_BYTES - len(prefix)} bytes of the length are missing."
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"Its first 8 bytes announce a header of {length} bytes; at most {MAX_HEADER_BYTES}.")
    if LENGTH_BYTES + length > size:
        raise _damaged(
            path,
            f"It is truncated: {LENGTH_BYTES + length - size} bytes of its header and all of its data are missing.",
        )
    return length


def _check_count(path: Path, tensors: int) -> None:
    if tensors > MOST_TENSORS:
        raise ModelError(
            f"Cannot open {path}.",
            f"It lists {tensors:,} tensors; at most {MOST_TENSORS:,} are read.",
            "No known model has so many: fetch it again.",
        )


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"Its header is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise _damaged(path, "Its header is not a JSON object.")
    return header


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"the key {name!r:.200} appears twice")
        entries[name] = value
    return entries


def _source(path: Path, name: str, entry: Any, data_start: int) -> TensorSource:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"The header's entry for {name!r} is not dtype, shape and data_offsets: {entry!r:.200}.")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(
            path, f"The header's shape {shape!r:.100} or data_offsets {offsets!r:.100} of {name!r:.200} is wrong."
        )
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _damaged(path, f"{name!r} has the unknown dtype {entry['dtype']!r:.40}; known: {', '.join(DTYPES)}.")
    expected, range_bytes = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != range_bytes:
        raise _damaged(
            path,
            f"{name!r} is {entry['dtype']} of shape {shape}, that is {expected} bytes; its range has {range_bytes}.",
        )
    extent = Extent(path=str(path), offset=data_start + offsets[0], bytes=range_bytes)
    return TensorSource(name=name, dtype=dtype, shape=tuple(shape), extents=(extent,))


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= _MOST_DIMENSIONS
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _check_ranges(path: Path, sources: list[TensorSource], data_start: int, size: int) -> None:
    end = data_start
    for source in sources:
        gap_bytes = source.extents[0].offset - end
        if gap_bytes:
            kind = (
                f"{gap_bytes} bytes before it belong to no tensor"
                if gap_bytes > 0
                else "it overlaps the tensor before"
            )
            raise _damaged(path, f"The header's range of {source.name!r} is wrong: {kind}.")
        end += source.bytes
    if size < end:
        raise _damaged(path, f"It is truncated: {end - size} of its {end} bytes are missing.")
    if size > end:
        raise _damaged(path, f"It is {size - end} bytes longer than its header says.")


def _read_shards(index: Path) -> dict[str, TensorSource]:
    weight_map = _read_index(index)
    shards: dict[str, dict[str, TensorSource]] = {}
    read: dict[Path, dict[str, TensorSource]] = {}  # a file may be listed by many names
    merged: dict[str, TensorSource] = {}
    for shard in sorted(set(weight_map.values())):
        path = _inside(index, shard)
        if not path.exists():
            raise ModelError(
                f"{index} lists the shard {shard}.", "The file is not there.", "Fetch the missing shard."
            )
        file = path.resolve()
        if file not in read:
            read[file] = read_safetensors_header(path)
            # A shard may hold more than the index lists; from_pretrained sees those tensors too.
            merged.update(read[file])
            _check_count(index, len(merged))
        shards[shard] = read[file]
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(
                f"{index} says that {name!r} is in {shard}.",
                "That shard does not hold it.",
                "Index and shards are of different checkpoints: fetch them again.",
            )
        merged[name] = shards[shard][name]
    return merged


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(regular(index).read_bytes().decode("utf-8"), object_pairs_hook=_distinct)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {index}.", f"It is damaged: {error}.", "Fetch it again.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) and shard for shard in weight_map.values()):
        raise ModelError(f"Cannot read {index}.", "It has no weight_map of tensor to file.", "Fetch it again.")
    return weight_map


def _inside(index: Path, shard: str) -> Path:
    """Return the shard's path, which must be in the folder or, by a link of a hub cache, in its blobs."""
    folder = index.parent.resolve()
    outside = ModelError(
        f"{index} lists the shard {shard!r}.",
        "That file is outside the checkpoint's folder.",
        "Do not use this checkpoint, or put its files into one folder and correct the index.",
    )
    relative = PurePosixPath(shard)
    if relative.is_absolute() or ".." in relative.parts or "\\" in shard or "\0" in shard:
        raise outside
    target = (folder / relative).resolve()
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    allowed = [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
    if not any(target.is_relative_to(root) for root in allowed):
        raise outside
    return index.parent / relative
