"""Convert a GGUF file, once, into a folder in the usual form: safetensors, config, tokenizer, manifest.

Names and arrangement of the weights are transformers' own (``modeling_gguf_pytorch_utils``), and so is the result,
bit for bit; but one tensor at a time is in memory, not the model. A separate process converts, because parsing a GGUF
vocabulary alone needs more memory than some budgets have.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from brim.core.files import regular
from brim.errors import BrimError, ModelError, TransferError, UnsupportedError
from brim.estimation.models import wrong_size
from brim.measure.user_cache import build_once, cache_folder, fingerprint
from brim.memory.checkpoint_writing import Layout, write_safetensors
from brim.memory.checksums import write_manifest
from brim.models.architecture import limited_modules
from brim.processes import end_with_parent, python_command
from brim.version import __version__

_REFUSED = 3  # the child's exit code for an error that it explains on its standard output
_ERRORS = {kind.__name__: kind for kind in (ModelError, TransferError, UnsupportedError)}
_ROWS_BYTES = 16 << 20  # dequantization creates several copies of its input


def convert_gguf(path: Path) -> Path:
    """Return the folder in the user's cache with the dequantized weights of ``path``; create it if it is missing.

    Raises ModelError when the file is no GGUF, damaged or cut short, UnsupportedError when transformers does not
    know its architecture, TransferError when the disk fails.
    """
    check_header(path)
    from importlib.metadata import version

    facts = __version__, version("transformers"), version("gguf")
    key = fingerprint([path], *facts)

    def fill(folder: Path) -> None:
        _run_child(path, folder)
        if fingerprint([path], *facts) != key:
            raise TransferError(
                f"Cannot convert {path}.",
                "The file changed during the conversion: the result may mix two models.",
                "Start again, and do not change the file while it is in use.",
            )

    return build_once(cache_folder() / "gguf" / f"{path.stem}-{key}", fill)


def _run_child(path: Path, folder: Path) -> None:
    command = python_command("-m", "brim.models.gguf", path.resolve(), folder, str(os.getpid()))
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode == _REFUSED:
        error = json.loads(child.stdout.splitlines()[-1])
        raise _ERRORS[error["kind"]](error["request"], error["reason"], error["todo"])
    if child.returncode:
        last = next(iter(reversed(child.stderr.strip().splitlines())), f"exit code {child.returncode}")
        raise _damaged(path, f"The conversion ended with: {last:.300}")


def _main(path: Path, folder: Path) -> int:
    _parse_once()
    try:
        _convert(path, folder)
    except BrimError as error:
        return _refuse(error)
    except OSError as error:
        return _refuse(TransferError(f"Cannot convert {path} into {folder}.", f"{error}.", "Check both disks."))
    return 0


def _refuse(error: BrimError) -> int:
    facts = {"kind": type(error).__name__, "request": error.request, "reason": error.reason, "todo": error.todo}
    print(json.dumps(facts))
    return _REFUSED


def _parse_once() -> None:
    """Parse the vocabulary once for config, tokenizer and weights, in this process: each would take seconds."""
    import gguf

    module: Any = gguf
    module.GGUFReader = cache(gguf.GGUFReader)
    module.get_tensor_name_map = cache(gguf.get_tensor_name_map)


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    reader = open_gguf(path)
    with _read_by_transformers(path, "metadata"):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    if wrong := wrong_size(config.to_dict()):
        raise _damaged(path, f"By its metadata, its {wrong[0]} is {wrong[1]!s:.40}.")
    model_class = _model_class(path, config)
    with _read_by_transformers(path, "sizes"), torch.device("meta"), limited_modules(path, len(reader.tensors)):
        module = model_class(config)
    layout, tensors = _weights(path, reader, module)
    config.architectures, config.dtype = [model_class.__name__], layout[0][1]
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    with _read_by_transformers(path, "tokenizer"):
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    write_manifest(folder, write_safetensors(folder / "model.safetensors", layout, tensors, {"format": "pt"}))


@contextmanager
def _read_by_transformers(path: Path, what: str) -> Iterator[None]:
    """Refuse the file where transformers rejects its ``what``, by any of its exceptions."""
    try:
        yield
    except (BrimError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's error, not transformers' own
            raise
        raise UnsupportedError(
            f"Cannot convert {path}.",
            f"transformers does not accept its {what}: {' '.join(str(error).split()) or type(error).__name__:.300}",
            "Give the model's safetensors folder instead.",
        ) from error


def open_gguf(path: Path) -> Any:
    """Return gguf's reader of the file. Raises ModelError for a file that is damaged or cut short."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # the reader trusts the file, so damage shows as any error at all
        raise _damaged(path, f"It is damaged or cut short: {error}.") from error
    size = path.stat().st_size
    missing_bytes = max((tensor.data_offset + tensor.n_bytes - size for tensor in reader.tensors), default=0)
    if missing_bytes > 0:
        raise _damaged(path, f"It is truncated: {missing_bytes} bytes are missing.")
    _check_ranges(path, reader)
    return reader


