"""The clock of a trace: every operation, allocation and free takes one tick, in the order in which they happen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from brim.core import Category, Op, Phase, Storage
from brim.core.leak import LEAST_STEPS, Allocation, Leak, find_leak
from brim.core.trace import Reduction
from brim.predict.flops import Work

_NO_WORK = Work(0, 0, 0, "")


@dataclass(slots=True)
class Life:
    """A storage while its life is recorded; ``module`` indexes the tracker's modules (-1: outside of any)."""

    id: int
    bytes: int
    module: int
    phase: Phase
    step: int
    dtype: str
    born: int
    on_device: bool
    from_factory: bool
    died: int | None = None
    died_phase: Phase | None = None
    category: Category | None = None
    library: str = ""  # the library of a workspace
    stream: int = 0
    in_ram: bool = False
    reduction: Reduction | None = None
    line: str = ""  # the line of the program that allocated it


@dataclass(slots=True)
class Run:
    """An operation while the module's name is not known yet."""

    name: str
    phase: Phase
    step: int
    at: int
    module: int
    work: Work = _NO_WORK
    in_ram: bool = False


class Recorder:
    """Records operations and storage lives on one clock. It does not access tensors."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.runs: list[Run] = []
        self.step_starts: list[int] = []
        self.not_modelled: set[str] = set()
        self.notes: dict[str, str] = {}
        self.uses_device = False  # True once the program has put a tensor on the device
        self.step = -1
        self.phase = Phase.BUILD
        self.stream: Callable[[], int] = lambda: 0  # the number of the stream that is current
        self.line: Callable[[], str] = lambda: ""  # the line of the program that is running
        self._tick = -1

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def begin_step(self) -> None:
        self.step += 1
        self.phase = Phase.FORWARD
        self.step_starts.append(self._tick + 1)

    def begin_op(self, name: str, phase: Phase, module: int) -> int:
        """Open an operation and give its index, for ``describe_op`` once its outputs are known."""
        self.runs.append(Run(name=name, phase=phase, step=self.step, at=self.tick(), module=module))
        return len(self.runs) - 1

    def describe_op(self, index: int, work: Work, *, in_ram: bool = False) -> None:
        self.runs[index].work, self.runs[index].in_ram = work, in_ram

    def alloc(
        self,
        bytes: int,
        *,
        phase: Phase,
        module: int,
        dtype: str = "",
        on_device: bool = True,
        from_factory: bool = False,
        category: Category | None = None,
        library: str = "",
        in_ram: bool = False,
        reduction: Reduction | None = None,
    ) -> Life:
        life = Life(
            id=len(self.lives),
            bytes=bytes,
            module=module,
            phase=phase,
            step=self.step,
            dtype=dtype,
            born=self.tick(),
            on_device=on_device,
            from_factory=from_factory,
            category=category,
            library=library,
            stream=self.stream(),
            in_ram=in_ram,
            reduction=reduction,
            line=self.line(),
        )
        self.lives.append(life)
        return life

    def unrecorded(self, bytes: int, *, on_device: bool) -> Life:
        """Return a life that is tracked but not part of the trace."""
        return Life(
            id=-1, bytes=bytes, module=-1, phase=self.phase, step=self.step, dtype="", born=self._tick,
            on_device=on_device, from_factory=False,
        )  # fmt: skip

    def free(self, life: Life, phase: Phase) -> None:
        life.died, life.died_phase = self.tick(), phase

    def in_use_bytes(self) -> int:
        return sum(life.bytes for life in self._counted() if life.died is None)

    def leak(self, in_use_bytes: Sequence[int]) -> Leak | None:
        """The leak of the finished steps; ``in_use_bytes``: bytes in use at the end of each."""
        steps = len(in_use_bytes)
        if steps < LEAST_STEPS:
            return None
        ends = [*self.step_starts[1 : steps + 1], self._tick + 1][:steps]

        def step_of(tick: int) -> int:
            return bisect_right(ends, tick) + 1 if tick >= self.step_starts[0] else 0

        blocks = (
            Allocation(
                bytes=life.bytes,
                line=Path(life.line).name,
                born=step_of(life.born),
                died=None if life.died is None else step_of(life.died),
                places=(life.line,),
            )
            for life in self._counted()
        )
        return find_leak(blocks, in_use_bytes)

    def _counted(self) -> Iterator[Life]:
        return (life for life in self.lives if life.on_device or not self.uses_device)

    def storages(self, module_paths: list[str], *, device_only: bool) -> tuple[Storage, ...]:
        """The storages in order of birth; those without a category get one by phase and life."""
        kept = [life for life in self.lives if life.on_device or not device_only]
        return tuple(
            Storage(
                id=index,
                bytes=life.bytes,
                category=life.category or _category_by_life(life),
                module=life.library or module_paths[life.module],
                born=life.born,
                died=life.died,
                dtype=life.dtype,
                stream=life.stream,
                in_ram=life.in_ram,
                reduction=life.reduction,
            )
            for index, life in enumerate(kept)
        )

    def ops(self, module_paths: list[str]) -> tuple[Op, ...]:
        return tuple(
            Op(
                name=run.name, module=module_paths[run.module], phase=run.phase, step=run.step, at=run.at,
                in_ram=run.in_ram, **run.work._asdict(),
            )
            for run in self.runs
        )  # fmt: skip


def _category_by_life(life: Life) -> Category:
    """A tensor made while building feeds the steps; one that outlives the forward pass is an activation."""
    if life.phase is Phase.BUILD and life.died is None:
        return Category.INPUT
    if life.from_factory and life.module < 0 and life.phase is Phase.FORWARD:
        return Category.INPUT
    if life.phase is Phase.FORWARD and life.died_phase not in (Phase.FORWARD, None):
        return Category.ACTIVATION
    return Category.TEMPORARY
