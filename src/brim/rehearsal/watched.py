"""The process of a rehearsed program: runs the program as ``python`` would, and records its memory.

Started as ``python -P -m brim.rehearsal.watched`` with ``BRIM_REHEARSAL_RUN`` (a ``Run`` as JSON) in the environment,
on the rehearsal device. It writes a memory snapshot in PyTorch's own format, and a JSON file with the other results.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from brim.core.files import replacing, write_text
from brim.core.leak import MOST_STEPS, NEGLIGIBLE_BYTES, settled
from brim.printable import write_note
from brim.processes import end_with_parent
from brim.rehearsal import changes, others
from brim.rehearsal.force import InForce
from brim.run.script.import_hook import when_imported
from brim.run.script.script import Program, end_as_python, execute

VARIABLE = "BRIM_REHEARSAL_RUN"
SETTLED = 2  # steps without a new peak after which memory counts as settled
_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")  # of torch._C
MOST_EVENTS = 5_000_000
_OWN = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True, kw_only=True)
class Run:
    """The program of a process. ``steps``: end after so many optimizer steps; None: when memory stops growing.

    ``world_size``: number of ranks of its job, 0 without ranks. ``random_weights``: build missing models from their
    configurations. ``changes``: applied to the program as soon as PyTorch is imported. ``parent``: the process that
    waits for this one; this one ends with it.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    result: str
    snapshot: str
    steps: int | None = None
    world_size: int = 0
    random_weights: bool = False
    changes: tuple[str, ...] = ()
    parent: int

    @classmethod
    def of_environment(cls) -> Run:
        settings = json.loads(os.environ.pop(VARIABLE))
        return cls(**settings | {"arguments": tuple(settings["arguments"])})

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self)), others.VARIABLE: f"{self.result}.others"}


class _Enough(BaseException):
    """Ends the program: memory has stopped growing, or the requested steps are done."""


