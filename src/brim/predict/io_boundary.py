"""The boundary between a program and the world outside of its trace: data loaders, files, NumPy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from brim.predict import side_effects


@contextmanager
def outside_world() -> Iterator[None]:
    """For one trace, data loaders load in this process, and only temporary files are changed."""
    base = dataloader._BaseDataLoaderIter
    with ExitStack() as stack:
        stack.enter_context(side_effects.held_back())
        stack.enter_context(mock.patch.object(dataloader.DataLoader, "_get_iterator", _in_this_process))
        stack.enter_context(mock.patch.object(base, "_next_index", _really(base._next_index)))
        stack.enter_context(mock.patch.object(torch, "save", _saved(torch.save, 1)))
        stack.enter_context(mock.patch.object(safetensors.torch, "save_file", _saved(safetensors.torch.save_file, 1)))
        stack.enter_context(mock.patch.object(torch, "load", _loaded(torch.load)))
        # transformers would load weights in threads, which no trace sees
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        yield


def _in_this_process(loader: Any) -> Any:
    """Load in this process: workers could not pass fake tensors on. Loaded tensors, pinned or not, take no VRAM."""
    workers, timeout, pinned = loader.num_workers, loader.timeout, loader.pin_memory
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # it draws a seed
            return dataloader._SingleProcessDataLoaderIter(loader)
    finally:
        loader.num_workers, loader.timeout, loader.pin_memory = workers, timeout, pinned


def _really(next_index: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Samplers draw the order of the examples: real numbers, which no tensor of the step depends on."""

    def draw(iterator: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return next_index(iterator)

    return draw


def _loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    """Load fake storages on the host; tensors meant for the GPU are moved there one by one. A file saved in the trace
    is loaded from its saved tensors."""

    def call(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        effects = side_effects.current()
        if effects is not None and (kept := effects.saved.get(_identity(effects, file))) is not None:
            return _restored(kept, map_location)
        on_gpu = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda"
        loaded = load(file, "cpu" if on_gpu else map_location, *args, **kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.cuda, loaded) if on_gpu else loaded

    return call


def _saved(save: Callable[..., Any], file_at: int) -> Callable[..., Any]:
    """Save an empty file, which programs may rename: fake tensors have no values. The tensors are kept for the same
    trace to load.

    Modules that are imported during the trace may keep this function: after it, everything is saved for real.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        effects = side_effects.current()
        if effects is None:
            return save(*args, **kwargs)
        file = args[file_at] if len(args) > file_at else kwargs.get("f", kwargs.get("filename"))
        if isinstance(file, (str, os.PathLike)):
            Path(effects.to_write(file, even_temporary=True)).touch()
        effects.saved[_identity(effects, file)] = tree_map_only(torch.Tensor, _SavedTensor, args[0])
        return None

    return call


class _SavedTensor:
    """A copy of a tensor in a file, which takes no GPU memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.on_device, self.trains = tensor.is_cuda, tensor.requires_grad
        self.copy = tensor.detach().cpu() if self.on_device else tensor.detach().clone()

    def load(self, map_location: Any) -> torch.Tensor:
        named = isinstance(map_location, (str, torch.device))
        there = torch.device(map_location).type == "cuda" if named else self.on_device and map_location is None
        return (self.copy.cuda() if there else self.copy.clone()).requires_grad_(self.trains)


def _restored(saved: Any, map_location: Any) -> Any:
    return tree_map_only(_SavedTensor, lambda tensor: tensor.load(map_location), saved)


def _identity(effects: side_effects.SideEffects, file: Any) -> Any:
    """Return the identity of a file, whatever its name is by now; an object in a file's place is its own."""
    if not isinstance(file, (str, os.PathLike)):
        return file
    try:
        status = os.stat(effects.to_read(file))  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def models_save_nothing() -> Iterator[None]:
    """Let ``save_pretrained`` write no weights: all fake tensors seem to share memory, which it checks."""
    with ExitStack() as stack:
        for library, kind in (
            ("transformers", "PreTrainedModel"),
            ("peft", "PeftModel"),
            ("diffusers", "ModelMixin"),
        ):
            try:
                model_class = getattr(sys.modules.get(library), kind, None)
            except Exception:  # lazy modules load at this access, and a broken one raises anything
                model_class = None
            if model_class is not None:
                stack.enter_context(mock.patch.object(model_class, "save_pretrained", _saved_folder))
        yield


def _saved_folder(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save the configuration into the folder, and no weights."""
    Path(save_directory).mkdir(parents=True, exist_ok=True)
    if hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
        model.config.save_pretrained(save_directory)


def as_tensor_of_file(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that stands for a part of a file (safetensors maps files as storages)."""
    return torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype)
