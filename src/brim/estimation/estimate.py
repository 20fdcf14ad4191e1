"""``brim.estimate``: memory and seconds of a training or generation step, from a model's configuration alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from brim import catalog
from brim.allocator.caching_allocator import CachingAllocator
from brim.allocator.config import AllocatorConfig
from brim.allocator.device_memory import SimulatedDevice
from brim.core import EventKind, Hardware, Timeline, Trace
from brim.core.leak import MOST_STEPS, Leak, full_step
from brim.core.options import build
from brim.device.kernels import answers_for, begin
from brim.errors import BrimError, ModelError, OperationError, UnsupportedError, failed_import
from brim.estimation import growth as growing
from brim.estimation.bounds import Margin, margins
from brim.estimation.breakdown import Breakdown, at_peak
from brim.estimation.extrapolation import TRACED_TOKENS, Template, extend_depth, extend_tokens, find_depth
from brim.estimation.models import Source, find_model, place_in, short
from brim.estimation.packed_weights import has_equal_layers
from brim.estimation.quantization import SCHEMES, quantize
from brim.estimation.silence import quiet
from brim.estimation.simulation import Place, Replay, capability_of, place_of, reserved_at_steps, simulate
from brim.estimation.steps import PROGRAM, Job
from brim.estimation.workload import ASKED, DEFAULT_NEW_TOKENS, Workload
from brim.predict import cost
from brim.predict.lowering.kernel import TEMPORARIES
from brim.predict.tracer import trace
from brim.printable import Readable
from brim.units import format_bytes

_OTHER_MODEL = 0.01  # of the bytes in files: a configuration further off may be of another model
_MOST_BYTES = 1 << 56  # of one tensor: sums of many still fit into 64-bit integers
_ANSWERED = (
    "not modelled: PyTorch's CUDA build answers what these kernels allocate; `brim rehearse` downloads a build where "
    "none is installed"
)
_STEPS = {"train": 2, "generate": 1}  # the first training step creates the optimizer's state, the second has it


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Peaks of one GPU's memory, in bytes.

    Attributes:
        allocated: Tensors in the allocator's blocks: ``torch.cuda.max_memory_allocated``.
        reserved: Memory that the allocator has taken for them: ``torch.cuda.max_memory_reserved``.
        process: Reserved memory and the CUDA context, as ``nvidia-smi`` counts.
    """

    allocated: int
    reserved: int
    process: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate(Readable):
    """The memory and time of a step. A step that does not fit is described as if memory were unlimited.

    Attributes:
        model: The model's name.
        workload: The request, with a value for every setting.
        gpu: The card's name; ``""`` without one.
        total_bytes: Memory of the GPU. None without one.
        peak_bytes: Allocated, reserved and process bytes at their peaks.
        upper_bound_bytes: A safe bound: ``peak_bytes.process`` and all ``margins``.
        margins: Additions to the prediction that are possible, each with its bytes and its reason.
        at_peak_bytes: Bytes of tensors at the peak, by category (``parameters``, with buffers;
            ``gradients``, ``optimizer_state``, ``activations``, ``temporary``, ``kv_cache``, ``inputs``,
            ``workspaces``), and the CUDA ``context``.
        per_module: The same bytes without the context, by path of the module that allocated them.
        rounding_bytes: Bytes that the allocator adds by rounding: ``peak_bytes.allocated`` is the sum of
            ``per_module`` and this.
        step_s: Seconds of a step, from the card's rates. None without a GPU, if its rates are unknown, and for a
            rehearsal.
        flops: Floating-point operations of the last step. None for a rehearsal.
        not_modelled: Operations whose kernels allocate an unknown number of bytes, counted as 0.
        fits: True if the step fits into the memory of the GPU. None without a GPU.
        notes: Assumptions, and the sources of figures.
        out_of_memory: The operation that does not fit, with PyTorch's message; ``""`` if the step fits.
        is_program: True for a program, whose own settings replace those of ``workload``.
        by: ``"trace"``, or ``"rehearsal"`` (a program run by PyTorch's CUDA build on a simulated GPU).
        precision_origin: The origin of the precision: the request, the configuration, the checkpoint or a default.
            ``""`` for a program and for a step of the user's own.
        differs: Differences between the estimated step and that of brim's own commands, by part of the step
            (``"optimizer"``, ``"cache"``, ...). Empty if there are none, and for users' own code.
        leak: Memory that grows with every step; None: it does not. Peaks are those of the steps that were run.
        stored_bytes: Bytes of the weights in the files of a model of the hub; None for other models.
    """

    model: str
    workload: Workload
    gpu: str
    peak_bytes: PeakBytes
    upper_bound_bytes: int
    margins: tuple[Margin, ...]
    at_peak_bytes: dict[str, int]
    per_module: dict[str, int]
    rounding_bytes: int
    step_s: float | None
    flops: int | None
    not_modelled: tuple[str, ...]
    fits: bool | None
    notes: tuple[str, ...]
    out_of_memory: str = ""  # the operation that does not fit, and PyTorch's message
    is_program: bool = False  # it decides itself on the settings of ``workload``
    by: str = "trace"
    precision_origin: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    leak: Leak | None = None
    stored_bytes: int | None = None
    total_bytes: int | None = None

    _PRINTER = "brim.cli.estimate.command:print_estimate"

    @property
    def title(self) -> str:
        return f"{self.model} on {self.gpu}" if self.gpu else self.model

    @property
    def settings(self) -> str:
        return f"as it is, by {self.by}" if self.is_program else self.workload.describe()

    def describe(self) -> str:
        """The workload in one line."""
        return f"{self.title}: {self.settings}"

    @property
    def program(self) -> str:
        """A sentence on the estimated step and its differences to brim's own commands."""
        parts = "; ".join(f"{part}: {text}" for part, text in self.differs.items())
        return f"the step is that of {PROGRAM}" + (f"; brim's own commands differ: {parts}" if parts else "")

    @property
    def context_bytes(self) -> int:
        """Bytes of the process outside the allocator."""
        return self.at_peak_bytes["context"]

    def to_json(self) -> dict[str, Any]:
        """Return the document that ``brim estimate --json`` prints."""
        return {
            "peak_bytes": asdict(self.peak_bytes),
            "upper_bound_bytes": self.upper_bound_bytes,
            "at_peak_bytes": dict(self.at_peak_bytes),
            "per_module": dict(self.per_module),
            "step_s": self.step_s,
            "flops": self.flops,
            "not_modelled": list(self.not_modelled),
            "notes": list(self.notes),
            "fits": self.fits,
            "leak": None if self.leak is None else asdict(self.leak),
            "stored_bytes": self.stored_bytes,
            "by": self.by,
            "precision": self.workload.precision,
            "precision_origin": self.precision_origin,
            "program": PROGRAM,
            "brim_differs": dict(self.differs),
        }