class Watch:
    """Records the allocator of each device, and counts optimizer steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # Optimizer, or CUDA graph with its step -> steps. Kept weakly: a program may make optimizers in a loop.
        self._steps_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._captures = False  # an optimizer's step is part of a CUDA graph
        self.has_enough = False
        self.steps: list[dict[str, Any]] = []
        self.ran_out = 0  # number of out-of-memory errors
        self.recorded: list[dict[str, int]] = []  # ``in_use()`` when the snapshot was written
        self._begun = False
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """True in the watched process, False in a process forked from it."""
        return os.getpid() == self._process

    def begin(self) -> None:
        """Begin after the import of PyTorch, before CUDA is used."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        torch.cuda._lazy_call(self._record)
        register_optimizer_step_post_hook(self._stepped)
        for name in filter(partial(hasattr, torch._C), _RESETS):
            setattr(torch._C, name, _folding(getattr(torch._C, name)))
        replay = torch.cuda.CUDAGraph.replay

        def replay_and_count(graph: Any) -> None:
            replay(graph)
            if self._captures:
                self._stepped(graph)

        torch.cuda.CUDAGraph.replay = replay_and_count  # type: ignore[assignment]
        changes.apply(self._run.changes)
        if self._run.world_size:
            from brim.rehearsal import lone_rank

            lone_rank.put(self._run.world_size)

    def _record(self) -> None:
        import torch

        if not self.here:
            others.record()
            return
        if torch._C._cuda_isHistoryEnabled():
            return  # the program makes its own recording
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MOST_EVENTS
        )
        vars(torch._C)["_cuda_attach_out_of_memory_observer"](self._ran_out)
        self._begun = True

    def _ran_out(self, device: int, *_: int) -> None:
        """Called where the allocation fails, before anything is freed: the program may end here."""
        if self.here:
            self.ran_out += 1
            self.write_snapshot()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        import torch

        if not self.here:
            return
        if self.has_enough:  # the program handles every exception, and goes on
            sys.stdout.flush()
            os._exit(0)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captures = True
            return
        steps = self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        if steps <= len(self.steps):
            return  # another optimizer of the same iteration
        self.steps.append({"step": steps, "devices": peaks(), "in_use": in_use()})
        most = MOST_STEPS if self._run.steps is None else self._run.steps
        if steps >= most or (self._run.steps is None and self._settled() and not self._waits()):
            self.has_enough = True
            _try_to_write(self._run, self, "enough", "")  # now: the program may handle the exception
            raise _Enough

    def _waits(self) -> bool:
        """True before the first step of an optimizer on a GPU, and in steps on a side stream, after which programs
        capture a CUDA graph."""
        import torch

        if not torch.cuda.is_initialized():
            return False
        if not self._captures and torch.cuda.current_stream() != torch.cuda.default_stream():
            return True
        stepped = {id(parameter) for one in self._steps_of for parameter in _parameters(one)}
        others = (_parameters(one) for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
        return any(stepped.isdisjoint(map(id, each)) and any(one.is_cuda for one in each) for each in others)

    def _settled(self) -> bool:
        """True if neither the peaks nor the bytes in use between steps grow any more."""
        last = [step["devices"] for step in self.steps[-SETTLED - 1 :]]
        if len(last) <= SETTLED or _total_bytes(last[-1]) - _total_bytes(last[0]) > SETTLED * NEGLIGIBLE_BYTES:
            return False
        ends = [sum(device["bytes"] for device in step["in_use"]) for step in self.steps]
        ended = settled(ends, steps=SETTLED)
        return not self._blocks_stay() if ended is None else ended

    def _blocks_stay(self) -> bool:
        """True if blocks of each step stay in use, according to the recording so far."""
        import torch

        from brim.recordings import snapshot
        from brim.recordings.leaks import recorded_leak

        if not self._begun:
            return False
        recorded = snapshot.parse(pickle.dumps(torch.cuda.memory._snapshot(), protocol=4))
        events = events_after_steps(self.steps, in_use())
        return any(
            recorded_leak(history, recorded.stacks, events_after_steps=events[history.device])
            for history in recorded.devices
            if history.device in events
        )

    def write_snapshot(self) -> None:
        """Write the allocator's recording, without brim's frames, atomically."""
        import torch

        if not self._begun:
            return
        snapshot = torch.cuda.memory._snapshot()
        self.recorded = in_use()
        _strip(snapshot)
        with replacing(self._run.snapshot, alone=True) as partial, partial.open("wb") as file:
            pickle.dump(snapshot, file, protocol=4)


_before_reset: dict[int, tuple[int, int]] = {}  # device -> peaks of allocated and reserved bytes


def _folding(reset: Callable[[int], None]) -> Callable[[int], None]:
    """Return a ``reset`` of PyTorch's peaks that keeps those until now."""

    def fold_and_reset(device: int) -> None:
        _before_reset.update(enumerate((one["allocated_bytes"], one["reserved_bytes"]) for one in peaks()))
        reset(device)

    return fold_and_reset


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def peaks() -> list[dict[str, int]]:
    """Peaks of each device: allocated and reserved bytes, and those of the process with its context."""
    import torch

    from brim.device import loaded

    if not torch.cuda.is_initialized():
        return []
    device = loaded()
    found = []
    for number in range(torch.cuda.device_count()):
        allocated, reserved = _before_reset.get(number, (0, 0))
        found.append(
            {
                "allocated_bytes": max(allocated, torch.cuda.max_memory_allocated(number)),
                "reserved_bytes": max(reserved, torch.cuda.max_memory_reserved(number)),
                "process_bytes": device.peak_bytes(number),
            }
        )
    return found


def in_use() -> list[dict[str, int]]:
    """State of each device: bytes in use, and the number of allocations and frees so far."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    each = [torch.cuda.memory_stats(number) for number in range(torch.cuda.device_count())]
    return [
        {
            "bytes": stats.get("allocated_bytes.all.current", 0),
            "events": stats.get("allocation.all.allocated", 0) + stats.get("allocation.all.freed", 0),
        }
        for stats in each
    ]


def events_after_steps(steps: Sequence[dict[str, Any]], recorded: Sequence[dict[str, int]]) -> dict[int, list[int]]:
    """By device: number of events of the recording (allocations and frees) after each step."""
    return {
        number: [device["events"] - (step["in_use"][number]["events"] if step["in_use"] else 0) for step in steps]
        for number, device in enumerate(recorded)
    }


def _total_bytes(devices: Sequence[dict[str, int]]) -> int:
    return sum(sum(device.values()) for device in devices)


def main() -> None:
    """Run the program that the environment names, and record its memory however it ends."""
    run = Run.of_environment()
    end_with_parent(run.parent)
    watch = Watch(run)
    when_imported("torch", lambda _: watch.begin())
    if run.random_weights:  # before transformers, which may import PyTorch itself
        changes.build_missing_models()
    safe = bool(os.environ.get("PYTHONSAFEPATH"))  # the program's setting: this process always has -P
    program = Program(target=run.target, arguments=run.arguments, is_module=run.is_module, safe_path=safe)
    error: BaseException | None = None
    _record_before_exit(run, watch)
    try:
        execute(program)
    except BaseException as raised:
        error = raised
    if watch.here and not watch.has_enough:
        _try_to_write(run, watch, *_ended(error))
    if watch.has_enough or error is None:
        sys.exit(0)
    if isinstance(error, SystemExit):
        raise error
    end_as_python(error)
    sys.exit(1)


def _record_before_exit(run: Run, watch: Watch) -> None:
    """Write the results before ``os._exit``, by which programs skip the cleanup of libraries."""
    leave = os._exit

    def record_and_exit(status: int) -> NoReturn:
        try:
            if watch.here and not watch.has_enough:
                error = SystemExit(status)
                error.__context__ = sys.exc_info()[1]  # the exception being handled
                _try_to_write(run, watch, *_ended(error))
        finally:
            leave(status)

    os._exit = record_and_exit


def _ended(error: BaseException | None) -> tuple[str, str]:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", ""
    ran_out = _ran_out_of_memory(error)
    if ran_out is error:
        return "out of memory", str(error)
    if isinstance(error, SystemExit):
        message = f"it ended with exit code {error.code}" if isinstance(error.code, int) else str(error.code)
    else:
        message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if ran_out is None:
        return "failed", message
    return "out of memory", f"{ran_out}\nSo the program failed: {message}"


def _ran_out_of_memory(error: BaseException | None) -> BaseException | None:
    """The GPU's out-of-memory error that the program ended with, or was handling when it ended."""
    if "torch" not in sys.modules:
        return None
    kind: type[BaseException] = sys.modules["torch"].OutOfMemoryError
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


def _try_to_write(run: Run, watch: Watch, ended: str, message: str) -> None:
    try:
        _write(run, watch, ended, message)
    except OSError as error:
        Path(run.result).unlink(missing_ok=True)
        write_note(f"cannot write the memory recording: {error}")


def _write(run: Run, watch: Watch, ended: str, message: str) -> None:
    document: dict[str, Any] = {"ended": ended, "message": message, "steps": watch.steps, "devices": []}
    document |= {"ran_out": watch.ran_out, "recorded": watch.recorded, "changed": sorted(changes.applied)}
    if "torch" in sys.modules:
        import torch

        from brim.device import loaded

        document["torch"] = torch.__version__
        document["devices"] = [
            device | {"cache_flushes": torch.cuda.memory_stats(number).get("num_alloc_retries", 0)}
            for number, device in enumerate(peaks())
        ]
        if torch.cuda.is_initialized():
            document["kernels"] = _attention_kernels(loaded().kernels())
            document["cudnn"] = any("cudnn" in name.lower() for name in loaded().stubs())
            if ended != "out of memory" or not Path(run.snapshot).exists():
                watch.write_snapshot()
                document["recorded"] = watch.recorded
    values = InForce.now
    if values is not None:
        document["attention"] = values.attention
        document["reads"] = values.reads.to_json()
        document["not_computed"] = values.not_computed
        document["left_bytes"] = 0 if values.host_weights is None else values.host_weights.left_bytes
    document["host_peak_bytes"] = _host_peak_bytes()
    write_text(run.result, json.dumps(document), alone=True)


def _attention_kernels(kernels: dict[str, int]) -> dict[str, int]:
    import torch

    words = ("flash_fwd", "flash_bwd", "fmha", "attention")
    counts: dict[str, int] = {}
    for name, times in kernels.items():
        if any(word in name for word in words):
            plain = torch._C._demangle(name) if hasattr(torch._C, "_demangle") else name
            short = plain.split("<")[0].split("(")[0].removeprefix("void ")
            counts[short] = counts.get(short, 0) + times
    return counts


def _host_peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _strip(snapshot: Any) -> None:
    """Remove brim's frames from every stack: they are below the program's own."""
    seen: set[int] = set()

    def clean(frames: Any) -> None:
        if not frames or id(frames) in seen:
            return
        seen.add(id(frames))
        remaining = [frame for frame in frames if not frame["filename"].startswith((_OWN, "<frozen runpy>"))]
        if len(remaining) != len(frames):
            frames[:] = remaining

    for trace in snapshot["device_traces"]:
        for event in trace:
            clean(event.get("frames"))
    for segment in snapshot["segments"]:
        clean(segment.get("frames"))
        for block in segment["blocks"]:
            clean(block.get("frames"))


if __name__ == "__main__":
    main()
