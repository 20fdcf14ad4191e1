"""Read a model's configuration and the headers of its weights from the Hugging Face hub; never the weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brim.errors import BrimError, ModelError, first_line
from brim.measure.user_cache import cache_folder, load_text, store_text

_LOGIN = "Accept its conditions on its page, then log in with `hf auth login` or set HF_TOKEN."


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a safetensors file; ``dtype`` as in its header (``"BF16"``, ``"U8"``)."""

    dtype: str
    bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub. ``folder`` is its snapshot in the hub's cache: with its configuration, and weights where
    ``has_weights``. ``tensors`` are the headers of other weights; None: not in safetensors, or not to be had, with
    the reason in ``problem``."""

    repository: str
    folder: Path
    has_weights: bool
    tensors: Mapping[str, Stored] | None = None
    problem: str = ""


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``org/name@revision`` into the repository and the revision, None without one."""
    repository, _, revision = name.partition("@")
    return repository, revision or None


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form ``org/name``, with or without a revision."""
    parts = split_revision(name)[0].split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~") and not name.endswith("/")


@functools.cache
def hub_model(name: str) -> HubModel:
    """Return the model ``org/name`` or ``org/name@revision``, out of the hub's cache where it is there.

    Else config.json and the headers of its safetensors files are fetched: some kilobytes. Raises ModelError where
    the hub does not give the configuration, or a header is damaged.
    """
    from huggingface_hub.errors import RemoteEntryNotFoundError, SafetensorsParsingError

    repository, revision = split_revision(name)
    try:
        folder = _configuration(name, repository, revision, "config.json")
    except ModelError as error:
        if not isinstance(error.__cause__, RemoteEntryNotFoundError):
            raise
        return HubModel(repository=repository, folder=_pipeline(name, repository, revision, error), has_weights=False)
    model = HubModel(repository=repository, folder=folder, has_weights=has_weights(folder))
    if model.has_weights:
        return model
    try:
        return replace(model, tensors=_headers(name, repository, folder))
    except ModelError as error:
        if isinstance(error.__cause__, SafetensorsParsingError):
            raise
        return replace(model, problem=error.reason)


def _configuration(name: str, repository: str, revision: str | None, file: str) -> Path:
    """Return the snapshot's folder in the hub's cache, with ``file`` fetched where it is not there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    with hub_errors(name):
        path = try_to_load_from_cache(repository, file, revision=revision)
        if not isinstance(path, str):
            # At once without a network, where the download alone tries for half a minute.
            get_hf_file_metadata(hf_hub_url(repository, file, revision=revision))
            path = hf_hub_download(repository, file, revision=revision)
    return Path(path).parent


def _pipeline(name: str, repository: str, revision: str | None, missing: ModelError) -> Path:
    """Return the snapshot of a pipeline, with the configurations of its models; else raise ``missing``."""
    try:
        folder = _configuration(name, repository, revision, "model_index.json")
    except ModelError:
        raise missing from missing.__cause__
    with suppress(ValueError, AttributeError):  # a damaged index is reported where it is read for its models
        for part, entry in json.loads((folder / "model_index.json").read_text(encoding="utf-8")).items():
            if isinstance(entry, list) and part.isidentifier():
                with suppress(ModelError):  # tokenizers and schedulers have other files
                    _configuration(name, repository, folder.name, f"{part}/config.json")
    return folder


def has_weights(folder: Path) -> bool:
    """Return whether ``folder`` has all safetensors files of a model."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return (folder / "model.safetensors").exists()
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):  # damaged: fetched again with the weights
        return False
    return all((folder / file).exists() for file in files)


def _headers(name: str, repository: str, folder: Path) -> Mapping[str, Stored] | None:
    """Return the headers of a model's weights, remembered by the commit, which names its snapshot's folder."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    remembered = cache_folder() / "hub-headers" / f"{repository.replace('/', '--')}@{folder.name}.json"
    with suppress(ValueError, TypeError, KeyError):  # a damaged file is fetched again
        if (known := load_text(remembered)) is not None:
            return {tensor: Stored(**entry) for tensor, entry in json.loads(known).items()}
    try:
        with hub_errors(name):
            files = get_safetensors_metadata(repository, revision=folder.name).files_metadata
    except ModelError as error:
        if isinstance(error.__cause__, NotASafetensorsRepoError):
            return None
        raise
    tensors = {
        tensor: Stored(dtype=info.dtype, bytes=info.data_offsets[1] - info.data_offsets[0], shape=tuple(info.shape))
        for file in sorted(files)
        for tensor, info in files[file].tensors.items()
    }
    store_text(remembered, json.dumps({tensor: vars(stored) for tensor, stored in tensors.items()}))
    return tensors


@contextmanager
def hub_errors(name: str, repository: str = "") -> Iterator[None]:
    """Raise ModelError, with one sentence for each cause, in place of errors of the hub's client.

    ``name`` is the user's name of the model, ``repository`` the hub's where it differs.
    """
    from huggingface_hub import errors

    try:
        yield
    except BrimError:
        raise
    except Exception as error:  # the client's errors have no common base: network, name, access, disk
        reason, todo = _reason(error, errors)
        other = f": {repository}" if repository not in ("", split_revision(name)[0]) else ""
        raise ModelError(f"{name} was given as the model{other}.", reason, todo) from error


def _reason(error: Exception, errors: Any) -> tuple[str, str]:
    """Return the cause of the client's error in a sentence, and the next step."""
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client's own words are "check your connection", whatever the hub answered
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "It is not in the hub's cache, and HF_HUB_OFFLINE is set.", "Unset it, or give a local folder."
    if isinstance(error, errors.GatedRepoError):
        return "It is a gated model, and this account has no access.", _LOGIN
    if isinstance(error, errors.RevisionNotFoundError):
        return "The model has no such revision.", "Give one of its branches, tags or commits."
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "It has no config.json.", "Give a model in the format of transformers or diffusers."
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return "The Hugging Face hub has no such model for this account.", f"Check the name. {_LOGIN}"
    if isinstance(error, errors.SafetensorsParsingError):
        return f"The header of its weights is damaged: {first_line(error):.200}", "Try again later."
    if status == 429:
        return "The hub refuses further requests for now (429).", "Wait some minutes, or log in with `hf auth login`."
    if status is not None:
        return f"The hub answered with an error ({status}).", "Try again later."
    if isinstance(error, errors.HFValidationError):
        return "It is neither a file or folder nor a valid name of a model.", "Check the path or the name."
    return (
        f"The Hugging Face hub cannot be reached: {type(error).__name__}: {first_line(error):.200}",
        "Check the network and HF_ENDPOINT, or give a local folder.",
    )
