"""Side effects of a traced program: files, processes, connections.

Its writes go to a temporary folder of the trace, where it can read them; writes to temporary folders are real.
Removing or renaming an earlier file, starting a process and connecting to another machine are refused. ``open`` and
the functions of ``os`` are replaced; an audit hook (PEP 578) refuses callers that hold the original ones. Libraries
that write without Python bypass both.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from brim.errors import UnsupportedError

_TODO = "Leave it out of the step, or run the program itself: brim only traces it."
_MAKES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROCESSES = {
    "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "pty.spawn",
}  # fmt: skip
_WITH_ADDRESS = {"socket.connect", "socket.sendto", "socket.sendmsg"}  # the last argument
_CONNECTIONS = {*_WITH_ADDRESS, "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
# Audit event -> the indices of its paths, each with the index of its folder's descriptor, or None.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),), "os.removexattr": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}  # fmt: skip
_READING = ("stat", "lstat", "access", "readlink", "chdir")
_CHANGING = ("remove", "unlink", "rmdir", "truncate", "chmod", "chown", "utime")
_MOVING = ("rename", "replace")
_LINKING = ("symlink", "link")
_MAKING = ("mkdir", "mkfifo")
_LISTING = ("listdir", "scandir")


class SideEffectError(UnsupportedError, OSError):
    """A traced program tried to change or reach something outside of the trace.

    It is an ``OSError``, as libraries that can do without a network or a tool expect one.
    """

    def __init__(self, request: str, reason: str, todo: str = "") -> None:
        super().__init__(request, reason, todo)
        self.errno = errno.EACCES


class SideEffects:
    """A file system in which a program's writes go to a temporary folder, and its reads find them there."""

    def __init__(self) -> None:
        self._root = ""
        temporary = tempfile.gettempdir()
        self._free = tuple(
            {os.path.join(os.path.realpath(path), "") for path in (temporary, "/dev", "/proc")}  # noqa: PTH118
            | {os.path.join(temporary, "")}  # noqa: PTH118
        )
        self.saved: dict[Any, Any] = {}  # objects given to torch.save, by the file that stands for them

    def end(self) -> None:
        if self._root:
            shutil.rmtree(self._root, ignore_errors=True)

    # -- paths

    def to_read(self, path: Any) -> Any:
        """Return the place of ``path``: the copy, if the program has written it."""
        if not self._root or path is None or isinstance(path, int):
            return path
        beside = self._beside(path)
        return beside if _is_there(beside) else path

    def to_write(self, path: Any, *, even_temporary: bool = False) -> str:
        """Return the place to write ``path`` to. Its folder must exist, as for any file."""
        full = _full(path)
        if self.is_free(full) and not even_temporary:
            return full
        if not self._root:
            self._root = tempfile.mkdtemp(prefix="brim-traced-")
        beside = self._beside(full)
        if not _is_there(beside):
            folder = os.path.dirname(full)  # noqa: PTH120
            if _is_there(folder):
                os.makedirs(os.path.dirname(beside), exist_ok=True)  # noqa: PTH103, PTH120
        return beside

    def to_change(self, path: Any) -> Any:
        """Return the place of an existing file that is changed, renamed or removed."""
        real_path = self.to_read(path)
        if real_path is not path or self.is_free(_full(path)):
            return real_path
        if not _is_there(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        raise self.refusal(path)

    def refusal(self, path: Any) -> SideEffectError:
        return SideEffectError(
            f"A traced program cannot change or remove {os.fsdecode(path)}.", "It existed before the trace.", _TODO
        )

    def is_free(self, full: str) -> bool:
        """Return True if a write there is real: temporary files, devices, Python's own bytecode."""
        inside = full + os.sep
        return inside.startswith(self._free) or f"{os.sep}__pycache__{os.sep}" in inside

    def is_there(self, path: Any) -> bool:
        return _is_there(path) or _is_there(self.to_read(path))

    def _beside(self, path: Any) -> str:
        drive, rest = os.path.splitdrive(_full(path))
        if self._root and rest.startswith(os.path.join(self._root, "")):  # noqa: PTH118
            return drive + rest
        return os.path.join(self._root, drive.strip(":\\/"), rest.lstrip("\\/"))  # noqa: PTH118

    # -- replacements

    def open(self, real: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):
            return real(file, mode, *args, **kwargs)
        return real(
            self._opened(file, not set("wax+").isdisjoint(mode), "w" in mode, "x" in mode), mode, *args, **kwargs
        )

    def open_descriptor(self, real: Callable[..., Any], path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            path = self._opened(path, bool(flags & _MAKES), bool(flags & os.O_TRUNC), bool(flags & os.O_EXCL))
        return real(path, flags, *args, **kwargs)

    def _opened(self, path: Any, writes: bool, anew: bool, exclusive: bool) -> Any:
        real_path = self.to_read(path)
        if not writes or real_path is not path or self.is_free(_full(path)):
            return real_path
        there = _is_there(path)
        if there and exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        beside = self.to_write(path)
        if there and not anew:
            shutil.copyfile(_full(path), beside)  # the program reads the earlier content, or appends to it
        return beside

    def read(self, real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return real(path if kwargs.get("dir_fd") is not None else self.to_read(path), *args, **kwargs)

    def change(self, real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None and not isinstance(path, int):
            path = self.to_change(path)
        return real(path, *args, **kwargs)

    def make(self, real: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            if self.is_there(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            path = self.to_write(path)
        return real(path, *args, **kwargs)

    def move(self, real: Callable[..., Any], source: Any, target: Any, **kwargs: Any) -> Any:
        if all(kwargs.get(name) is None for name in ("src_dir_fd", "dst_dir_fd")):
            source = self.to_change(source)
            target = self.to_write(target, even_temporary=self.to_read(target) is not target)
        return real(source, target, **kwargs)

    def link(self, real: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        return real(source, self.to_write(target), *args, **kwargs)

    def names_in(self, real: Callable[..., Any], path: Any = ".") -> Any:
        """Names, or entries, of both folders; those of the copy first."""
        real_path = self.to_read(path)
        if real_path is path or path is None or not _is_there(path):
            return real(real_path)
        if real is _REAL["listdir"]:
            return list(dict.fromkeys([*real(real_path), *real(path)]))
        with real(real_path) as written, real(path) as before:
            return _Entries({entry.name: entry for entry in (*before, *written)})


class _Entries:
    """The result of ``os.scandir``: an iterator that is also a context manager."""

    def __init__(self, entries: dict[str, os.DirEntry[Any]]) -> None:
        self._entries = iter(entries.values())

    def __iter__(self) -> Iterator[os.DirEntry[Any]]:
        return self._entries

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


_NAMES = (*_READING, *_CHANGING, *_MOVING, *_LINKING, *_MAKING, *_LISTING)
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _NAMES if hasattr(os, name)}
_OPEN, _OS_OPEN = builtins.open, os.open
_watched: dict[int, SideEffects] = {}  # by thread


def current() -> SideEffects | None:
    """Return the replacement of the file system in this thread; None: the real file system."""
    return _watched.get(threading.get_ident()) if _watched else None


@contextmanager
def held_back() -> Iterator[None]:
    """Keep this thread from changing more than temporary files."""
    _install()
    key = threading.get_ident()
    before, effects, folder = _watched.get(key), SideEffects(), os.getcwd()  # noqa: PTH109
    with ExitStack() as stack:
        _replace(stack)
        _watched[key] = effects
        try:
            yield
        finally:
            if before is None:
                del _watched[key]
            else:
                _watched[key] = before
            with suppress(OSError):  # the folder of the program's writes may be deleted already
                _REAL["chdir"](folder)
            effects.end()


@contextmanager
def by_brim() -> Iterator[None]:
    """While open, this thread works for brim, not for the program: its files and processes are real."""
    key = threading.get_ident()
    hidden = {key: _watched.pop(key)} if key in _watched else {}
    try:
        yield
    finally:
        _watched.update(hidden)


def _replace(stack: ExitStack) -> None:
    replacements: dict[Callable[..., Any], tuple[str, ...]] = {
        SideEffects.read: _READING, SideEffects.change: _CHANGING, SideEffects.move: _MOVING,
        SideEffects.link: _LINKING, SideEffects.make: _MAKING, SideEffects.names_in: _LISTING,
    }  # fmt: skip
    for replacement, names in replacements.items():
        for name in names:
            if name in _REAL:
                stack.enter_context(mock.patch.object(os, name, _standing_in(replacement, _REAL[name])))
    stack.enter_context(mock.patch.object(os, "open", _standing_in(SideEffects.open_descriptor, _OS_OPEN)))
    for module in (builtins, io):
        stack.enter_context(mock.patch.object(module, "open", _standing_in(SideEffects.open, _OPEN)))


def _standing_in(replacement: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        effects = current()
        return real(*args, **kwargs) if effects is None else replacement(effects, real, *args, **kwargs)

    return call


@cache
def _install() -> None:
    """Install the audit hook, which stays to the end of the process."""
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched or (effects := current()) is None:
        return
    if event == "open":
        path, _, flags = args
        if isinstance(path, (str, bytes)) and isinstance(flags, int) and flags & _MAKES:
            _check(effects, path, None)
    elif event in _CHANGES:
        for at, folder in _CHANGES[event]:
            _check(effects, args[at], None if folder is None or folder >= len(args) else args[folder])
    elif event in _PROCESSES:
        said = " ".join([event, *map(_brief, args[:1])])
        raise SideEffectError(
            f"A traced program cannot start a process ({said}).", "The process would run outside of the trace.", _TODO
        )
    elif event in _CONNECTIONS and not (len(args) == 2 and isinstance(args[1], (str, bytes))):  # AF_UNIX has a name
        asked = _brief(args[-1 if event in _WITH_ADDRESS else 0])
        raise SideEffectError(
            f"A traced program cannot connect to {asked}.",
            "Nothing is sent or fetched during a trace.",
            "Download what it needs first, or leave the connection out of the step.",
        )


def _check(effects: SideEffects, path: Any, folder: Any) -> None:
    if isinstance(path, int):
        return  # open already
    if isinstance(folder, int) and folder >= 0:
        with suppress(OSError):  # Linux resolves a descriptor's path
            path = os.path.join(_REAL["readlink"](f"/proc/self/fd/{folder}"), os.fsdecode(path))  # noqa: PTH118
    if not effects.is_free(_full(path)) and effects.to_read(path) is path:
        raise effects.refusal(path)


def _brief(what: Any) -> str:
    return f"{' '.join(map(_brief, what)) if isinstance(what, (list, tuple)) else what!s:.100}"


def _full(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100


def _is_there(path: Any) -> bool:
    try:
        _REAL["lstat"](path)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def outside_world() -> Iterator[None]:
    """For one trace, data loaders load in this process, and only temporary files are changed."""
    base = dataloader._BaseDataLoaderIter
    with ExitStack() as stack:
        stack.enter_context(held_back())
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
        effects = current()
        if effects is not None and (kept := effects.saved.get(_identity(effects, file))) is not None:
            return tree_map_only(_SavedTensor, lambda tensor: tensor.load(map_location), kept)
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
        effects = current()
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


def _identity(effects: SideEffects, file: Any) -> Any:
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