def _check_ranges(path: Path, reader: Any) -> None:
    """Raise ModelError unless each tensor begins at the end of the previous one, except for alignment padding.

    The format requires this, and llama.cpp refuses other files: overlapping tensors are no model.
    """
    end, before = reader.data_offset, "the header"
    for tensor in sorted(reader.tensors, key=lambda tensor: (tensor.data_offset, tensor.n_bytes)):
        begin = -(-int(end) // reader.alignment) * reader.alignment
        if tensor.data_offset != begin:
            wrong = "overlaps" if tensor.data_offset < end else "does not begin directly after"
            raise _damaged(
                path, f"{tensor.name}, at byte {tensor.data_offset}, {wrong} {before}, which ends at byte {end}."
            )
        end, before = tensor.data_offset + tensor.n_bytes, tensor.name


def _model_class(path: Path, config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise UnsupportedError(
        f"Cannot convert {path}.",
        f"transformers {transformers.__version__} has no model class for {config.model_type}.",
        "Install a newer version of transformers.",
    )


def _weights(path: Path, reader: Any, module: Any) -> tuple[list[Layout], Iterator[tuple[str, torch.Tensor]]]:
    """The new file's layout, and its tensors one at a time: dequantized, and arranged as transformers does."""
    from transformers import modeling_gguf_pytorch_utils

    legacy: Any = modeling_gguf_pytorch_utils
    architecture = reader.fields["general.architecture"].contents()
    if _has_new_loader(architecture):
        return _whole_model(path, type(module))
    parsed: dict[str, Any] = legacy.load_gguf_checkpoint(str(path), return_tensors=False)
    processor = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)(config=parsed["config"])
    names = legacy.get_gguf_hf_weights_map(module, processor)
    # Experts' gate and up are one tensor of the module, complete with its last part.
    parts = Counter(target for tensor in reader.tensors if (target := _target(names, tensor.name)))
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    layout = [(name, torch.float32, shapes[name]) for name in parts]
    parsed["tensors"] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in reader.tensors:
            target = _target(names, tensor.name)
            if target is None:
                continue
            done = processor.process(
                weights=_dequantize(path, tensor),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters=parsed,
            )
            parts[target] -= 1
            if done.name in names:
                yield _checked(path, target, torch.from_numpy(np.ascontiguousarray(done.weights)), shapes)
            elif parts[target] == 0 and target in parsed["tensors"]:
                yield _checked(path, target, parsed["tensors"].pop(target), shapes)

    return layout, tensors()


def _target(names: dict[str, str], gguf_name: str) -> str | None:
    return names.get(gguf_name) or names.get(gguf_name.removesuffix(".weight"))


def _checked(
    path: Path, name: str, tensor: torch.Tensor, shapes: dict[str, tuple[int, ...]]
) -> tuple[str, torch.Tensor]:
    if tuple(tensor.shape) != shapes[name]:
        raise ModelError(
            f"{path}: by its metadata, {name} has the shape {list(shapes[name])}.",
            f"In the file its shape is {list(tensor.shape)}.",
            "Fetch the file again.",
        )
    return name, tensor.to(torch.float32)


def _dequantize(path: Path, tensor: Any) -> Any:
    """float32 of the tensor's shape, dequantized some rows at a time."""
    from gguf import dequantize

    stored = np.memmap(path, mode="r", dtype=np.uint8, offset=tensor.data_offset, shape=(tensor.n_bytes,))
    rows = stored.view(tensor.data.dtype).reshape(-1, tensor.data.shape[-1])
    shape = tuple(int(size) for size in reversed(tensor.shape))
    out = np.empty((len(rows), shape[-1]), dtype=np.float32)
    step = max(1, _ROWS_BYTES // (4 * shape[-1]))
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return out.reshape(shape)


def _has_new_loader(architecture: str) -> bool:
    """Return True if transformers has a new loader for it, which cannot convert one tensor at a time."""
    from transformers.integrations import gguf as integration

    return architecture in getattr(integration, "GGUF_ARCHS", ())


def _whole_model(path: Path, model_class: Any) -> tuple[list[Layout], Iterator[tuple[str, torch.Tensor]]]:
    from transformers import GgufConfig

    module = model_class.from_pretrained(
        str(path.parent), gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )
    seen: dict[int, str] = {}
    state = {name: t for name, t in module.state_dict(keep_vars=True).items() if seen.setdefault(id(t), name) == name}
    return [(name, t.dtype, tuple(t.shape)) for name, t in state.items()], iter(state.items())


# The header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is checked before a library reads it, because
# its counts become loops there.
_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a value, by its type
_STRING, _ARRAY = 8, 9
_LEAST_ENTRY_BYTES = 8 + 4 + 1  # a key's length, a type, a value
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # a name's length, dimensions, type, offset
_MOST_KEY_BYTES = (1 << 16) - 1  # as the format says
_MOST_DEPTH, _MOST_DIMENSIONS = 4, 8
_MOST_VALUES = 1 << 22  # in all arrays: a library needs microseconds for each, and vocabularies have a tenth as many
_MOST_TOKEN_BYTES = 1 << 10  # of a text in an array: a library tries every division of a token in two
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}  # of whole numbers, by their type
# Ends of keys for sizes that must not exceed the largest dimension of the tensors.
_DIMENSIONS = (".embedding_length", ".feed_forward_length", ".head_count", ".expert_count", ".vocab_size")


def check_header(path: Path) -> None:
    """Raise ModelError if a count or length in the header of ``path`` exceeds the file."""
    try:
        with regular(path).open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ValueError(f"It begins with {magic!r}, not with {_MAGIC!r}")
            _Header(file, size_bytes).check()
    except OSError as error:
        raise ModelError(f"Cannot read {path} as GGUF.", f"{error.strerror}.", "Check the path.") from error
    except ValueError as error:
        raise _damaged(path, f"{error}.") from error


class _Header:
    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._size = file, size_bytes
        self._order, self._values = "<", 0

    def check(self) -> None:
        version = self._number("I")
        if version & 0xFFFF == 0:  # as written by a machine of the other byte order
            self._order, version = ">", version >> 24
        if version < 2:
            raise ValueError(f"It is of version {version} of the format; versions from 2 on are read")
        tensors, entries = self._number("Q"), self._number("Q")
        self._has_room(entries, _LEAST_ENTRY_BYTES, "entries of metadata")
        self._has_room(tensors, _LEAST_TENSOR_BYTES, "tensors")
        sizes, largest = dict[str, int](), 0
        for _ in range(entries):
            key, kind = self._text(self._number("Q")), self._number("I")
            if kind in _FORMATS:
                sizes[key] = self._number(_FORMATS[kind])
            else:
                self._value(kind, 0)
        for _ in range(tensors):
            self._skip(self._number("Q"))
            dimensions = self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"A tensor has {dimensions} dimensions")
            largest = max([largest, *(self._number("Q") for _ in range(dimensions))])
            self._skip(4 + 8)
        if (count := sizes.get("split.count", 1)) > 1:
            raise UnsupportedError(
                f"{self._file.name} was given as the model.",
                f"It is one of {count} files, and transformers reads one.",
                "Join them by llama-gguf-split --merge FIRST_FILE JOINED_FILE.",
            )
        for key, size in sizes.items():
            if key.endswith(".block_count") and not 0 <= size <= tensors:
                raise ValueError(f"Its {key} is {size}, and it has {tensors} tensors")
            if key.endswith(_DIMENSIONS) and not 0 <= size <= largest:
                raise ValueError(f"Its {key} is {size}, and the largest dimension of its tensors is {largest}")

    def _value(self, kind: int, depth: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY and depth < _MOST_DEPTH:
            inner, count = self._number("I"), self._number("Q")
            self._has_room(count, _SIZES.get(inner, 8), "values")
            self._values += count
            if self._values > _MOST_VALUES:
                raise ValueError(f"Its arrays have {self._values} values; at most {_MOST_VALUES} are read")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
                return
            for _ in range(count):
                if inner != _STRING:
                    self._value(inner, depth + 1)
                    continue
                length = self._number("Q")
                if length > _MOST_TOKEN_BYTES:
                    raise ValueError(f"A text has {length} bytes in an array; at most {_MOST_TOKEN_BYTES} are read")
                self._skip(length)
        else:
            raise ValueError(f"A value is of the unknown type {kind}, or arrays are nested too deep")

    def _text(self, length: int) -> str:
        self._has_room(length, 1, "bytes")
        if length > _MOST_KEY_BYTES:
            raise ValueError(f"A key has {length} bytes; at most {_MOST_KEY_BYTES} are allowed")
        return self._file.read(length).decode("utf-8", "replace")

    def _number(self, code: str) -> int:
        size = struct.calcsize(code)
        raw = self._file.read(size)
        if len(raw) < size:
            raise ValueError("It is cut short: its header is not complete")
        return int(struct.unpack(self._order + code, raw)[0])

    def _skip(self, count: int) -> None:
        self._has_room(count, 1, "bytes")
        self._file.seek(count, os.SEEK_CUR)

    def _has_room(self, count: int, each_bytes: int, what: str) -> None:
        left = self._size - self._file.tell()
        if count * each_bytes > left:
            raise ValueError(f"Its header announces {count} {what}, and only {left} bytes follow")


def _damaged(path: Path, problem: str) -> ModelError:
    return ModelError(f"Cannot read {path} as GGUF.", problem, "Fetch the file again.")


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    sys.exit(_main(Path(sys.argv[1]), Path(sys.argv[2])))
