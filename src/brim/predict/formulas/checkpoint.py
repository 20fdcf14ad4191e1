"""Weights from a count, from a checkpoint's safetensors headers, or from a file's size and dtype alone."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from brim.core.files import regular
from brim.errors import ModelError
from brim.predict.formulas.result import Result, at_least_one, item_bytes, result, written_bytes

_LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit


def weights(parameters: int, dtype: str = "float32") -> Result:
    """Bytes of that many parameters, in decimal and binary gigabytes too, since papers mix the two."""
    at_least_one(parameters=parameters)
    size = result(parameters * item_bytes(dtype), "B", f"{parameters:,} x {written_bytes(dtype)}")
    if size.value < 1e7:
        return size
    gigabytes = f"{size.arithmetic} = {size.value / 1e9:,.2f} GB = {size.value / 2**30:,.2f} GiB"
    return Result(value=size.value, unit="B", arithmetic=gigabytes)


def parameters_from_size(file_bytes: int, dtype: str) -> Result:
    """Parameters in a weights file of that size: its header (some KB in gigabytes) is counted as weights."""
    at_least_one(file_bytes=file_bytes)
    count = Fraction(file_bytes) / item_bytes(dtype)
    return result(count, "parameters", f"{file_bytes:,} B / {written_bytes(dtype)}")


def checkpoint_weights(path: str | Path) -> Result:
    """Bytes of all tensors in a ``.safetensors`` file, or in all of them in a directory, from the headers alone.

    Raises ModelError where there is none or a header is damaged.
    """
    where = Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    if not files:
        raise ModelError(f"Cannot find the weights in {where}.", "It has no .safetensors file.")
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for file in files:
        for entry in _header(file).values():
            first, last = entry["data_offsets"]
            tensors[entry["dtype"]] += 1
            sizes[entry["dtype"]] += last - first
    text = " + ".join(f"{tensors[kind]:,} {kind} tensors of {sizes[kind]:,} B" for kind in sorted(sizes))
    return result(sum(sizes.values()), "B", text or "no tensors", source=f"{len(files)} safetensors headers")


def _header(file: Path) -> Mapping[str, Any]:
    """The header: 8 bytes of its length, then JSON of name -> dtype, shape, data_offsets."""
    try:
        with regular(file).open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER_BYTES:
                raise ValueError(f"it announces a header of {length:,} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not (type(first) is type(last) is int and 0 <= first <= last and isinstance(entry["dtype"], str)):
                raise ValueError(f"tensor {name!r} lies at {entry['data_offsets']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelError(f"Cannot read the safetensors header of {file}.", f"{error}.") from error
    return dict(header)
