"""Settings of a training that are decided before the model is opened: machine, budget, folders, data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from brim.core import Hardware
from brim.core.files import identities
from brim.core.hardware import DISK, RAM
from brim.core.options import build
from brim.estimation.workload import training_precision
from brim.measure.capacity import amount_bytes
from brim.memory import heap
from brim.memory.scratch import scratch_folder
from brim.models.architecture import read_config
from brim.models.opening import prepare, read_tokenizer
from brim.planning import file as plan_file
from brim.planning.file import PlanFile
from brim.planning.inference.machine import budgets, machine, refuse_batch
from brim.run.data.dataset import Batches, Dataset, open_data
from brim.run.train.output_folder import OutputFolder
from brim.run.train.plan import with_plan
from brim.run.train.report import check_reporters, has_tensorboard
from brim.run.train.request import Request, orders_of
from brim.run.train.session import Terms


@dataclass(frozen=True, kw_only=True)
class Setup:
    """``folder`` has the model, ``output`` belongs to this training alone. ``plan`` is the given plan file."""

    request: Request
    hardware: Hardware
    budget_bytes: Mapping[str, int]
    folder: Path
    output: OutputFolder
    plan: PlanFile | None = None

    @property
    def name(self) -> str:
        """Name of the model, also when training resumes from a checkpoint of it."""
        model = Path(self.request.model).expanduser()
        return model.resolve().stem if model.is_file() else model.resolve().name if model.exists() else str(model)

    def precision(self) -> tuple[str, str]:
        """The precision of this training, and how it was chosen."""
        name, origin = training_precision(self.request.precision, self.request.method, self.hardware.compute)
        return name, origin if self.plan is None else "by the plan"

    def terms(self) -> Terms:
        """The session's settings. The RAM budget counts from this call on; a monitor of the peak begins after it."""
        settings = {
            "precision": self.precision()[0],
            "orders": orders_of(self.request),
            "hardware": self.hardware,
            "budget_bytes": self.budget_bytes,
            "start_bytes": heap.used_resident_bytes(),
            "plan": self.plan,
        }
        return build(Terms, vars(self.request) | settings)


def open_dataset(request: Request, data: str | Path, folder: Path) -> Dataset:
    """Data for the model in ``folder``, opened and checked."""
    config = read_config(folder, trust_remote_code=request.trust_remote_code)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return open_data(data, read_tokenizer(folder, str(request.model)), request.seq, vocab_size=rows)


def open_batches(request: Request, folder: Path) -> Batches:
    """The training data in batches, each of the length ``seq``, as promised."""
    dataset = open_dataset(request, request.data, folder)
    return Batches(dataset, request.batch, seed=request.seed, pad_to=request.seq)


def steps_of(request: Request, batches: Batches) -> int:
    return request.steps if request.steps is not None else batches.steps(request.epochs or 1)


def claim(request: Request) -> OutputFolder:
    """The output folder, locked for this training. Raises UsageError if it cannot be used."""
    inputs = [request.model, request.data, request.plan, request.eval_data]
    return OutputFolder(
        Path(request.output).expanduser(),
        resume=request.resume,
        overwrite=request.overwrite,
        reads=[Path(path).expanduser() for path in inputs if path is not None],
    )


def set_up(request: Request, output: OutputFolder, on_stage: Callable[[str], None]) -> Setup:
    """Measure the machine and find (or fetch, or convert) the model. Libraries are imported here.

    Raises UsageError for options that a plan contradicts, or where the model turns out to be in the output folder.
    """
    check_reporters(request.report_to)
    plan = None if request.plan is None else plan_file.read(request.plan)
    if plan is not None:
        request = with_plan(request, plan)
    hardware = machine(request.device)
    budget = budgets(hardware, request.vram, request.ram, request.device)
    if request.disk is not None:
        budget[DISK] = amount_bytes(request.disk, DISK, directory=scratch_folder(request.disk_folder))
    refuse_batch(request.batch, request.seq, budget[RAM])
    on_stage("opening the model")
    folder = prepare(request.model, trust_remote_code=request.trust_remote_code)
    if request.method == "lora" and importlib.util.find_spec("peft") is not None:
        importlib.import_module("peft")
    if has_tensorboard():
        importlib.import_module("tensorboard.compat.proto.event_pb2")
    output.refuse(identities([folder]))
    return Setup(request=request, hardware=hardware, budget_bytes=budget, folder=folder, output=output, plan=plan)
