"""Write a trace by hand: the allocations, kernels and communication of an engine that is not installed, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from brim.core import Category, Op, Phase, Storage, Trace


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective: ``bytes`` is the whole tensor (gathered, scattered or reduced) on one rank, ``axis`` its group.
    Or a shard's copy between RAM and the GPU, before its gathering or after its scattering."""

    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, to_device or to_ram
    axis: str
    bytes: int
    phase: Phase


class Script:
    """Storages and operations against one clock. ``alloc`` gives a handle, which ``free`` takes."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.sent: list[Sent] = []
        self.phase = Phase.BUILD
        self.module = ""
        self._storages: list[Storage] = []
        self._tick = -1
        self._start = 0

    def alloc(
        self, bytes: int, category: Category = Category.TEMPORARY, dtype: str = "bfloat16", name: str = ""
    ) -> int:
        self._storages.append(
            Storage(
                id=len(self._storages),
                bytes=bytes,
                category=category,
                module=name or self.module,
                born=self._next(),
                dtype=dtype,
            )
        )
        return len(self._storages) - 1

    def keep(self, bytes: int, name: str = "") -> int:
        """Allocate an activation, needed by the backward pass."""
        return self.alloc(bytes, Category.ACTIVATION, name=name)

    def free(self, *handles: int) -> None:
        for handle in handles:
            if self._storages[handle].died is not None:
                raise AssertionError(f"{self._storages[handle]} is freed a second time")
            self._storages[handle] = replace(self._storages[handle], died=self._next())

    def op(self, name: str, *, flops: int = 0, moved_bytes: int = 0, dtype: str = "bfloat16") -> None:
        """Add a kernel; ``moved_bytes`` is what it reads and writes."""
        self.ops.append(
            Op(
                name=name,
                module=self.module,
                phase=self.phase,
                step=0 if self.phase is not Phase.BUILD else -1,
                at=self._next(),
                flops=flops,
                read_bytes=moved_bytes // 2,
                written_bytes=moved_bytes - moved_bytes // 2,
                dtype=dtype,
            )
        )

    def send(self, kind: str, axis: str, bytes: int) -> None:
        self.sent.append(Sent(kind=kind, axis=axis, bytes=bytes, phase=self.phase))

    def begin(self) -> None:
        """Begin the step: everything allocated so far was built before it."""
        self._start = self._tick + 1
        self.phase = Phase.FORWARD

    def trace(self, model: str) -> Trace:
        return Trace(
            model=model,
            target="cuda",
            ops=tuple(self.ops),
            storages=tuple(self._storages),
            step_starts=(self._start,),
        )

    def _next(self) -> int:
        self._tick += 1
        return self._tick
