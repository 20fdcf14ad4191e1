"""Rehearsals: a program run unchanged on GPUs that are not there, in processes of its own."""

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

COPY_LIMIT_BYTES = 32 << 20  # larger copies to a device are left out: what they bring is not computed with
GPUS_PER_NODE = 8  # of a job that torchrun would start
FOLDERS = "brim-rehearsal-"  # how the names of temporary folders of rehearsals begin


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to rehearse: a file, or with ``is_module`` a dotted name, with its own arguments, on ``gpus`` cards.

    ``ranks``: run these ranks of a job of ``gpus`` ranks, one process each, and no other; empty: one process that
    sees ``gpus`` cards. ``steps``: end after so many optimizer steps; None: when memory grows no more.
    ``memory_bytes`` takes the place of the card's. ``alloc_conf``: settings of the allocator in the place of those in
    the environment. ``changes``: what is changed in the program (``changes.py``).
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    gpu: str = option(kind="gpu", help='The GPU that is not there, as in "RTX 4090": a name of the catalog.')
    gpus: int = option(1, "How many of them.")
    ranks: tuple[int, ...] = option(
        (),
        "Run these ranks of a job of --gpus ranks, one process each; no other rank exists.",
        flags=("--rank",),
        kind="ranks",
        metavar="R,R...",
    )
    memory_bytes: int | None = option(
        None, "Memory of each GPU. [default: the card's]", flags=("--vram",), kind="bytes"
    )
    steps: int | None = option(
        None, "End after so many optimizer steps. [default: when memory stops growing, 50 at most]"
    )
    random_weights: bool = option(False, "Make models that are not here from their configurations, untrained.")
    alloc_conf: str = ""
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        asked = f"Cannot rehearse {self.target}."
        if self.gpus < 1:
            raise UsageError(asked, f"gpus is {self.gpus}.", "At least one GPU is needed.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(asked, f"steps is {self.steps}.", "At least one step is needed.")
        for rank in self.ranks:
            if not 0 <= rank < self.gpus:
                raise UsageError(asked, f"There is no rank {rank}.", f"Ranks are 0 to {self.gpus - 1}.")
        if len(set(self.ranks)) < len(self.ranks):
            raise UsageError(asked, f"Ranks are {', '.join(map(str, self.ranks))}.", "Name each of them once.")


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """The most that one GPU held, in bytes.

    Attributes:
        device: Its index.
        allocated_bytes: Of tensors, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_bytes: Of what the allocator holds for them.
        process_bytes: Of the process, its context included, as nvidia-smi counts.
        cache_flushes: How often the allocator gave cached memory back because the GPU had no more for a request.
    """

    device: int
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    cache_flushes: int = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """How one process of a rehearsal went.

    Attributes:
        rank: Its rank; None for a program without ranks.
        ended: ``"finished"`` by itself, ``"enough"`` (ended after the steps that were wanted), ``"out of memory"``,
            or ``"failed"`` for another reason.
        message: The program's own error, if there was one.
        steps: Optimizer steps that were done.
        grew_until: The last step with a new peak; None without steps.
        ran_out: How often memory ran out, errors that the program got over included.
        devices: Peaks of every GPU that was used.
        memory_bytes: Memory of one GPU.
        context_bytes: What the CUDA context takes of it.
        context_source: Where that figure is from.
        attention: What ``scaled_dot_product_attention`` chose, and how often.
        kernels: Attention's kernels by name, and how often they were launched.
        reads: Where the program read numbers that were made up.
        not_computed: Operators that were not computed, for lack of a CPU kernel.
        left_bytes: Of weights that the program made on the CPU and that were left zero, so that they take no RAM.
        uses_cudnn: Whether cuDNN was used, whose workspaces are not counted.
        changed: Those of the request's changes that changed something.
        other_processes: How many processes that the program started used CUDA too, each on a device of its own of
            which nothing else is known.
        torch: PyTorch's version.
        seconds: The rehearsal's own time, not the GPU's.
        host_peak_bytes: The most RAM that the process held.
        snapshot: The recording, in PyTorch's format; None where CUDA was not used.
        leaks: By device, memory that grows with every step and that no step gives back.
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
        """Whether memory suffices, which it does not where a leak fills it in a number of steps that programs run.

        None where the program failed for another reason, or other processes used CUDA.
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
    told: Callable[[str], None] = lambda _: None,
) -> list[Rehearsal]:
    """Run ``request`` with the CUDA build in ``environment``; recordings go into ``folder``. A result for each rank.

    ``output`` and ``errors``: where the program's standard output and errors go, None: to this process's own.
    ``told`` is given a sentence
    before what takes long.
    """
    if not values_library.is_built(environment.site_packages):
        told("Building the device's values for this PyTorch, once: half a minute.")
    values_library.built(environment.site_packages)
    visible = min(request.gpus, GPUS_PER_NODE) if request.ranks else request.gpus
    settings = DeviceSettings.of(
        request.gpu, gpus=visible, memory_bytes=request.memory_bytes, copy_limit_bytes=COPY_LIMIT_BYTES
    )
    variables = environment.variables(settings, os.environ)
    variables |= force.environment("whole", variables)
    # Workers that compile would be processes with devices of their own.
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if environment.first is not None:  # it has to stay the first: behind it are the user's packages, torch among them
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
        close_fds=False,  # the program may be one of those that this process was given, as in <(...)
    )
    seconds = time.monotonic() - begun_s
    if result.exists():
        document = json.loads(result.read_text(encoding="utf-8"))
    else:
        document = {"ended": "failed", "message": _death(done.returncode), "steps": [], "devices": []}
    document["other_processes"] = others.count(Path(f"{result}.others"))
    return _read(document, settings, rank, seconds, snapshot)


