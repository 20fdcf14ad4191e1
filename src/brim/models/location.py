"""Find MODEL before anything large is loaded: most mistakes are typing mistakes."""

from __future__ import annotations

from pathlib import Path

from brim import catalog
from brim.core.files import special_file
from brim.errors import ModelError, UsageError
from brim.estimation.hub import has_weights, hub_errors, is_hub_id, split_revision

# Files of weights as safetensors, of a config and of a tokenizer; none that can run code.
_HUB_PATTERNS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "*.jinja",
)


def locate(model: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The local file or folder of MODEL; a hub id is fetched first.

    Raises ModelError where it is missing or cannot be fetched, UsageError where it is no model.
    """
    folder = local(model)
    return _fetch(str(model), trust_remote_code) if folder is None else folder


def local(model: str | Path) -> Path | None:
    """The file or folder that MODEL names; None for a possible hub id. Raises as ``locate``."""
    path = expanded(model)
    try:
        if path.is_dir():
            return _checked(path)
        is_file, is_there = path.is_file(), path.exists()
    except OSError as error:
        raise ModelError(f"{model} was given as the model.", f"{error.strerror}.", "Check the path.") from error
    if is_there and (not is_file or path.suffix.lower() != ".gguf"):
        raise UsageError(
            f"{path} was given as the model.", "It is neither a folder nor a .gguf file.", "Give its folder."
        )
    if is_file:
        return path
    text = model if isinstance(model, str) else ""  # a Path is no name of a model
    is_name = is_hub_id(text) or ("/" not in text and text not in ("", ".", "..", "~"))
    if not is_name or path.suffix.lower() in (".gguf", ".safetensors", ".bin"):
        raise ModelError(f"{model} was given as the model.", "There is no such file or folder.", "Check the path.")
    return None


def expanded(model: str | Path) -> Path:
    """Expand ``~`` to the home folder. Raises ModelError for an unknown user."""
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{model} was given as the model.", f"{error}", "Write the path in full.") from error


def _checked(folder: Path) -> Path:
    """Raise an error for pipes and devices: libraries would open a pipe and wait forever."""
    if (special := special_file(folder)) is not None:
        raise ModelError(
            f"{folder} was given as the model.",
            f"{special[0]}: {special[1]}.",
            "Give the folder that was fetched or saved.",
        )
    return folder


def _repository(model: str) -> str:
    """The hub id of a name; for a name of the catalog, that of its configuration."""
    try:
        ids = catalog.model(model).hub_ids
    except UsageError:
        return model
    return model if model in ids or not ids else ids[0]


def _fetch(model: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import model_info, snapshot_download

    repository, revision = split_revision(_repository(model))
    patterns = [*_HUB_PATTERNS, "*.py"] if trust_remote_code else list(_HUB_PATTERNS)
    with hub_errors(model, repository):
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
        if not has_weights(folder):  # also returned where the hub does not answer: what an estimate has fetched
            model_info(repository, revision=revision)
            raise ModelError(
                f"{repository} was given as the model.",
                "It has no weights as safetensors, or they could not all be fetched.",
                "Try again, or give a model with model.safetensors.",
            )
    return folder
