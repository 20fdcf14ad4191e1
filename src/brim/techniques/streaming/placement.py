"""Where each block goes when a plan is put into force: to stay in the compute tier, or to rest in RAM or on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from brim import accelerator
from brim.allocator.config import LARGE_SEGMENT_BYTES
from brim.core import Plan
from brim.core.hardware import DISK, RAM
from brim.memory.backing_store import BackingStore, DiskStore, RamStore
from brim.memory.checkpoint_files import TensorSource
from brim.memory.layout import BlockLayout, file_layout, packed_layout, staged_layout
from brim.memory.mapped import forget
from brim.memory.pool import Buffer
from brim.memory.tiers import Memory, Staging
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.streaming.guards import Guards

NAME = "weight_streaming"
RESIDENT, FROM_RAM, FROM_DISK = "resident", "stream:ram", "stream:disk"
COMPUTE_RAM = "compute:ram"  # it rests in RAM, and the CPU computes it there
STAGING_SLOTS = "staging_slots"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where the parameters come from. Empty ``sources``: they are in the module already.

    ``verify`` is called with a tensor's name and value when it has been read for the first time, ``loaded`` with the
    bytes of each block that is brought into memory for good.
    """

    sources: Mapping[str, TensorSource] = field(default_factory=dict)
    verify: Callable[[str, torch.Tensor], None] | None = None
    loaded: Callable[[int], None] = lambda bytes: None


def loads_for(block: Block) -> list[str]:
    """The triggers that need the block itself; a lookup reads its few rows where the table rests."""
    return [trigger for trigger in block.triggers if trigger not in block.lookups]


def computable(partition: Partition) -> frozenset[str]:
    """The blocks that the CPU can compute where they rest: their modules need no parameters but theirs."""
    users: dict[str, int] = {}
    for trigger in [trigger for block in partition.blocks for trigger in loads_for(block)]:
        users[trigger] = users.get(trigger, 0) + 1
    return frozenset(
        block.name
        for block in partition.blocks
        if loads_for(block) and all(users[t] == 1 and t not in partition.mixed for t in loads_for(block))
    )


def host_modules(model: nn.Module, plan: Plan, partition: Partition) -> frozenset[int]:
    """``id`` of every module that the CPU computes under ``plan``: their buffers belong in RAM."""
    choices = plan.choices(NAME)
    computed = [block for block in partition.blocks if choices[block.name] == COMPUTE_RAM]
    triggers = {trigger for block in computed for trigger in loads_for(block)}
    return frozenset(id(part) for trigger in triggers for part in model.get_submodule(trigger).modules())


