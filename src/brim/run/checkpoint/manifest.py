"""The manifest of a training checkpoint: every file, every tensor, a checksum for each and one over the manifest.

The manifest is written last. A folder without one, or with one that does not match its own checksum, is no
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.core import codec
from brim.core.files import regular
from brim.errors import FormatError, ModelError

MANIFEST_NAME = "brim.checkpoint.json"
VERSION = 1

_STEP = re.compile(r"step-(\d{6,})(\.old)?")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """``dtype`` is safetensors' code (``BF16``); ``checksum`` is ``memory.checksums`` of the bytes, 16 hex digits."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """``checksum`` covers the entire file; of a safetensors file only its header, as each tensor has its own."""

    bytes: int
    checksum: str
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``state``: JSON that the training loop needs to resume (RNG, position in the data, optimizer's numbers)."""

    brim: str
    step: int
    files: Mapping[str, FileEntry]
    state: Mapping[str, Any]


def to_text(manifest: Manifest) -> str:
    """Raises TypeError when ``state`` is not JSON."""
    document = json.loads(json.dumps(codec.to_json(manifest, VERSION)))  # keys become strings, as after reading
    return json.dumps(document | {"checksum": _digest(document)}, indent=0)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``. Raises ModelError when there is none or it is damaged."""
    path = folder / MANIFEST_NAME
    asked = f"Cannot read {folder} as a training checkpoint."
    try:
        document = json.loads(regular(path).read_bytes().decode("utf-8"))
        claimed = document.pop("checksum")
    except FileNotFoundError as error:
        raise ModelError(asked, f"It has no {MANIFEST_NAME}.", "Give a folder that brim train wrote.") from error
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(asked, f"{MANIFEST_NAME} is damaged: {error!r:.200}.") from error
    if claimed != _digest(document):
        raise ModelError(asked, f"{MANIFEST_NAME} is damaged: its checksum does not match.")
    try:
        manifest = codec.from_json(Manifest, document, VERSION)
    except FormatError as error:
        raise ModelError(asked, f"{MANIFEST_NAME}: {error.reason}", error.todo) from error
    outside = next((name for name in manifest.files if name == ".." or Path(name).name != name), None)
    if outside is not None:
        raise ModelError(asked, f"{MANIFEST_NAME} lists {outside!r}, which is not a file of this folder.")
    return manifest


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def partial_folder(folder: Path) -> Path:
    """The hidden folder of a checkpoint while it is written or deleted; readers ignore it."""
    return folder.with_name(f".{folder.name}.partial")


def set_aside(folder: Path) -> Path:
    """The folder of a checkpoint while another of the same step replaces it; it is still valid."""
    return folder.with_name(f"{folder.name}.old")


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder), newest first; within a step, the folder that was set aside comes last."""
    if not root.is_dir():
        return []
    folders = [(match, path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()]
    folders.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))
    return [(int(match[1]), path) for match, path in folders]


def _digest(document: Any) -> str:
    text = json.dumps(document, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
