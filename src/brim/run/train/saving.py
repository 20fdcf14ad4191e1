"""Save a training's checkpoints, and open a session from one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from brim.core import Plan
from brim.errors import ModelError, UsageError
from brim.memory.checkpoint_files import read_checkpoint
from brim.planning.strategy.choice import Choice
from brim.planning.strategy.state import optimizer_numbers, restore_rng, rng_state
from brim.run.checkpoint import reading as checkpoint_reading
from brim.run.checkpoint.contents import adapter_files, adapter_tensors, model_files, model_tensors
from brim.run.checkpoint.reading import Checkpoint, layout_of
from brim.run.checkpoint.saver import ADAPTER, Checkpointer, Tensors
from brim.run.data.dataset import Batches
from brim.run.train.finite import finite
from brim.run.train.session import Session, Terms
from brim.run.train.setup import Setup, open_batches, steps_of

_OPTIMIZER, _PRECISION = "optimizer", "precision"
_FIXED = ("MODEL", "--method", "--optimizer", "--precision")  # they shape a checkpoint's tensors
_SAMPLE_BYTES = 64
_OF_NO_STEP = ("_name_or_path", "transformers_version")  # entries of a configuration without effect on steps
# Allocated between steps, when activations are freed: less than they take in any model worth a checkpoint.
_STAGING_BYTES = 8 << 20


class Saver:
    """Writes and reads the checkpoints of one training."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._identity = _identity(setup.folder)
        self._checkpointer = Checkpointer(setup.output.path, staging_bytes=_STAGING_BYTES)
        self._saved: set[int] = set()  # complete ones: a damaged one of an earlier run is written again
        self.notes: list[str] = []  # about checkpoints that were skipped

    def start(self, terms: Terms, batches: Batches) -> tuple[Session, int]:
        """Open a session; returns it with the number of its next step, 0 without ``resume``.

        Raises UsageError for a checkpoint of another model, method, optimizer, precision or of other data.
        """
        resume = self._setup.request.resume and checkpoint_reading.steps(self._setup.output.path)
        checkpoint = checkpoint_reading.latest(self._setup.output.path) if resume else None
        if checkpoint is None:
            self.notes += ["No checkpoint to resume from: the training begins anew."] * self._setup.request.resume
            torch.manual_seed(terms.seed)
            return self._open(terms, batches, None, None)
        rung = None if terms.plan is not None else int(checkpoint.state["rung"])
        plan = Plan.from_json(checkpoint.state["plan"]) if checkpoint.state.get("planned") else None
        return self._open(terms, batches, checkpoint, rung, plan)

    def restart(self, terms: Terms, batches: Batches, rung: int) -> tuple[Session, int]:
        """Open a session on another rung, from the last checkpoint, or from the beginning without one."""
        output = self._setup.output.path
        checkpoint = checkpoint_reading.latest(output) if checkpoint_reading.steps(output) else None
        if checkpoint is None:
            torch.manual_seed(terms.seed)
            batches.load_state_dict(open_batches(self._setup.request, self._setup.folder).state_dict())
        return self._open(terms, batches, checkpoint, rung, has_holes=True)

    def _open(
        self,
        terms: Terms,
        batches: Batches,
        checkpoint: Checkpoint | None,
        rung: int | None,
        plan: Plan | None = None,
        *,
        has_holes: bool = False,
    ) -> tuple[Session, int]:
        if checkpoint is not None:
            self.notes += check_same_course(
                checkpoint.state.get("course", {}),
                self._course(terms, batches),
                checkpoint.folder,
                model=self._setup.name,
                may_change=self._setup.request.change_settings,
            )
            batches.load_state_dict(checkpoint.state["data"])
            self.notes += checkpoint.skipped
            self._checkpointer.protect(checkpoint.folder)  # weights are streamed, and the tokenizer copied, from it
        folder = self._setup.folder if checkpoint is None or terms.method == "lora" else checkpoint.folder
        session = Session.open(terms, folder, name=self._setup.name, rung=rung, plan=plan, has_holes=has_holes)
        try:
            if checkpoint is not None:
                self._restore(session, checkpoint)
            session.begin()
            if checkpoint is None:
                torch.manual_seed(terms.seed)  # opening may have drawn random numbers
                return session, 0
            restore_rng(checkpoint.state["rng"])
        except BaseException:
            session.close()
            raise
        self._saved.add(checkpoint.step)
        self.notes += _rounding_notes(Plan.from_json(checkpoint.state["plan"]), session.plan)
        return session, checkpoint.step

    def _course(self, terms: Terms, batches: Batches) -> dict[str, Any]:
        """Options that must stay the same from the training's beginning to its end."""
        course = self._setup.request.course(steps_of(self._setup.request, batches))
        return {"MODEL": self._identity, **course, "--precision": terms.precision}

    def _restore(self, session: Session, checkpoint: Checkpoint) -> None:
        fitted = session.fitted
        if session.terms.method == "lora":
            # Adapters are small and always in memory.
            checkpoint.read_into(ADAPTER, dict(adapter_tensors(session.training_model.module).values))
        masters = dict(checkpoint.tensors(_PRECISION)) if checkpoint.layout(_PRECISION) else {}
        fitted.precision.load_state_dict({**checkpoint.state["precision"], "tensors": masters})
        fitted.load_states(_names(session), checkpoint.state["optimizer"], checkpoint.tensors(_OPTIMIZER))

    def save(self, session: Session, step: int, batches: Batches) -> None:
        """Write a checkpoint after ``step`` steps, unless this run has written it already."""
        if step in self._saved:
            return
        tensors, files = self._model(session)
        precision = session.fitted.precision.state_dict()
        masters: dict[str, torch.Tensor] = precision["tensors"]
        state = {
            "course": self._course(session.terms, batches),
            "rung": session.rung,
            "planned": session.planned,
            "rng": rng_state(),
            "data": batches.state_dict(),
            "precision": {key: value for key, value in precision.items() if key != "tensors"},
            "optimizer": optimizer_numbers(session.fitted.optimizer, _names(session)),
            "plan": session.plan.to_json(),
        }
        check = iter if self._setup.request.allow_non_finite else finite
        layout, values = session.fitted.states(_names(session), check)
        written = [tensors, Tensors(stem=_OPTIMIZER, layout=layout, values=values)]
        if masters:
            written.append(self._finite(Tensors(stem=_PRECISION, layout=layout_of(masters), values=masters.items())))
        self._checkpointer.save(step, written, state=state, files=files)
        self._saved.add(step)

    def export(self, session: Session, step: int, batches: Batches) -> None:
        """Write the model into the output folder, in the form of transformers or peft; with ``save_every`` also a
        last checkpoint."""
        if self._setup.request.save_every:
            self.save(session, step, batches)
        self._setup.output.export(*self._model(session))

    def refuse_foreign(self, session: Session) -> None:
        """Raise UsageError if files in the output folder that brim did not write have names of the model's files."""
        tensors, files = self._model(session)
        self._setup.output.refuse_foreign([*files, f"{tensors.stem}.safetensors"])

    def _model(self, session: Session) -> tuple[Tensors, dict[str, bytes | Path]]:
        """The trained tensors as they are now, read from their backing store one at a time, and the other files."""
        training_model = session.training_model
        if training_model.method == "lora":
            tensors = adapter_tensors(training_model.module)
            files = adapter_files(training_model.module, training_model.base, training_model.opened.path)
        else:
            tensors = model_tensors(training_model.module, value=session.fitted.value)
            files = model_files(training_model.module, training_model.opened.path)
        # Buffers of a fully trained model may hold infinities, as masks do: only its parameters are checked.
        names = None if training_model.method == "lora" else set(_names(session).values())
        return self._finite(tensors, names), files

    def _finite(self, tensors: Tensors, names: Collection[str] | None = None) -> Tensors:
        if self._setup.request.allow_non_finite:
            return tensors
        return replace(tensors, values=finite(tensors.values, names))

    def close(self) -> None:
        self._checkpointer.finish()


