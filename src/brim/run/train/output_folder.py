"""The output folder of a training: locked for that training, without loss of files that were there before.

The lock is flock(2) on a file in the folder. The kernel releases it however the process ends, SIGKILL included. On
NFS, Linux takes it on the server, so it holds between machines that mount the folder; on a file system without locks
training continues without one, after a warning.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from brim.core.files import Identity, identities, open_to_write
from brim.errors import TransferError, UsageError
from brim.memory.checkpoint_writing import sync_path, write_safetensors
from brim.memory.checksums import MANIFEST_NAME as WEIGHTS_MANIFEST_NAME
from brim.run.checkpoint.manifest import FileEntry, checkpoint_folders
from brim.run.checkpoint.reading import entry_of
from brim.run.checkpoint.record import RECORD_NAME, OutputRecord, remove_listed, set_aside_foreign
from brim.run.checkpoint.saver import ADAPTER, MODEL, Tensors, planned_file
from brim.run.checkpoint.writer import written_entry
from brim.run.train.report import METRICS_FILE, WANDB_RUN, logged_steps

LOCK_FILE = ".brim.lock"
_BEGUN = {LOCK_FILE, METRICS_FILE, "tensorboard", "wandb", WANDB_RUN}
_HIDDEN = re.compile(r"\..+\.partial")  # left by a killed process; readers ignore them
_OF_MODEL = re.compile(rf"({MODEL}|{ADAPTER})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class OutputFolder:
    """``path``, locked by this process until ``release`` (or the end of the ``with`` block).

    resume: continue the training in the folder. overwrite: replace its contents. ``reads`` are the files and folders
    that the training reads: none of them is written to, under any name.

    Raises UsageError if the folder cannot be written to, holds something other than a training to resume, or belongs
    to a running training.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, overwrite: bool = False, reads: Iterable[Path] = ()
    ) -> None:
        self.path, self._resume, self._overwrite = path, resume, overwrite
        self._reads = identities(reads)
        self._record = OutputRecord(path)
        self._lock: int | None = None
        self._check()
        self._created = not path.exists()
        make_writable(path)
        try:
            self._take_lock()
            self._check()  # another training may have begun here meanwhile
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. A folder created here is removed if nothing was written into it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if _is(self._lock, self.path / LOCK_FILE):
                    (self.path / LOCK_FILE).unlink()
            os.close(self._lock)
            self._lock = None
        if self._created:
            with contextlib.suppress(OSError):  # it is not empty
                self.path.rmdir()

    def begin(self) -> None:
        """Delete the checkpoints of an earlier training, which would be taken for this one's.

        Only files listed in their manifests are deleted; folders without a manifest are the user's.
        """
        try:
            self._record.remove_unfinished()
            for _, path in checkpoint_folders(self.path):
                if self._record.has_checkpoint(path):
                    self._record.remove_checkpoint(path)
                else:
                    remove_listed(path)
        except OSError as error:
            raise TransferError(
                f"Cannot delete the checkpoints of the earlier training from {self.path}.", f"{error.strerror}."
            ) from error

    def refuse(self, reads: Mapping[Identity, Path]) -> None:
        """Raise UsageError if this training reads the folder or anything in it. Adds ``reads`` to its inputs."""
        self._reads.update(reads)
        for identity, path in identities([self.path]).items():
            if identity not in self._reads:
                continue
            name = f"{path.name} in it" if path != self.path else "It"
            raise UsageError(
                f"Cannot write a training to {self.path}.",
                f"{name} is {self._reads[identity]}, which is an input.",
                "Give another --output.",
            )

    # -- ownership of the folder

    def _check(self) -> None:
        """Raise UsageError if the contents of the folder belong to something else."""
        path, problem = self.path, f"Cannot write a training to {self.path}."
        if not path.exists():
            return
        self.refuse({})
        try:
            names = {entry.name for entry in path.iterdir()} - {LOCK_FILE, RECORD_NAME}
        except OSError as error:
            raise _not_writable(path, error) from error
        if not names or self._overwrite:
            return
        if checkpoint_folders(path):
            if not self._resume:
                raise UsageError(
                    problem,
                    "It already has checkpoints of a training.",
                    "Continue that one with --resume, or give another --output. --overwrite deletes them.",
                )
            return
        begun = all(name in _BEGUN or _HIDDEN.fullmatch(name) for name in names)
        steps = logged_steps(path)
        if begun and (self._resume or not steps):
            return
        if begun:
            reason = f"It has the log of another training: {steps} steps, and no checkpoint."
        else:
            shown = ", ".join(sorted(names - _BEGUN)[:3])
            reason = f"It is not empty: it has {shown}{', ...' if len(names - _BEGUN) > 3 else ''}"
            reason += ", and no checkpoint to resume from." if self._resume else "."
        raise UsageError(
            problem, reason, "Give another --output. --overwrite replaces the contents by the trained model."
        )

    def _take_lock(self) -> None:
        import fcntl  # missing on some systems that have the command line

        path = self.path / LOCK_FILE
        while True:
            fd = self._open_lock(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = _holder(fd)
                os.close(fd)
                raise UsageError(
                    f"Cannot write a training to {self.path}.",
                    f"Another training writes to it{holder}.",
                    "Wait for its end, or give another --output.",
                ) from error
            except OSError as error:
                os.close(fd)
                if error.errno not in _NO_LOCKS:
                    raise _not_writable(self.path, error) from error
                path.unlink(missing_ok=True)
                warnings.warn(
                    f"The file system of {self.path} has no locks ({error.strerror}): make sure that no other "
                    "training writes there.",
                    stacklevel=3,
                )
                return
            if _is(fd, path):
                break
            os.close(fd)  # its holder has just deleted it
        self._lock = fd
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        document = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since})
        with contextlib.suppress(OSError):  # a full disk: only the text of another training's error is lost
            os.ftruncate(fd, 0)
            os.pwrite(fd, document.encode(), 0)

    def _open_lock(self, path: Path) -> int:
        """The lock's file descriptor. Raises UsageError if another file has its name, which would be emptied."""
        problem = f"Cannot write a training to {self.path}."
        try:
            fd = open_to_write(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.EISDIR, errno.ENXIO):
                raise UsageError(problem, f"{LOCK_FILE} in it cannot be the training's lock: {error.strerror}.",
                                 "Delete it, or give another --output.") from error  # fmt: skip
            raise _not_writable(self.path, error) from error
        if os.fstat(fd).st_size and not _holder(fd):
            os.close(fd)
            raise UsageError(
                problem,
                f"{LOCK_FILE} in it is not a lock that brim wrote.",
                "Move it away, or give another --output.",
            )
        return fd

    # -- the exported model

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Raise UsageError if the model's files would replace files that brim did not write here.

        If the folder is to be overwritten, they are replaced.
        """
        for path in () if self._overwrite else (self.path / name for name in sorted(names)):
            if os.path.lexists(path) and not self._record.has_file(path):
                raise UsageError(
                    f"Cannot write the trained model to {self.path}.",
                    f"{path.name} in it was not written by this training, and would be overwritten.",
                    "Move it away, or give another --output.",
                )

    def export(self, tensors: Tensors, files: Mapping[str, bytes | Path]) -> None:
        """Write the model into the folder: to a hidden folder, synced, then renamed file by file, its weights last.

        Files of an earlier model by brim are deleted; other files stay, renamed if they are in the way, unless the
        folder is to be overwritten. Raises TransferError when the disk refuses, and errors of ``values``; earlier
        files are unchanged then.
        """
        try:
            self._record.remove_unfinished()
            staging = self.path / f".model-{secrets.token_hex(4)}.partial"
            with self._record.unfinished(staging):
                try:
                    staging.mkdir()
                    self._put(staging, _written(staging, tensors, files))
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
            sync_path(self.path)
        except OSError as error:
            raise TransferError(
                f"Cannot write the trained model to {self.path}.",
                f"{error.strerror}.",
                "Free some disk space and continue with --resume: the checkpoints are intact.",
            ) from error

    def _put(self, staging: Path, entries: Mapping[str, FileEntry]) -> None:
        """Rename the files to their final names, in order, and delete the files of the previous model."""
        record = self._record
        for path in (self.path / name for name in entries):
            if os.path.lexists(path) and not self._overwrite and not record.has_file(path):
                set_aside_foreign(path)
        before = {name for name in record.file_names() if record.has_file(self.path / name)}
        if self._overwrite:
            before |= {entry.name for entry in self.path.iterdir() if _is_of_model(entry.name)}
        record.add_files(entries, staging)
        for name in entries:
            (staging / name).replace(self.path / name)
        for name in before - entries.keys():
            (self.path / name).unlink()
        record.keep_only(entries)


def _written(folder: Path, tensors: Tensors, files: Mapping[str, bytes | Path]) -> dict[str, FileEntry]:
    """Write the model into ``folder`` and sync it; returns its files, the weights last."""
    for name, content in files.items():
        (folder / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
        sync_path(folder / name)
    weights, metadata = f"{tensors.stem}.safetensors", dict(tensors.metadata)
    checksums = write_safetensors(folder / weights, tensors.layout, tensors.values, metadata)
    entries = {name: entry_of(folder / name) for name in files}
    return entries | {weights: written_entry(planned_file(weights, tensors.layout, metadata), checksums)}


def make_writable(output: Path) -> None:
    """Create the folder. Raises UsageError if it cannot be written to."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise _not_writable(output, error) from error


def _not_writable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write a training to {output}.", f"{error.strerror}.", "Give another --output.")


def _is_of_model(name: str) -> bool:
    """True if transformers or peft would read this file as weights or their index."""
    return _OF_MODEL.fullmatch(name) is not None or name in {"adapter_config.json", WEIGHTS_MANIFEST_NAME}


def _is(fd: int, path: Path) -> bool:
    """True if ``fd`` and ``path`` are the same file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _holder(fd: int) -> str:
    """A description of the lock's holder; empty if it is unknown."""
    try:
        holder = json.loads(os.pread(fd, 1000, 0))
        return f": process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
