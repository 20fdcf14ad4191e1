"""Where a program meets what is no tensor of the trace: data loaders, files, NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader


@contextmanager
def outside_world() -> Iterator[None]:
    """Data loaders load in this process, and nothing is written to files, for the duration of one trace."""
    base = dataloader._BaseDataLoaderIter
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dataloader.DataLoader, "_get_iterator", _in_this_process))
        stack.enter_context(mock.patch.object(base, "_next_index", _really(base._next_index)))
        stack.enter_context(mock.patch.object(torch, "save", _write_nothing))
        stack.enter_context(mock.patch.object(torch, "load", _loaded(torch.load)))
        # transformers would load weights in threads, where no trace is watching
        stack.enter_context(mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        yield


def _in_this_process(loader: Any) -> Any:
    """Workers could not hand fake tensors over; what they load, pinned or not, takes no GPU memory."""
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
    """Fake storages are made on the host; what is to lie on the GPU is moved there, tensor by tensor."""

    def call(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        on_gpu = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda"
        found = load(file, "cpu" if on_gpu else map_location, *args, **kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.cuda, found) if on_gpu else found

    return call


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """A checkpoint of fake tensors has nothing in it."""


def as_tensor_of_file(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that stands for a part of a file (safetensors maps files as storages)."""
    return torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype)
