"""The formats of out-of-memory messages: PyTorch 0.3 to 2.15 on every device, and the programs around it.

Sources: ``c10/cuda/CUDACachingAllocator.cpp``, ``c10/cuda/CUDAMallocAsyncAllocator.cpp``, ``c10/xpu``,
``aten/src/ATen/mps``, ``c10/core/impl/alloc_cpu.cpp`` of PyTorch; ``ggml-cuda.cu`` and ``ggml-alloc.c`` of llama.cpp;
XLA's and TensorFlow's BFC allocators; vLLM's workers; SGLang's scheduler; ``mm/oom_kill.c`` of Linux; Slurm's
``slurmstepd``; Ray's memory monitor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from brim.report import listed, read_table

# A size as printed. PyTorch's MB and GB are binary too; some locales write a decimal comma; Kubernetes writes Gi.
SIZE = r"([0-9]{1,20}(?:[.,][0-9]{1,9})?) ?(bytes|[KMGT]iB|[KMGTk][Bb]|[KMGT]i?|B)\b"
# Printed in place of a size that the program does not know.
UNKNOWN = (
    r"(?:N/A|n/a|\[?Not Supported\]?|[Uu]nknown|(?:[Nn]a[Nn]|inf)(?: undefined| [KMGT]i?B)?"
    r"|-1(?:\.0+)? ?(?:[KMGT]i?B?|bytes|B)?)"
)
SIZE_PATTERN = re.compile(rf"(?<![\w.,]){SIZE}")
_UNITS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


Fields = tuple[tuple[str, re.Pattern[str]], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """A kind of message, as ``formats.toml`` describes it."""

    family: str
    start: re.Pattern[str]
    words: tuple[str, ...]
    fields: Fields
    plain: Fields
    device: str = "cuda"
    general: bool = False
    own_line: bool = False


_TABLE = read_table("oom/formats.toml")
SEVERAL_LINES = _TABLE["several_lines"]


def _formats() -> Iterator[Format]:
    for entry in _TABLE["format"]:
        tables = [entry, *(_TABLE["shared"][name] for name in entry.pop("shared", ()))]
        for kind in ("fields", "plain"):
            texts = [item for table in tables for item in table.get(kind, {}).items()]
            entry[kind] = tuple((name, re.compile(text.replace("{}", SIZE))) for name, text in texts)
        start = listed(entry.pop("start"))
        words = listed(entry.pop("words")) if "words" in entry else start
        yield Format(**entry, start=re.compile("|".join(start)), words=words)


FORMATS = tuple(_formats())

_LLAMA_DEVICES = tuple((re.compile(text), kind) for text, kind in _TABLE["llama_devices"].items())
_KINDS_IN_WORDS = tuple((re.compile(text, re.IGNORECASE), kind) for text, kind in _TABLE["kinds"].items())
_DEVICE = re.compile(
    r"\b(?:GPU[ :]|Device )([0-9]+)|\b[NX]PU ([0-9]+)|\bon device:? ?(?:cuda:|ordinal )?([0-9]+)"
    r"|\b(?:CUDA|ROCm|Vulkan|SYCL|CANN)([0-9]+) buffer"
)
_TENSOR = re.compile(r"tensor with shape ?\[([0-9]{1,12}(?:, ?[0-9]{1,12}){0,15})\] and type (\w+)")
_TYPE_BYTES = {"float": 4, "float32": 4, "int32": 4, "half": 2, "bfloat16": 2, "float16": 2, "double": 8, "int64": 8}
_TYPE_BYTES |= {"int8": 1, "uint8": 1, "bool": 1, "int16": 2, "complex64": 8}
PROCESS = re.compile(r"Process ([0-9]+) has " + SIZE + r" memory in use")


def tensor_bytes(text: str) -> int | None:
    """Return the bytes of the tensor in a message of TensorFlow."""
    match = _TENSOR.search(text)
    if match is None or match[2] not in _TYPE_BYTES:
        return None
    return math.prod(int(part) for part in match[1].split(",")) * _TYPE_BYTES[match[2]]


def to_bytes(number: str, unit: str) -> int:
    """Return a printed size in bytes, rounded."""
    scale: int = 1024 ** _UNITS[unit[0].lower()]
    return round(float(number.replace(",", ".")) * scale)


def device_of(text: str, form: Format) -> str:
    """Return the device, such as ``cuda:0``; without a number if the message has none."""
    kind = form.device
    if form.family == "llama.cpp":
        kind = next((name for pattern, name in _LLAMA_DEVICES if pattern.search(text)), kind)
    if form.family == "other":
        kind = next((name for pattern, name in _KINDS_IN_WORDS if pattern.search(text)), kind)
    match = None if kind in ("cpu", "mps", "unknown") else _DEVICE.search(text)
    number = next((group for group in match.groups() if group is not None), None) if match else None
    return kind if number is None else f"{kind}:{number}"


@cache
def unknown_of(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern of a field for unknown numbers."""
    return re.compile(pattern.pattern.replace(SIZE, UNKNOWN))


_NAMES_IN_WORDS = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in _TABLE["names"].items())


def named_by_words(text: str, start: int, end: int, taken: Mapping[str, int]) -> str:
    """Guess the name of a size in an unknown message by the last telling word before it, or the first after."""
    before, after = re.split(r"[,;(]", text[max(0, start - 40) : start])[-1], text[end : end + 20]
    words = [(match.end(), name) for name, pattern in _NAMES_IN_WORDS for match in pattern.finditer(before)]
    words += [
        (-match.start(), name) for name, pattern in _NAMES_IN_WORDS if not words for match in pattern.finditer(after)
    ]
    name = max(words)[1] if words else "size"
    return name if name not in taken else f"size_{len(taken) + 1}"