def _death(code: int) -> str:
    """How a process ended that could not say it itself."""
    if code >= 0:
        return f"its process ended with exit code {code} and left no result"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"its process was ended by {name}" + (
        ", by which Linux also ends what takes too much RAM" if -code == signal.SIGKILL else ""
    )


def _of_rank(rank: int, world_size: int) -> dict[str, str]:
    """The variables that torchrun gives to a rank, on nodes of 8 GPUs; and no watching of ranks that do not exist."""
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
    """What the recording shows, by device."""
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
        message = f"{started} that it started used CUDA, and what they took is not known"
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
    """Run a program on a GPU that is not there, by PyTorch's own CUDA build, in a process of its own.

    Memory is as on the GPU: allocator, autograd and the choice of kernels are PyTorch's. Kernels compute nothing:
    whole numbers and small tensors are right, others are made up. What the program writes is written.

    Args:
        step: The file of a program; or a function without arguments that makes its model and data on ``"cuda"`` and
            runs what is to be looked at. A function must be one that pickle, or cloudpickle where it is installed,
            can take to another process.
        arguments: The program's own command line.
        gpu: A name of the catalog: ``"RTX 4090"``. NVIDIA's cards only.
        gpus: How many of them, at least 1.
        ranks: Run these ranks (0 to ``gpus`` - 1) of a job of ``gpus`` ranks, one process each; no other rank exists.
            Empty: one process that sees ``gpus`` cards.
        steps: Of a program: end it after so many optimizer steps; None: when memory grows no more, 50 at most. Of a
            function: how often it is called; None: three times.
        random_weights: Make models that are not here from their configurations, untrained.
        folder: Where recordings stay. None: they are deleted.

    Returns:
        How it went; with ``ranks``, a list with a result for each.

    Raises:
        UsageError: There is no CUDA build of PyTorch (neither the one that runs, nor one that ``brim rehearse``
            fetched), or a value that is not allowed.
        UnsupportedError: The device cannot play that card.
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
        kept = Path(folder) if folder is not None else scratch
        kept.mkdir(parents=True, exist_ok=True)
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
        results = rehearse_program(request, environment, kept)
    return results if ranks else results[0]


def _program_of(step: Callable[[], object], folder: Path, steps: int) -> Path:
    try:
        import cloudpickle as pickler
    except ImportError:
        import pickle as pickler
    file, program = folder / "step.pickle", folder / "step.py"
    asked, todo = "Cannot run the step in a process of its own.", "Define it in a module, or install cloudpickle."
    try:
        pickled = pickler.dumps(step)
    except Exception as error:
        raise UsageError(asked, f"It cannot be pickled: {error}.", todo) from error
    if pickler.__name__ == "pickle" and b"__main__" in pickled:  # by name alone, which there is another's
        raise UsageError(
            asked, "It is defined in this notebook or program itself, and only cloudpickle can pickle that.", todo
        )
    file.write_bytes(pickled)
    program.write_text(_CALL.format(paths=sys.path, file=str(file), steps=steps), encoding="utf-8")
    return program
