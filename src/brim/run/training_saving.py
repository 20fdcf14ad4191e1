"""A training's checkpoints: what goes into them, and how a session begins from one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from brim.core import Plan
from brim.errors import ModelError, TransferError, UsageError
from brim.memory.checkpoint_files import read_checkpoint
from brim.memory.checkpoint_writing import write_safetensors
from brim.run import checkpoint_reading
from brim.run.checkpoint import ADAPTER, Checkpointer, Tensors
from brim.run.checkpoint_contents import adapter_files, adapter_tensors, model_files, model_tensors
from brim.run.checkpoint_reading import Checkpoint
from brim.run.data import Batches
from brim.run.training_session import Session, Terms
from brim.run.training_setup import Setup
from brim.run.training_state import optimizer_numbers, restore_rng, rng_state

_OPTIMIZER, _PRECISION = "optimizer", "precision"
_SAMPLE_BYTES = 64
# Between steps, when a step's activations are gone: less than they take in any model worth a checkpoint.
_STAGING_BYTES = 8 << 20


class Saver:
    """Writes and reads the checkpoints of one training."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = _identity(setup.folder)
        self._checkpointer = Checkpointer(setup.output, asynchronous=False, staging_bytes=_STAGING_BYTES)
        self._saved: set[int] = set()  # of this run: a damaged one of an earlier run is written again
        self.notes: list[str] = []  # about checkpoints that were passed over

    def start(self, terms: Terms, batches: Batches) -> tuple[Session, int]:
        """A session and the number of the step that it goes on with; 0 without ``resume``.

        Raises UsageError for a checkpoint of another model, method, optimizer, precision or of other data.
        """
        resume = self._setup.request.resume and checkpoint_reading.steps(self._setup.output)
        found = checkpoint_reading.latest(self._setup.output) if resume else None
        if found is None:
            torch.manual_seed(terms.seed)
        if found is None:
            return self._open(terms, batches, found, None)
        rung = None if terms.plan is not None else int(found.state["rung"])
        plan = Plan.from_json(found.state["plan"]) if found.state.get("planned") else None
        return self._open(terms, batches, found, rung, plan)

    def restart(self, terms: Terms, batches: Batches, rung: int) -> tuple[Session, int]:
        """From the last checkpoint, or the beginning where there is none, on another rung."""
        found = (
            checkpoint_reading.latest(self._setup.output) if checkpoint_reading.steps(self._setup.output) else None
        )
        if found is None:
            torch.manual_seed(terms.seed)
            batches.load_state_dict(self._setup.batches().state_dict())
        return self._open(terms, batches, found, rung)

    def _open(
        self, terms: Terms, batches: Batches, found: Checkpoint | None, rung: int | None, plan: Plan | None = None
    ) -> tuple[Session, int]:
        if found is not None:
            _check_same(found.state.get("course", {}), self._course(terms), found.folder)
            batches.load_state_dict(found.state["data"])
            self.notes += found.skipped
            self._checkpointer.protect(found.folder)  # weights rest there, and the tokenizer is copied from it
        folder = self._setup.folder if found is None or terms.method == "lora" else found.folder
        session = Session.open(terms, folder, name=self._setup.name, rung=rung, plan=plan)
        if found is None:
            torch.manual_seed(terms.seed)  # whatever opening drew
            return session, 0
        try:
            self._restore(session, found)
            restore_rng(found.state["rng"])
        except BaseException:
            session.close()
            raise
        return session, found.step

    def _course(self, terms: Terms) -> dict[str, str]:
        """What a training keeps to from its beginning to its end, by option."""
        return {
            "MODEL": self._model,
            "--method": terms.method,
            "--optimizer": terms.optimizer,
            "--precision": terms.precision,
        }

    def _restore(self, session: Session, found: Checkpoint) -> None:
        fitted = session.fitted
        if session.terms.method == "lora":
            # Adapters are small and always in memory.
            found.read_into(ADAPTER, dict(adapter_tensors(session.trainee.module).values))
        masters = dict(found.tensors(_PRECISION)) if found.layout(_PRECISION) else {}
        fitted.precision.load_state_dict({**found.state["precision"], "tensors": masters})
        fitted.load_states(_names(session), found.state["optimizer"], found.tensors(_OPTIMIZER))

    def save(self, session: Session, step: int, batches: Batches) -> None:
        """A checkpoint after ``step`` steps; nothing where this run has written one of that step already."""
        if step in self._saved:
            return
        tensors, files = _model(session)
        precision = session.fitted.precision.state_dict()
        masters: dict[str, torch.Tensor] = precision["tensors"]
        state = {
            "course": self._course(session.terms),
            "rung": session.rung,
            "planned": session.planned,
            "rng": rng_state(),
            "data": batches.state_dict(),
            "precision": {key: value for key, value in precision.items() if key != "tensors"},
            "optimizer": optimizer_numbers(session.fitted.optimizer, _names(session)),
            "plan": session.plan.to_json(),
        }
        layout, values = session.fitted.states(_names(session))
        optimizer = Tensors(stem=_OPTIMIZER, layout=layout, values=values)
        written = [tensors, optimizer]
        if masters:
            layout = [(name, one.dtype, tuple(one.shape)) for name, one in masters.items()]
            written.append(Tensors(stem=_PRECISION, layout=layout, values=masters.items()))
        self._checkpointer.save(step, written, state=state, files=files)
        self._saved.add(step)

    def export(self, session: Session, step: int, batches: Batches) -> None:
        """The model itself into the output folder, as transformers or peft read it; and a last checkpoint."""
        if self._setup.request.save_every:
            self.save(session, step, batches)
        self._checkpointer.finish()
        tensors, files = _model(session)
        path = self._setup.output / f"{tensors.stem}.safetensors"
        try:
            for left in path.parent.glob(f".{path.name}.*.partial"):  # of a run that was killed here
                left.unlink()
            for name, content in files.items():
                data = content.read_bytes() if isinstance(content, Path) else content
                path.with_name(name).write_bytes(data)
        except OSError as error:
            raise TransferError(
                f"The trained model was to be written to {path.parent}.",
                f"{error.strerror}.",
                "Free some disk space, and go on with --resume: the checkpoints are as they were.",
            ) from error
        write_safetensors(path, tensors.layout, tensors.values, dict(tensors.metadata))

    def close(self) -> None:
        self._checkpointer.finish()


