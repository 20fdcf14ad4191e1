"""A training's checkpoints: what goes into them, and how a session begins from one."""

from __future__ import annotations

from pathlib import Path

import torch

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
# Between steps, when a step's activations are gone: less than they take in any model worth a checkpoint.
_STAGING_BYTES = 8 << 20


class Saver:
    """Writes and reads the checkpoints of one training."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        setup.output.mkdir(parents=True, exist_ok=True)
        self._checkpointer = Checkpointer(setup.output, asynchronous=False, staging_bytes=_STAGING_BYTES)
        self._saved: set[int] = set()  # of this run: a damaged one of an earlier run is written again
        self.notes: list[str] = []  # about checkpoints that were passed over

    def start(self, terms: Terms, batches: Batches) -> tuple[Session, int]:
        """A session and the number of the step that it goes on with; 0 without ``resume``."""
        resume = self._setup.request.resume and checkpoint_reading.steps(self._setup.output)
        found = checkpoint_reading.latest(self._setup.output) if resume else None
        if found is None:
            torch.manual_seed(terms.seed)
        return self._open(terms, batches, found, 0 if found is None else int(found.state["rung"]))

    def restart(self, terms: Terms, batches: Batches, rung: int) -> tuple[Session, int]:
        """From the last checkpoint, or the beginning where there is none, on another rung."""
        found = (
            checkpoint_reading.latest(self._setup.output) if checkpoint_reading.steps(self._setup.output) else None
        )
        if found is None:
            torch.manual_seed(terms.seed)
            batches.load_state_dict(self._setup.batches().state_dict())
        return self._open(terms, batches, found, rung)

    def _open(self, terms: Terms, batches: Batches, found: Checkpoint | None, rung: int) -> tuple[Session, int]:
        if found is not None:
            self.notes += found.skipped
            self._checkpointer.protect(found.folder)  # weights rest there, and the tokenizer is copied from it
        folder = self._setup.folder if found is None or terms.method == "lora" else found.folder
        session = Session.open(terms, folder, rung=rung)
        if found is None:
            torch.manual_seed(terms.seed)  # whatever opening drew
            return session, 0
        try:
            self._restore(session, found)
            batches.load_state_dict(found.state["data"])
            restore_rng(found.state["rng"])
        except BaseException:
            session.close()
            raise
        return session, found.step

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
            "rung": session.rung,
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
        folder = self._setup.output
        for name, content in files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            (folder / name).write_bytes(data)
        write_safetensors(
            folder / f"{tensors.stem}.safetensors", tensors.layout, tensors.values, dict(tensors.metadata)
        )

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
