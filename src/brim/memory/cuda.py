"""The CUDA transfer engine and its pinned host memory. Imported only where there is a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from brim.core.hardware import VRAM
from brim.errors import UnsupportedError
from brim.memory.checkpoint_files import Extent
from brim.memory.direct_io import OpenFiles
from brim.memory.layout import ReadRun
from brim.memory.pool import Buffer, HostSource
from brim.memory.recorder import Recorder
from brim.memory.transfer import ThreadEngine, Ticket, Waitable, _Lane
from brim.units import format_bytes


class PinnedSource(HostSource):
    """Page-locked host memory by ``cudaHostRegister`` on our own mapping.

    ``Tensor.pin_memory`` rounds up to the next power of two: up to twice the RAM that was asked for.
    """

    def make(self, bytes: int) -> torch.Tensor:
        tensor = super().make(bytes)
        if bytes:
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), bytes, 0)
            if int(error) != 0:
                raise UnsupportedError(
                    f"{format_bytes(bytes)} of host memory were to be page-locked for transfers.",
                    f"cudaHostRegister returned {error}.",
                    "Raise the locked-memory limit (ulimit -l) or give a smaller RAM budget.",
                )
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            torch.cuda.synchronize()  # a copy out of this memory may still be under way
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class StreamPoint:
    """A point in a CUDA stream. Waiting makes the current stream wait, not the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _IssuedLater:
    """A copy that a thread hands to the stream once its data has come from disk."""

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.event = torch.cuda.Event()

    def wait(self) -> None:
        assert self.ticket is not None
        self.ticket.wait()  # until the copy is in the stream
        torch.cuda.current_stream().wait_event(self.event)

    def synchronize(self) -> None:
        assert self.ticket is not None
        self.ticket.wait()
        self.event.synchronize()


class CudaEngine:
    """Copies on streams of their own, one for each way; disk reads and writes on the thread engine's lanes."""

    def __init__(
        self, recorder: Recorder, files: OpenFiles, make_bounce: Callable[[int], Buffer], device: torch.device
    ) -> None:
        self.recorder = recorder
        self.device = device
        self._threads = ThreadEngine(recorder, files, make_bounce)
        self._issue = _Lane("issue")
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def read(self, runs: Sequence[ReadRun], target: Buffer, label: str, after: Sequence[Waitable]) -> Ticket:
        # The slot that is read into may be the source of a copy still in the stream: that needs the host to wait.
        return self._threads.read(runs, target, label, [_HostWait(condition) for condition in after])

    def copy(
        self, source: torch.Tensor, target: Buffer, label: str, after: Sequence[Waitable], way: tuple[str, str]
    ) -> Waitable:
        if any(isinstance(condition, Ticket) and not condition.done for condition in after):
            later = _IssuedLater()
            later.ticket = self._issue.submit(lambda: self._enqueue(source, target, label, after, way, later.event))
            return later
        event = torch.cuda.Event()
        self._enqueue(source, target, label, after, way, event)
        return StreamPoint(event)

    def _enqueue(
        self,
        source: torch.Tensor,
        target: Buffer,
        label: str,
        after: Sequence[Waitable],
        way: tuple[str, str],
        event: torch.cuda.Event,
    ) -> None:
        begin_s = self.recorder.now_s()
        stream = self._out if way[0] == VRAM else self._in
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            for condition in after:
                condition.wait()
            target.tensor[: source.numel()].copy_(source, non_blocking=True)
            event.record(stream)
        self.recorder.copied(*way, source.numel(), begin_s, label)

    def write(self, source: torch.Tensor, extent: Extent, label: str, after: Sequence[Waitable]) -> Ticket:
        return self._threads.write(source, extent, label, [_HostWait(condition) for condition in after])

    def mark(self) -> StreamPoint:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return StreamPoint(event)

    def close(self) -> None:
        self._threads.close()
        self._issue.close()
        self._in.synchronize()
        self._out.synchronize()


class _HostWait:
    """Makes the host wait for what would otherwise make only a stream wait."""

    def __init__(self, condition: Waitable) -> None:
        self._condition = condition

    def wait(self) -> None:
        if isinstance(self._condition, StreamPoint):
            self._condition.event.synchronize()
        elif isinstance(self._condition, _IssuedLater):
            self._condition.synchronize()
        else:
            self._condition.wait()