def _names(session: Session) -> dict[torch.Tensor, str]:
    return {p: n for n, p in session.training_model.module.named_parameters() if p.requires_grad}


def check_same_course(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: Path, *, model: str, may_change: bool
) -> list[str]:
    """Raise UsageError unless a training with the options ``ours`` may resume from the checkpoint in ``folder``.

    Steps under different options would give a model that neither set of options gives. ``may_change``: options that
    the checkpoint's tensors do not depend on may differ; each gives a note.
    """
    problem = f"Cannot resume training from {folder}."
    if not ours.keys() <= theirs.keys():
        raise ModelError(
            problem,
            "It does not record the model and settings of its training: an older version of brim wrote it.",
            "Resume with the version of brim that wrote it, or give another --output to train anew.",
        )
    changed = {option: theirs[option] for option, now in ours.items() if theirs[option] != now}
    for option, before in changed.items():
        began, now = ("with other weights", f"with those of {model}") if option == "MODEL" else (
            "without it" if value is None else f"with {value}" for value in (before, ours[option])
        )  # fmt: skip
        todo = "Resume with the model and settings that it began with, or give another --output to train anew."
        if option not in _FIXED:
            if may_change:
                continue
            todo = "Resume with the settings that it began with, or add --change-settings to go on with these."
        raise UsageError(problem, f"{option} differs: that training began {began}, not {now}.", todo)
    return [f"{option} is {ours[option]} from here on; it was {before} before." for option, before in changed.items()]


def _rounding_notes(before: Plan, now: Plan) -> list[str]:
    """A note if the plan in force sums in another order than the plan of the checkpoint."""
    theirs, ours = Choice.of(before), Choice.of(now)
    changed = [
        f"{name} of {count} (before: {earlier})"
        for name, count, earlier in (
            ("micro-batches", ours.micro_batch, theirs.micro_batch),
            ("chunks of the loss", ours.chunk_tokens, theirs.chunk_tokens),
        )
        if count != earlier
    ]
    if not changed:
        return []
    return [f"The plan has {' and '.join(changed)}: sums are rounded in another order than before."]


def _identity(folder: Path) -> str:
    """A digest of the configuration, every tensor's name, type and shape and a few bytes from its middle: cheap, and
    different even between two trainings of the same model."""
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in config.items() if key not in _OF_NO_STEP}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name, source in sorted(read_checkpoint(folder).items()):
        digest.update(f"{name} {source.dtype} {list(source.shape)}".encode())
        extent = source.extents[0]
        middle = extent.bytes // 2
        fd = os.open(extent.path, os.O_RDONLY)
        try:
            digest.update(os.pread(fd, min(_SAMPLE_BYTES, extent.bytes - middle), extent.offset + middle))
        finally:
            os.close(fd)
    return digest.hexdigest()