def _names(session: Session) -> dict[torch.Tensor, str]:
    return {p: n for n, p in session.trainee.module.named_parameters() if p.requires_grad}


def _model(session: Session) -> tuple[Tensors, dict[str, bytes | Path]]:
    """What is trained, as it is now, read from wherever it is, one tensor at a time."""
    trainee = session.trainee
    if trainee.method == "lora":
        return adapter_tensors(trainee.module), adapter_files(trainee.module, trainee.base, trainee.opened.path)
    tensors = model_tensors(trainee.module, value=session.fitted.value)
    return tensors, model_files(trainee.module, trainee.opened.path)


def _check_same(theirs: dict[str, Any], ours: dict[str, str], folder: Path) -> None:
    """Whether a training may go on from the checkpoint in ``folder``, whose settings are ``theirs``."""
    if not ours.keys() <= theirs.keys():
        raise ModelError(
            f"Training was to go on from {folder}.",
            "It does not say which model and settings its training began with: an older version wrote it.",
            "Resume with the version of brim that wrote it, or give another --output to train anew.",
        )
    for option, now in ours.items():
        if theirs[option] != now:
            words = ("other weights", "these") if option == "MODEL" else (theirs[option], now)
            raise UsageError(
                f"Training was to go on from {folder}.",
                f"{option} is another: that training began with {words[0]}, not with {words[1]}.",
                "Resume with the model and the settings that it began with, or give another --output to train anew.",
            )


def _identity(folder: Path) -> str:
    """A digest of every tensor's name and form and of a few bytes from its middle: what tells models apart at once,
    and two trainings of the same model too."""
    digest = hashlib.blake2b(digest_size=16)
    for name, source in sorted(read_checkpoint(folder).items()):
        digest.update(f"{name} {source.dtype} {list(source.shape)}".encode())
        extent = source.extents[0]
        middle = extent.bytes // 2
        fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digest.update(os.pread(fd, min(_SAMPLE_BYTES, extent.bytes - middle), extent.offset + middle))
        finally:
            os.close(fd)
    return digest.hexdigest()