class Placement:
    """Brings tensors to where the plan wants them. ``buffers`` is what is held for as long as it is in force."""

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights, guards: Guards) -> None:
        self.model, self.plan, self.memory, self._weights, self._guards = model, plan, memory, weights, guards
        self.parameters = dict(model.named_parameters())
        self._passing: Buffer | None = None
        self._pending: list[Callable[[], None]] = []
        self.buffers: list[Buffer] = []

    def make_staging(self, blocks: Sequence[Block], others: Sequence[Sequence[TensorSource]] = ()) -> Staging | None:
        """RAM slots between disk and VRAM for ``blocks``; none where RAM itself is the compute tier.

        ``others`` pass through them too, each as one.
        """
        host = self.memory.host
        passing = [*others, *([self.source(name) for name in block.tensors] for block in blocks)]
        if host is None or not passing:
            return None
        size = max(staged_layout(packed_layout(sources)).bytes for sources in passing)
        count = self.plan.settings.get(STAGING_SLOTS, 2)
        slots = host.allocate_row(size, [f"staging {i}" for i in range(count)])
        self.buffers += slots
        self.memory.staging = Staging(slots)
        return self.memory.staging

    def source(self, name: str) -> TensorSource:
        """Where a parameter's values are; without extents: in the module."""
        return self._weights.sources.get(name) or self._in_module(name)

    def _in_module(self, name: str) -> TensorSource:
        data = self.parameters[name].data
        return TensorSource(name=name, dtype=data.dtype, shape=tuple(data.shape), extents=())

    def keep_loose(self, partition: Partition) -> None:
        """What belongs to no block: parameters and buffers that stay in the compute tier for good."""
        stored = [name for name in partition.loose if name in self._weights.sources]
        present = [name for name in partition.loose if name not in self._weights.sources]
        if stored:
            self._load_resident("outside blocks", stored)()
        if present:
            self._adopt_resident("outside blocks", present)
        buffers = sum(tensor_bytes(buffer) for buffer in self.model.buffers())
        if buffers:
            self.buffers.append(self.memory.compute.account(buffers, "buffers"))
        self._guards.move_buffers(host_modules(self.model, self.plan, partition))

    def move_together(self, names: Sequence[str]) -> None:
        """Tensors that are in VRAM and stay there go side by side, away from what has left between them.

        PyTorch gives back whole segments only, and would go on reserving what one small tensor of each is left in. A
        group is larger than a segment that tensors share, so it has one of its own.
        """
        parameters = {n: self.parameters[n] for n in names if self.memory.is_compute(self.parameters[n].device)}
        group: list[str] = []
        for name in parameters:
            group.append(name)
            layout = packed_layout([self._in_module(name) for name in group])
            if layout.bytes > LARGE_SEGMENT_BYTES or name == next(reversed(parameters)):
                whole = torch.empty(layout.bytes, dtype=torch.uint8, device=self.memory.device)
                for member, view in zip(group, layout.views(whole), strict=True):
                    value = parameters[member].data
                    parameters[member].data = view if self.memory.fake else view.copy_(value)
                group = []

    def keep(self, block: Block) -> None:
        """Start bringing a block to the compute tier for good."""
        if self._weights.sources:
            self._pending.append(self._load_resident(block.name, block.tensors))
        else:
            self._adopt_resident(block.name, block.tensors)

    def all_kept(self) -> None:
        """No further resident comes: RAM that they passed through is free again."""
        if self._passing is not None:
            self._passing.free()

    def finish(self) -> None:
        """Wait for the residents."""
        for bind in self._pending:
            bind()

    def _adopt_resident(self, label: str, names: Sequence[str]) -> None:
        """Tensors that are in the module already: they stay where they are, or are copied to VRAM."""
        memory, parameters = self.memory, [self.parameters[name] for name in names]
        layout = packed_layout([self._in_module(name) for name in names])
        on_device = memory.device.type != "cpu" and all(memory.is_compute(p.device) for p in parameters)
        if memory.host is None or on_device:
            self.buffers.append(memory.compute.account(layout.bytes, label))
            return
        buffer = memory.compute.allocate(layout.bytes, label)
        self.buffers.append(buffer)
        for parameter, view in zip(parameters, layout.views(buffer.tensor), strict=True):
            self._guards.restore_later(parameter)
            parameter.data = view if memory.fake else view.copy_(parameter.data)

    def _load_resident(self, label: str, names: Sequence[str]) -> Callable[[], None]:
        """Start reading; what is returned waits and binds."""
        memory, in_ram = self.memory, self.memory.host is None
        layout = (file_layout if in_ram else packed_layout)([self._weights.sources[name] for name in names])
        buffer = memory.compute.allocate(layout.bytes, label)
        self.buffers.append(buffer)
        if in_ram:
            moved = memory.engine.read(layout.runs, buffer, label, [])
        else:
            staged = staged_layout(layout)
            passing = self._passage(staged.bytes)
            read = memory.engine.read(staged.runs, passing, label, [])
            way = (RAM, memory.compute.tier)
            moved = memory.engine.copy(passing.tensor[: staged.bytes], buffer, label, [read], way, staged.moves)

        def finish() -> None:
            moved.wait()
            views = layout.views(buffer.tensor)
            for name, view in zip(names, views, strict=True):
                self._guards.restore_later(self.parameters[name])
                self.parameters[name].data = view
            self.verify(names, views)
            self._weights.loaded(sum(tensor_bytes(view) for view in views))

        if in_ram:
            return finish
        finish()  # one block at a time, or RAM would have to hold the whole model on its way
        if memory.device.type != "cpu":
            accelerator.of(memory.device).current_stream().synchronize()  # the passage is about to be used again
        return lambda: None

    def _passage(self, bytes: int) -> Buffer:
        """RAM that residents pass through on their way from disk to VRAM, one at a time; kept for the next."""
        if self._passing is None or self._passing.bytes < bytes:
            if self._passing is not None:
                self._passing.free()
            self._passing = self.memory.ram.allocate(bytes, "residents on their way")
        return self._passing

    def verify(self, names: Sequence[str], views: Sequence[torch.Tensor]) -> None:
        if self._weights.verify is not None and not self.memory.fake:
            for name, view in zip(names, views, strict=True):
                self._weights.verify(name, view)

    def _left(self, values: Sequence[torch.Tensor]) -> None:
        """``values`` have been copied to where they rest now; a mapped checkpoint need not stay in RAM for them."""
        if not self.memory.fake:
            forget(values)

    def store(self, block: Block, choice: str) -> BackingStore:
        """Bring a block to where it rests."""
        sources = [self.source(name) for name in block.tensors]
        values = [self.parameters[name].data for name in block.tensors]
        return self.store_of(block.name, sources, values, RAM if choice in (FROM_RAM, COMPUTE_RAM) else DISK)

    def store_of(
        self,
        label: str,
        sources: Sequence[TensorSource],
        values: Sequence[torch.Tensor],
        tier: str,
        layout: BlockLayout | None = None,
    ) -> RamStore | DiskStore:
        """Bring tensors to where they rest as one: from their files, or where they have none, their ``values``."""
        if tier == RAM:
            store = RamStore(self.memory, sources, label)
            if self._weights.sources:
                store.fill_from_files(label).wait()
                self._weights.loaded(sum(source.bytes for source in sources))
            else:
                store.write_back(values)
                self._left(values)
            return store
        if not self._weights.sources:
            sources = list(self.memory.scratch().store(sources, values))
            self._left(values)
            layout = None  # it lies there as it lies in a slot
        return DiskStore(self.memory, sources, label, layout)