def estimate(
    model: str | Path | Callable[[], Any],
    task: str = "train",
    *,
    batch: int = 1,
    seq: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    method: str | None = None,
    checkpointing: str | None = None,
    new_tokens: int | None = None,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] | None = None,
    gpu: str | catalog.Gpu | Hardware | None = None,
    vram: str | int | None = None,
    alloc_conf: str = "",
) -> Estimate:
    """Predict the GPU memory and the seconds of one step of a model. Nothing is run and no GPU is needed.

    The step is traced on fake tensors, as ``brim.trace`` does, and its allocations go through a simulation of
    PyTorch's CUDA caching allocator, as in ``brim.simulate``. Settings that do not apply to the model (``seq`` for a
    model of images) are ignored with a warning.

    Args:
        model: A hub id (``"org/name"``, ``"org/name@revision"``), of which the configuration and the headers of the
            weights are fetched unless they are in the hub's cache; a name of the catalog (``"llama-3.2-1b"``), a
            ``config.json`` or the folder that has one, ``"file.py:function"``, or a function. A function takes no
            arguments and returns a step to trace (itself a function without arguments), or a model and its inputs as
            a pair.
        task: ``"train"`` (forward, backward, optimizer) or ``"generate"`` (the prompt and all new tokens).
        batch: Sequences, or images, of one step.
        seq: Tokens of a sequence, or of the prompt. None: 4,096, or the model's longest sequence if that is shorter.
        precision: ``"fp32"``, ``"bf16"``, ``"bf16-mixed"``, ``"fp16-mixed"``, ``"fp8"``, ``"int8"``, ``"int4"``
            or ``"stored"``; ``Workload`` explains them. None: ``"stored"`` for quantized checkpoints, else the
            configuration's precision, with float16 replaced by bf16.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``, ``"rmsprop"``,
            ``"adagrad"``, ``"lion"`` or ``"adamw8bit"`` (torchao's). None: adamw.
        method: ``"full"`` or ``"lora"`` (PEFT's adapters). None: full.
        checkpointing: ``"none"``, ``"selective"``, ``"alternate"`` (every other matrix product is kept) or
            ``"full"``. None: none.
        new_tokens: Tokens to generate, for the task ``"generate"``. None: 128.
        lora_rank: Rank of the adapters. None: PEFT's default, 8.
        lora_targets: Last parts of the names of modules with adapters, ``["q_proj", "v_proj"]``, or
            ``["all-linear"]``. None: PEFT's choice for the model.
        gpu: A name of the catalog (``"RTX 4090"``), a ``Gpu`` of the catalog, or a ``Hardware``. None: unlimited
            memory, and no seconds.
        vram: Without ``gpu``: the memory of a card that is not in the catalog, ``"12GiB"``; no seconds are predicted.
            With ``gpu``: its free memory, ``"20GiB"`` or ``"90%"``.
        alloc_conf: Settings of the allocator in the form of ``PYTORCH_ALLOC_CONF``: ``"expandable_segments:True"``.

    Returns:
        Peaks in bytes, their parts, the seconds of a step, and if it fits.

    Raises:
        UsageError: An unknown name or a value that is not allowed; the message names similar ones.
        ModelError: No model can be built from the configuration, or the function fails.
        UnsupportedError: brim cannot predict the model or the setting.
    """
    targets = None if lora_targets is None else tuple(lora_targets)
    workload = build(Workload, {**locals(), "lora_targets": targets})
    return Study(find_model(model), workload, place_of(gpu, vram), hardware_of(gpu), alloc_conf).estimate()


