"""Rehearsals: run an unchanged program on simulated GPUs, in its own processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from brim.core.leak import LEAST_STEPS, Leak
from brim.core.options import option
from brim.device.environment import Environment
from brim.device.settings import DeviceSettings
from brim.errors import UsageError
from brim.processes import python_command, temporary_folder
from brim.recordings import snapshot as recordings
from brim.recordings.leaks import recorded_leak
from brim.rehearsal import force, others, values_library
from brim.rehearsal.watched import Run, events_after_steps

COPY_LIMIT_BYTES = 32 << 20  # larger copies to a device are skipped: their values are not computed with
GPUS_PER_NODE = 8  # of a job under torchrun
FOLDERS = "brim-rehearsal-"  # prefix of the names of temporary folders


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program to rehearse: a file, or with ``is_module`` a dotted name, with its own arguments, on ``gpus`` cards.

    ``ranks``: run only these ranks of a job of ``gpus`` ranks, a process each; empty: a single process that
    sees ``gpus`` cards. ``steps``: end after so many optimizer steps; None: when memory stops growing.
    ``memory_bytes`` and ``alloc_conf`` replace the card's memory and the allocator settings of the environment.
    ``changes``: changes to the program (``changes.py``).
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    gpu: str = option(kind="gpu", help='The simulated GPU: a name of the catalog, for example "RTX 4090".')
    gpus: int = option(1, "Number of simulated GPUs.")
    ranks: tuple[int, ...] = option(
        (),
        "Run only these ranks of a job of --gpus ranks, each in one process.",
        flags=("--rank",),
        kind="ranks",
        metavar="R,R...",
    )
    memory_bytes: int | None = option(
        None, "Memory of each GPU. [default: the card's]", flags=("--vram",), kind="bytes"
    )
    steps: int | None = option(
        None, "End after this number of optimizer steps. [default: when memory stops growing, 50 at most]"
    )
    random_weights: bool = option(
        False, "If a model is not on this machine, create it untrained from its configuration."
    )
    alloc_conf: str = ""
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problem = f"Cannot rehearse {self.target}."
        if self.gpus < 1:
            raise UsageError(problem, f"gpus is {self.gpus}.", "At least one GPU is needed.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(problem, f"steps is {self.steps}.", "At least one step is needed.")
        for rank in self.ranks:
            if not 0 <= rank < self.gpus:
                raise UsageError(problem, f"There is no rank {rank}.", f"Ranks are 0 to {self.gpus - 1}.")
        if len(set(self.ranks)) < len(self.ranks):
            raise UsageError(problem, f"Ranks are {', '.join(map(str, self.ranks))}.", "Name each of them once.")


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Memory peaks of a GPU, in bytes.

    Attributes:
        device: Its index.
        allocated_bytes: Of tensors, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_bytes: Of the allocator's segments for them.
        process_bytes: Of the process, its context included, as nvidia-smi counts.
        cache_flushes: How often the allocator returned cached memory because the GPU had no more for a request.
    """

    device: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    cache_flushes: int = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The result of a process of a rehearsal.

    Attributes:
        rank: Its rank; None for a program without ranks.
        ended: ``"finished"`` by itself, ``"enough"`` (ended after the requested steps), ``"out of memory"``, or
            ``"failed"`` for another reason.
        message: The program's own error, if there was one.
        steps: Number of optimizer steps.
        grew_until: The last step with a new peak; None without steps.
        ran_out: How often memory ran out, errors included from which the program recovered.
        devices: Peaks of every GPU that was used.
        memory_bytes: Memory of one GPU.
        context_bytes: The part of it that the CUDA context takes.
        context_source: Source of that figure.
        attention: Kernels chosen by ``scaled_dot_product_attention``, with counts.
        kernels: Launched attention kernels by name, with counts.
        reads: Where the program read numbers that were made up.
        not_computed: Operators that were not computed, for lack of a CPU kernel.
        left_bytes: Of weights that the program created on the CPU and that were left zero, so that they take no RAM.
        uses_cudnn: True if cuDNN was used, whose workspaces are not counted.
        changed: The request's changes that had an effect.
        other_processes: Number of processes that the program started and that used CUDA too, each on its own device.
            Nothing else about them is known.
        torch: PyTorch's version.
        seconds: The rehearsal's own time, not the GPU's.
        host_peak_bytes: Peak RAM of the process.
        snapshot: The recording, in PyTorch's format; None if CUDA was not used.
        leaks: By device, memory that grows with every step and is never freed.
    """

    rank: int | None
    ended: str
    message: str
    steps: int
    grew_until: int | None
    ran_out: int = 0
    devices: tuple[DevicePeak, ...]
    memory_bytes: int
    context_bytes: int
    context_source: str
    attention: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    reads: tuple[dict[str, Any], ...] = ()
    not_computed: tuple[str, ...] = ()
    left_bytes: int = 0
    uses_cudnn: bool = False
    changed: tuple[str, ...] = ()
    other_processes: int = 0
    torch: str = ""
    seconds: float
    host_peak_bytes: int
    snapshot: Path | None
    leaks: Mapping[int, Leak] = field(default_factory=dict)

    @property
    def leak(self) -> Leak | None:
        """The leak that fills its device first."""
        return min(self.leaks.values(), key=lambda leak: leak.full_step or 0, default=None)

    @property
    def fits(self) -> bool | None:
        """True if memory suffices; False also if a leak fills it within a number of steps that programs run.

        None if the program failed for another reason, or other processes used CUDA.
        """
        if self.ended == "out of memory":
            return False
        if self.ended != "failed" and self.leak is not None and self.leak.fills_memory:
            return False
        return None if self.ended == "failed" or self.other_processes else True


def rehearse_program(
    request: Request,
    environment: Environment,
    folder: Path,
    *,
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> list[Rehearsal]:
    """Run ``request`` with the CUDA build in ``environment``; recordings go into ``folder``. Returns a result per
    rank.

    ``output`` and ``errors`` receive the program's standard output and errors; None: those of this process.
    ``on_note`` is called with a sentence before anything that takes long.
    """
    if not values_library.is_built(environment.site_packages):
        on_note("Building the device's values for this PyTorch, once: half a minute.")
    values_library.build(environment.site_packages)
    visible = min(request.gpus, GPUS_PER_NODE) if request.ranks else request.gpus
    settings = DeviceSettings.of(
        request.gpu, gpus=visible, memory_bytes=request.memory_bytes, copy_limit_bytes=COPY_LIMIT_BYTES
    )
    variables = environment.variables(settings, os.environ)
    variables |= force.environment("whole", variables)
    # Compiling workers would be processes with their own devices.
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if environment.first is not None:  # it must stay first: after it come the user's packages, torch among them
        rest = variables["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(environment.first), *rest]))
    return [
        _process(request, environment, settings, variables, folder, rank, output, errors)
        for rank in request.ranks or (None,)
    ]


def _process(
    request: Request,
    environment: Environment,
    settings: DeviceSettings,
    variables: dict[str, str],
    folder: Path,
    rank: int | None,
    output: IO[str] | None,
    errors: IO[str] | None,
) -> Rehearsal:
    name = "" if rank is None else f"-rank{rank}"
    result, snapshot = folder / f"result{name}.json", folder / f"snapshot{name}.pickle"
    run = Run(
        target=request.target,
        arguments=request.arguments,
        is_module=request.is_module,
        result=str(result),
        snapshot=str(snapshot),
        steps=request.steps,
        world_size=0 if rank is None else request.gpus,
        random_weights=request.random_weights,
        changes=request.changes,
        parent=os.getpid(),
    )
    variables = variables | run.variables()
    if request.alloc_conf:
        variables |= dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), request.alloc_conf)
    if rank is not None:
        variables |= _of_rank(rank, request.gpus)
    begun_s = time.monotonic()
    done = subprocess.run(
        python_command("-m", "brim.rehearsal.watched", interpreter=environment.python),
        env=variables,
        stdout=output,
        stderr=errors,
        check=False,
        close_fds=False,  # the program may be a file descriptor of this process, as in <(...)
    )
    seconds = time.monotonic() - begun_s
    if result.exists():
        document = json.loads(result.read_text(encoding="utf-8"))
    else:
        document = {"ended": "failed", "message": _death(done.returncode), "steps": [], "devices": []}
    document["other_processes"] = others.count(Path(f"{result}.others"))
    return _read(document, settings, rank, seconds, snapshot)


def _death(code: int) -> str:
    """Describe the end of a process that left no result."""
    if code >= 0:
        return f"its process ended with exit code {code} and left no result"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"its process was ended by {name}" + (
        ", which Linux also sends when RAM runs out" if -code == signal.SIGKILL else ""
    )


def _of_rank(rank: int, world_size: int) -> dict[str, str]:
    """torchrun's variables for a rank, on nodes of 8 GPUs; NCCL's monitoring of other ranks is off."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % GPUS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(min(world_size, GPUS_PER_NODE)),
        "GROUP_RANK": str(rank // GPUS_PER_NODE),
        "GROUP_WORLD_SIZE": str(-(-world_size // GPUS_PER_NODE)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def _leaks(document: dict[str, Any], settings: DeviceSettings, snapshot: Path) -> dict[int, Leak]:
    """Leaks in the recording, by device."""
    steps = document["steps"]
    if 0 < len(steps) < LEAST_STEPS or not snapshot.exists():
        return {}
    events = events_after_steps(steps, document["recorded"])
    recorded = recordings.read(snapshot)
    leaks = {
        history.device: recorded_leak(
            history,
            recorded.stacks,
            events_after_steps=events.get(history.device, ()) if steps else None,  # None: backward passes
            available_bytes=settings.memory_bytes - settings.context_bytes,
        )
        for history in recorded.devices
    }
    return {device: leak for device, leak in leaks.items() if leak is not None}


def _read(
    document: dict[str, Any], settings: DeviceSettings, rank: int | None, seconds: float, snapshot: Path
) -> Rehearsal:
    steps = document["steps"]
    grew = [
        step["step"]
        for before, step in zip([{"devices": None}, *steps], steps, strict=False)
        if step["devices"] != before["devices"]
    ]
    count, message = document["other_processes"], document["message"]
    if count and document["ended"] in ("finished", "enough"):
        started = "1 process" if count == 1 else f"{count} processes"
        message = f"{started} that it started used CUDA, and their memory is not known"
    used = [
        DevicePeak(device=number, **device)
        for number, device in enumerate(document["devices"])
        if device["reserved_bytes"]
    ]
    return Rehearsal(
        rank=rank,
        ended=document["ended"],
        message=message,
        steps=len(steps),
        grew_until=grew[-1] if grew else None,
        ran_out=document.get("ran_out", 0),
        devices=tuple(used),
        memory_bytes=settings.memory_bytes,
        context_bytes=settings.context_bytes,
        context_source=settings.context_source,
        attention=document.get("attention", {}),
        kernels=document.get("kernels", {}),
        reads=tuple(document.get("reads", ())),
        not_computed=tuple(document.get("not_computed", ())),
        left_bytes=document.get("left_bytes", 0),
        uses_cudnn=bool(document.get("cudnn")),
        changed=tuple(document.get("changed", ())),
        other_processes=count,
        torch=document.get("torch", ""),
        seconds=seconds,
        host_peak_bytes=document.get("host_peak_bytes", 0),
        snapshot=snapshot if snapshot.exists() else None,
        leaks=_leaks(document, settings, snapshot),
    )


_CALL = """
import pickle, sys
sys.path.extend(path for path in {paths!r} if path not in sys.path)
with open({file!r}, "rb") as file:
    step = pickle.load(file)
for _ in range({steps}):
    step()
"""


def rehearse(
    step: Callable[[], object] | str | Path,
    *arguments: str,
    gpu: str,
    gpus: int = 1,
    ranks: Sequence[int] = (),
    steps: int | None = None,
    random_weights: bool = False,
    folder: str | Path | None = None,
) -> Rehearsal | list[Rehearsal]:
    """Run a program on a simulated GPU with PyTorch's CUDA build, in a separate process.

    Memory is the same as on the GPU: allocator, autograd and the choice of kernels are PyTorch's. Kernels do not
    compute: integers and small tensors are right, other values are made up. The program's output files are written.

    Args:
        step: The file of a program, or a function without arguments that creates its model and data on ``"cuda"`` and
            runs the steps of interest. pickle, or cloudpickle if it is installed, must be able to pickle it.
        arguments: The program's own command line.
        gpu: A name of the catalog: ``"RTX 4090"``; an NVIDIA GPU.
        gpus: The number of GPUs, at least 1.
        ranks: Run only these ranks (0 to ``gpus`` - 1) of a job of ``gpus`` ranks, each in its own process.
            Empty: a single process that sees ``gpus`` cards.
        steps: The optimizer steps after which a program ends; None: when memory stops growing, at most 50. For a
            function: the number of calls; None: three.
        random_weights: Build missing models from their configurations, untrained.
        folder: The folder for recordings. None: they are deleted.

    Returns:
        The result; with ``ranks``, a list with a result for each.

    Raises:
        UsageError: There is no CUDA build of PyTorch (neither the running one, nor one that ``brim
            rehearse`` downloaded), or a value is not allowed.
        UnsupportedError: The device cannot simulate that card.
    """
    from brim.device.environment import find

    environment = find()
    if environment is None:
        raise UsageError(
            "Cannot rehearse.",
            "There is no CUDA build of PyTorch.",
            "Fetch one: brim rehearse --gpu L40S --yes -m torch.utils.collect_env",
        )
    with temporary_folder(FOLDERS) as scratch:
        recordings_folder = Path(folder) if folder is not None else scratch
        recordings_folder.mkdir(parents=True, exist_ok=True)
        target = str(step) if not callable(step) else str(_program_of(step, scratch, steps or 3))
        request = Request(
            target=target,
            arguments=arguments,
            gpu=gpu,
            gpus=gpus,
            ranks=tuple(ranks),
            steps=None if callable(step) else steps,
            random_weights=random_weights,
        )
        results = rehearse_program(request, environment, recordings_folder)
    return results if ranks else results[0]


def _program_of(step: Callable[[], object], folder: Path, steps: int) -> Path:
    try:
        import cloudpickle as pickler
    except ImportError:
        import pickle as pickler
    file, program = folder / "step.pickle", folder / "step.py"
    problem, todo = "Cannot run the step in its own process.", "Define it in a module, or install cloudpickle."
    try:
        pickled = pickler.dumps(step)
    except Exception as error:
        raise UsageError(problem, f"It cannot be pickled: {error}.", todo) from error
    if pickler.__name__ == "pickle" and b"__main__" in pickled:  # a reference by name to another __main__
        raise UsageError(
            problem, "It is defined in this notebook or program itself, and only cloudpickle can pickle that.", todo
        )
    file.write_bytes(pickled)
    program.write_text(_CALL.format(paths=sys.path, file=str(file), steps=steps), encoding="utf-8")
    return program
