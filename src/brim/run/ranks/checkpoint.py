"""Checkpoints of a training over ranks: PyTorch's distributed checkpoint behind brim's manifest and checksums.

Every rank writes its shards as safetensors (``torch.distributed.checkpoint.HuggingFaceStorageWriter``; no pickle),
rank 0 the manifest, last. Weights and optimizer states have their names in the full model and their offsets in the
full tensors, so that any number of ranks in any split reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from brim.errors import TransferError, UsageError
from brim.run.checkpoint import reading as checkpoint_reading
from brim.run.checkpoint.contents import adapter_files, adapter_tensors, model_files, model_tensors
from brim.run.checkpoint.manifest import checkpoint_folder, partial_folder
from brim.run.checkpoint.reading import entry_of
from brim.run.checkpoint.record import OutputRecord
from brim.run.checkpoint.writer import FolderWriter
from brim.run.data.dataset import Batches
from brim.run.ranks.group import Ranks
from brim.run.ranks.model import Part, Recipe, open_whole
from brim.run.train.finite import diverged, is_finite
from brim.run.train.output_folder import OutputFolder
from brim.run.train.saving import check_same_course

_KEPT = 2  # checkpoints
_READ_BYTES = 1 << 30  # of full tensors in memory at once, while the model is exported
_STATE = "optimizer:"  # prefix of the name of an optimizer's state: PARAMETER:KEY follows


class SplitSaver:
    """Writes and reads the checkpoints of one training, on every rank at once."""

    def __init__(
        self, ranks: Ranks, part: Part, recipe: Recipe, output: Path, model: str | Path, course: Mapping[str, Any], *,
        allow_non_finite: bool = False, may_change: bool = False,
    ) -> None:  # fmt: skip
        self._allow_non_finite, self._may_change = allow_non_finite, may_change
        self._ranks, self._part, self._recipe = ranks, part, recipe
        self._output, self._model = output, str(model)
        self._course = {"MODEL": self._model, **course, "--precision": recipe.precision}
        self._resumed_at = 0
        self.notes: list[str] = []

    def start(self, batches: Batches) -> int:
        """Read the newest complete checkpoint; returns the number of its step, 0 if there is none."""
        if not checkpoint_reading.steps(self._output):
            return 0
        checkpoint = self._ranks.of_first(self._newest)
        folder = checkpoint_folder(self._output, checkpoint["step"])
        state = checkpoint["state"]
        self._ranks.agree(lambda: self._check(state, folder))
        self._ranks.agree(lambda: batches.load_state_dict(state["data"]))
        self.notes += checkpoint["skipped"]
        self._make_states()
        with _quiet():
            load(self._tensors(), storage_reader=HuggingFaceStorageReader(str(folder)))
        self._set_counters(state["updates"])
        self._resumed_at = int(checkpoint["step"])
        return self._resumed_at

    def _newest(self) -> dict[str, Any]:
        checkpoint = checkpoint_reading.latest(self._output)
        return {"step": checkpoint.step, "state": dict(checkpoint.state), "skipped": list(checkpoint.skipped)}

    def _check(self, state: dict[str, Any], folder: Path) -> None:
        if state.get("ranks") is None:
            raise UsageError(
                f"Cannot resume training from {folder}.", "It is the checkpoint of a training on one rank.",
                "Resume without torchrun, or train anew from that folder's model.",
            )  # fmt: skip
        self.notes += check_same_course(
            state["course"], self._course, folder, model=self._model, may_change=self._may_change
        )

    def save(self, step: int, batches: Batches) -> None:
        """Write a checkpoint after ``step`` steps. An error of any rank is raised on all of them: TransferError when
        the disk refuses, ModelError for values that are not finite."""
        self._ranks.agree(self._check_finite)
        ranks, folder = self._ranks, partial_folder(checkpoint_folder(self._output, step))
        writer = FolderWriter(self._output, step, ())
        ranks.agree(lambda: _write(folder, writer.create) if ranks.is_first else None)
        with _quiet(), _as_transfer(folder):
            save(self._tensors(), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        own = f"shard-{ranks.rank + 1:05d}-*"  # PyTorch numbers files by rank, from 1 on
        mine = ranks.agree(lambda: {path.name: entry_of(path) for path in folder.glob(own)})
        gathered: list[Any] | None = [None] * ranks.world if ranks.is_first else None
        dist.gather_object(mine, gathered)
        ranks.agree(lambda: _write(folder, lambda: self._commit(writer, gathered, batches)) if gathered else None)

    def _check_finite(self) -> None:
        """Check this rank's part."""
        bad = (name for name, tensor in self._tensors().items() if not is_finite(tensor))
        if not self._allow_non_finite and (name := next(bad, None)) is not None:
            raise diverged(name.removeprefix(_STATE))

    def _commit(self, writer: FolderWriter, gathered: list[Any], batches: Batches) -> None:
        for entries in gathered:
            for name, entry in entries.items():
                writer.adopt(name, entry)
        split = self._recipe.split
        state = {
            "course": self._course, "data": batches.state_dict(), "updates": int(next(self._counters(), 0)),
            "ranks": split.gpus, "mesh": {name: split.size(name) for name in ("pp", "dp", "tp")},
        }  # fmt: skip
        writer.commit(state)
        writer.prune(_KEPT, ())

    def export(self, step: int, batches: Batches, output: OutputFolder | None, *, keep: bool) -> None:
        """Write the model into the output folder in transformers' form, from a last checkpoint, which is deleted
        afterwards unless checkpoints were asked for. ``output`` is that folder on the first rank."""
        if step != self._resumed_at:  # else that checkpoint exists, and stays
            self.save(step, batches)
        keep = keep or step == self._resumed_at
        self._ranks.agree(lambda: self._export(step, output, keep=keep) if output else None)

    def _export(self, step: int, output: OutputFolder, *, keep: bool) -> None:
        folder = checkpoint_folder(self._output, step)
        if self._recipe.method == "lora":
            _write(self._output, lambda: self._write_adapter(folder, output))
        else:
            self._write_model(folder, output)
        if not keep:
            _write(self._output, lambda: OutputRecord(self._output).remove_checkpoint(folder))

    def _write_adapter(self, folder: Path, output: OutputFolder) -> None:
        training_model = open_whole(self._recipe)
        trained = {name: p.data for name, p in training_model.module.named_parameters() if p.requires_grad}
        with _quiet():
            load(dict(trained), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        files = adapter_files(training_model.module, training_model.base, self._recipe.folder)
        output.export(adapter_tensors(training_model.module), files)

    def _write_model(self, folder: Path, output: OutputFolder) -> None:
        module = open_whole(self._recipe).module
        tensors = model_tensors(module)
        buffers = dict(module.named_buffers())
        names = [name for name, _, _ in tensors.layout if name not in buffers]
        shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in tensors.layout}

        def values() -> Iterator[tuple[str, torch.Tensor]]:
            yield from ((name, buffers[name]) for name, _, _ in tensors.layout if name in buffers)
            for group in _groups(names, shapes):
                read = {name: torch.empty_like(shapes[name], device="cpu") for name in group}
                with _quiet():
                    load(dict(read), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
                yield from read.items()

        files = model_files(module, self._recipe.folder)
        _write(self._output, lambda: output.export(replace(tensors, values=values()), files))

    # -- content of a checkpoint
    # ---------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Any]:
        """Trained weights and their optimizer states by name. A DTensor has its own offsets in the full tensor."""
        named = {name: p for name, p in self._part.named_parameters().items() if p.requires_grad}
        tensors: dict[str, Any] = {name: parameter.detach() for name, parameter in named.items()}
        state = self._part.optimizer.state
        for name, parameter in named.items():
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    tensors[f"{_STATE}{name}:{key}"] = value
        return tensors

    def _make_states(self) -> None:
        """Create the optimizer's states with a step at rate 0, which changes no weight."""
        optimizer = self._part.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _counters(self) -> Iterator[torch.Tensor]:
        for state in self._part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                yield state["step"]

    def _set_counters(self, updates: int) -> None:
        for counter in self._counters():
            counter.fill_(updates)


def _groups(names: list[str], shapes: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of tensors that are in memory together."""
    group: list[str] = []
    group_bytes = 0
    for name in names:
        size = shapes[name].numel() * shapes[name].itemsize
        if group and group_bytes + size > _READ_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += size
    if group:
        yield group


def _write(folder: Path, action: Callable[[], None]) -> None:
    with _as_transfer(folder):
        action()


@contextmanager
def _as_transfer(folder: Path) -> Iterator[None]:
    """Convert errors of the disk to TransferError."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        reason = " ".join(str(error).split())
        raise TransferError(
            f"Cannot write a training checkpoint to {folder}.", f"{reason:.300}",
            "Free some disk space and continue with --resume: older checkpoints are intact.",
        ) from error  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress PyTorch's warnings about its own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