class Study:
    """A model and workload on one GPU: one trace, and several answers from it."""

    def __init__(
        self, source: Source, workload: Workload, place: Place, hardware: Hardware | None, alloc_conf: str, *,
        checked: bool = True,
    ) -> None:  # fmt: skip
        device = SimulatedDevice(place.available_bytes, place.total_bytes)
        CachingAllocator(AllocatorConfig.parse(alloc_conf), device=device)  # reports a mistake before the trace
        self.source, self.place, self.hardware, self.alloc_conf = source, place, hardware, alloc_conf
        self.capability = capability_of(place)
        begin(self.capability)
        _check_float8(workload, place, self.capability)
        self.job = Job(source, workload)
        self.trace = traced(self.job, self.capability, checked=checked)
        _check_bytes(self.trace, source)
        for ignored in self.job.ignored:
            warnings.warn(ignored, stacklevel=4)

    @property
    def workload(self) -> Workload:
        return self.job.workload

    def estimate(self) -> Estimate:
        timeline, failure = self._timeline()
        peaks = timeline.peak_bytes
        breakdown: Breakdown = at_peak(self.trace, timeline)
        added = margins(self.trace, timeline, self.place, self.alloc_conf, self._crowded())
        leak = self._leak()
        last = max((op.step for op in self.trace.ops), default=0)
        return Estimate(
            model=self.source.name,
            workload=self.workload,
            gpu=self.place.name,
            total_bytes=self.place.total_bytes,
            peak_bytes=PeakBytes(allocated=peaks.allocated, reserved=peaks.reserved, process=peaks.process),
            upper_bound_bytes=peaks.process + sum(margin.bytes for margin in added),
            margins=added,
            at_peak_bytes=breakdown.by_category | {"context": self.place.context.bytes},
            per_module=breakdown.by_module,
            rounding_bytes=breakdown.rounding_bytes,
            step_s=None if self.hardware is None else cost.step_s(self.trace, self.hardware),
            flops=sum(op.flops for op in self.trace.ops if op.step == last),
            not_modelled=self.trace.not_modelled,
            fits=None if self.place.total_bytes is None else not failure and (leak is None or not leak.fills_memory),
            notes=(*self._of_source(breakdown.by_category["parameters"]), *self._notes(timeline)),
            stored_bytes=None if self.source.stored is None else sum(t.bytes for t in self.source.stored.values()),
            out_of_memory=failure,
            precision_origin=self.job.precision_origin,
            differs=self.job.differs,
            leak=leak,
        )

    def _leak(self) -> Leak | None:
        """The leak in the trace, and the step in which it fills this GPU."""
        leak, available_bytes = self.trace.leak, self.place.available_bytes
        if leak is None or available_bytes is None:
            return leak
        replay = simulate(self.trace, replace(self.place, total_bytes=None), self.alloc_conf)
        reserved = reserved_at_steps(self.trace, replay)
        return replace(leak, full_step=full_step(leak, available_bytes, replay.peak_bytes.allocated, reserved))

    def _crowded(self) -> Trace | None:
        """The same step with all tokens at the same experts; None if its memory does not depend on that."""
        if "routing" not in self.trace.notes:
            return None
        return traced(Job(self.source, self.workload), self.capability, "crowded")

    def _timeline(self) -> tuple[Timeline, str]:
        """The timeline on this GPU; if the step does not fit, in unlimited memory, with the failure."""
        timeline = simulate(self.trace, self.place, self.alloc_conf)
        failed = timeline.out_of_memory
        if failed is None:
            return timeline, ""
        return simulate(self.trace, replace(self.place, total_bytes=None), self.alloc_conf), failed.label

    def _of_source(self, parameters_bytes: int) -> Iterator[str]:
        """Yield what is known of the model's configuration and of its weights on the hub."""
        if self.source.assumed:
            yield self.source.assumed
        if self.source.stored is None:
            return
        stored_bytes = sum(tensor.bytes for tensor in self.source.stored.values())
        note = f"weights: {len(self.source.stored):,} tensors of {stored_bytes:,} B by the headers of its files"
        workload, is_given = self.workload, self.job.precision_origin == ASKED
        as_stored = not is_given and workload.precision not in SCHEMES and workload.method != "lora"
        if as_stored and abs(parameters_bytes - stored_bytes) > _OTHER_MODEL * stored_bytes:
            note += f"; its configuration describes parameters of {parameters_bytes:,} B"
        yield note

    def _notes(self, timeline: Timeline) -> tuple[str, ...]:
        told, precision = {**self.job.notes, **self.trace.notes}, self.workload.precision
        if self.job.template is not None and precision in SCHEMES:  # the traced model has fewer layers
            with quiet(), torch.device("meta"):
                model = Job(self.source, self.workload).module()
                told[precision] = quantize(model, precision, training=self.workload.task == "train")
        notes = [f"{subject}: {text}" for subject, text in told.items()]
        notes += self.place.notes
        notes += self._emptied(timeline)
        if any(name.endswith(TEMPORARIES) for name in self.trace.not_modelled):
            answers = answers_for(self.capability)
            notes.append(f"{_ANSWERED}. {answers.problem}" if answers and answers.problem else _ANSWERED)
        notes.append(f"CUDA context of {self.place.context.bytes:,} B: {self.place.context.source}")
        return tuple(notes)

    def _emptied(self, timeline: Timeline) -> list[str]:
        """A note for a step that fits only because the allocator gives cached blocks back."""
        if EventKind.SEGMENT_FREE not in timeline.column("kind"):
            return []
        held = Replay(self.trace, self.alloc_conf).peaks(None, self.place).reserved_bytes
        if held <= timeline.peak_bytes.reserved:
            return []
        return [
            "allocator: memory was full of blocks that it kept, and it gave unused ones back, which takes time; with "
            f"more memory it would hold {format_bytes(held)}"
        ]

    def growth(self) -> growing.Growth:
        """Growth of the peak with batch and sequence, from traces at other sizes."""
        tracer = growing.Tracer(place=self.place, alloc_conf=self.alloc_conf, sample=self._sample, again=self._again)
        return growing.solve(tracer, self.job, self.trace)

    def _sample(self, workload: Workload, template: Template | None) -> Trace:
        job = Job(self.source, workload)
        if template is None:
            return traced(job, self.capability, checked=False)
        with quiet():
            return _traced_whole(_brief(job).with_layers(template.field, template.layers), self.capability)

    def _again(self, workload: Workload) -> tuple[Job, Trace]:
        job = Job(self.source, workload)
        trace = traced(job, self.capability, checked=False)
        return job, trace


def traced(job: Job, capability: tuple[int, int], routing: str = "balanced", *, checked: bool = True) -> Trace:
    """Trace a job; of a long generation, trace a few tokens and repeat them where that is exact.

    ``checked=False``: assume that this size repeats exactly, because another size of this workload does.
    """
    brief = _brief(job)
    if brief is job:
        return _traced(job, capability, routing)
    new = job.workload.new_tokens or DEFAULT_NEW_TOKENS
    few = _traced(brief, capability, routing)
    job.adopt(brief)
    if brief.workload.new_tokens is None:  # generates no text
        return few
    job.workload = replace(brief.workload, new_tokens=new)
    far = None
    if checked or job.has_windows:
        later = Job(job.source, brief.workload, full=brief.full, later=new - TRACED_TOKENS)
        far = _traced(later, capability, routing)
    extended = extend_tokens(few, new, far)
    if extended is None:
        return _traced(Job(job.source, job.workload), capability, routing)
    if brief.template is not None and not job.has_windows:
        job.template = brief.template.longer(extended[1])
    return extended[0]


def _brief(job: Job) -> Job:
    """Return the job of a few tokens that a long generation repeats; the job itself where there is none."""
    workload = job.workload
    new = workload.new_tokens or DEFAULT_NEW_TOKENS
    if workload.task != "generate" or job.source.library != "transformers" or new <= TRACED_TOKENS + 1:
        return job
    return Job(job.source, replace(workload, new_tokens=TRACED_TOKENS), full=workload)


def _traced(job: Job, capability: tuple[int, int], routing: str = "balanced") -> Trace:
    """Trace a job; of a deep model, trace a few layers and repeat them where that is exact."""
    with quiet():
        depth = find_depth(job.source)
        if depth is not None and has_equal_layers(job.source, range(depth.special, depth.layers)):
            counts = range(depth.fewest, depth.fewest + 3)
            jobs = [job.with_layers(depth.field, count) for count in counts]
            traces = [_traced_whole(shallow, capability, routing) for shallow in jobs]
            extended = extend_depth(traces, depth.layers - counts[0])
            if extended is not None:
                job.adopt(jobs[0])
                trace, storages = extended
                origins = tuple((position, position, position, 0) for position in storages)
                job.template = Template(field=depth.field, layers=counts[1], trace=traces[1], storages=origins)
                return trace
    return _traced_whole(job, capability, routing)


def _traced_whole(job: Job, capability: tuple[int, int], routing: str = "balanced") -> Trace:
    """Trace every layer. Raises ModelError with a clear message if the model cannot be built or run."""
    try:
        with quiet():
            return trace(
                job.build, steps=_STEPS[job.workload.task], target="cuda", model=job.source.name,
                most_steps=MOST_STEPS if job.source.library == "python" else None,
                capability=capability, routing=routing,
            )  # fmt: skip
    except OperationError as error:
        raise _failed(job, error.__cause__ or error) from error
    except BrimError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(job, error) from error


def _failed(job: Job, error: BaseException) -> ModelError:
    asked = f"Cannot trace a {job.workload.task} step of {job.source.name}."
    if job.source.library == "python":
        return ModelError(
            asked, f"It fails{place_in(error, job.source.file)}: {short(error)}", "Correct the function."
        )
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return ModelError(asked, f"{package} is not installed.", f"Run pip install {package}.")
    if isinstance(error, Exception) and (refusal := failed_import(error)):
        return ModelError(asked, f"{refusal.request} {refusal.reason}", refusal.todo)
    library = f"{job.source.library} {version(job.source.library)}"
    todo = f"Its sizes may contradict each other. If they are as published, try another version than {library}."
    return ModelError(asked, f"It fails: {short(error)}", todo)


def hardware_of(gpu: str | catalog.Gpu | Hardware | None) -> Hardware | None:
    """The GPU with its rates; None if the catalog lacks a rate, so that seconds are unknown."""
    if gpu is None or isinstance(gpu, Hardware):
        return gpu
    card = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    return card.hardware() if card.flops_per_s and card.bytes_per_s else None


def _check_bytes(trace: Trace, source: Source) -> None:
    largest = max((storage.bytes for storage in trace.storages), default=0)
    if largest > _MOST_BYTES:
        raise ModelError(
            f"Cannot estimate a step of {source.name}.",
            f"One of its tensors has {largest:,} B, more than any machine has.",
            "Give a smaller batch or fewer tokens, or correct the model's sizes.",
        )


def _check_float8(workload: Workload, place: Place, capability: tuple[int, int]) -> None:
    if workload.precision == "fp8" and place.name in catalog.gpu_names() and capability < (8, 9):
        raise UnsupportedError(
            f"Cannot use precision=fp8 on {place.name}.",
            "It has no float8 units: they need compute capability 8.9.",
            "Use bf16, or an Ada, Hopper or later GPU.",
        )
