"""Placement of a model's weights under a plan: resident in the compute tier, or at rest in RAM or on disk."""

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
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

NAME = "weight_streaming"
RESIDENT, FROM_RAM, FROM_DISK = "resident", "stream:ram", "stream:disk"
COMPUTE_RAM = "compute:ram"  # the block rests in RAM, and the CPU computes it there
STAGING_SLOTS = "staging_slots"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The sources of the parameters, by name; empty where the module has them in memory.

    ``verify`` is called with the name and the value of a tensor when it is first read, ``loaded`` with the bytes of
    each block that is read into memory to stay.
    """

    sources: Mapping[str, TensorSource] = field(default_factory=dict)
    verify: Callable[[str, torch.Tensor], None] | None = None
    loaded: Callable[[int], None] = lambda bytes: None


def loading_triggers(block: Block) -> list[str]:
    """The triggers that need the entire block; a lookup reads its few rows where the table rests."""
    return [trigger for trigger in block.triggers if trigger not in block.lookups]


def computable(partition: Partition) -> frozenset[str]:
    """The blocks that the CPU can compute in RAM: their modules need no parameters of other blocks."""
    users: dict[str, int] = {}
    for trigger in [trigger for block in partition.blocks for trigger in loading_triggers(block)]:
        users[trigger] = users.get(trigger, 0) + 1
    return frozenset(
        block.name
        for block in partition.blocks
        if loading_triggers(block)
        and all(users[t] == 1 and t not in partition.mixed for t in loading_triggers(block))
    )


def host_modules(model: nn.Module, plan: Plan, partition: Partition) -> frozenset[int]:
    """``id`` of every module that the CPU computes under ``plan``: their buffers belong in RAM."""
    choices = plan.choices(NAME)
    computed = [block for block in partition.blocks if choices[block.name] == COMPUTE_RAM]
    triggers = {trigger for block in computed for trigger in loading_triggers(block)}
    return frozenset(id(part) for trigger in triggers for part in model.get_submodule(trigger).modules())


class Companion:
    """A technique that serves blocks of a streamed model in its own way. Weight streaming calls its methods."""

    def staged(self) -> Sequence[Sequence[TensorSource]]:
        """The tensors that pass from disk to VRAM beside blocks, each group as one."""
        return ()

    def prepare(self) -> None:
        """Take the memory that is needed before any block is placed."""

    def take(self, streamed: StreamedBlock, choice: str) -> None:
        """Serve a block of the plan if ``choice`` is one of this technique."""

    def place(self) -> None:
        """Move the blocks of this technique to their resting places, after those of the plan."""

    def install(self, guards: Guards) -> None:
        """Replace the forward passes of the modules that are served."""

    def begin_step(self) -> None:
        """Forget the calls of an interrupted step: the model is called again."""

    def facts(self) -> dict[str, float]:
        """Facts for the timeline."""
        return {}

    def free(self) -> None:
        """Free the memory of ``prepare``."""


class Placement:
    """Places tensors by the plan. ``buffers`` are freed when the plan is removed."""

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights, guards: Guards) -> None:
        self.model, self.plan, self.memory, self._weights, self._guards = model, plan, memory, weights, guards
        self.parameters = dict(model.named_parameters())
        self._passing: Buffer | None = None
        self._pending: list[Callable[[], None]] = []
        self.buffers: list[Buffer] = []

    def make_staging(self, blocks: Sequence[Block], others: Sequence[Sequence[TensorSource]]) -> Staging | None:
        """RAM slots between disk and VRAM for ``blocks`` and ``others``; None where RAM is the compute tier."""
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
        """The source of a parameter; without extents its values are in the module."""
        return self._weights.sources.get(name) or self._in_module(name)

    def _in_module(self, name: str) -> TensorSource:
        data = self.parameters[name].data
        return TensorSource(name=name, dtype=data.dtype, shape=tuple(data.shape), extents=())

    def keep_loose(self, partition: Partition) -> None:
        """Keep the parameters of no block, and all buffers, in the compute tier."""
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
        """Copy tensors that stay in VRAM into common storages, so that segments with gaps become free.

        PyTorch frees only entire segments, and would keep one for each small tensor that is left in it. A group is
        larger than a segment that tensors share, so it has a segment of its own.
        """
        parameters = {n: self.parameters[n] for n in names if self.memory.is_compute(self.parameters[n].device)}
        group: list[str] = []
        for name in parameters:
            group.append(name)
            layout = packed_layout([self._in_module(name) for name in group])
            if layout.bytes > LARGE_SEGMENT_BYTES or name == next(reversed(parameters)):
                storage = torch.empty(layout.bytes, dtype=torch.uint8, device=self.memory.device)
                for member, view in zip(group, layout.views(storage), strict=True):
                    value = parameters[member].data
                    parameters[member].data = view if self.memory.fake else view.copy_(value)
                group = []

    def keep(self, block: Block) -> None:
        """Start to bring a resident block to the compute tier."""
        if self._weights.sources:
            self._pending.append(self._load_resident(block.name, block.tensors))
        else:
            self._adopt_resident(block.name, block.tensors)

    def end_residents(self) -> None:
        """Free the RAM that residents passed through, after the last one."""
        if self._passing is not None:
            self._passing.free()

    def finish(self) -> None:
        for bind in self._pending:
            bind()

    def _adopt_resident(self, label: str, names: Sequence[str]) -> None:
        """Take tensors that the module has in memory: where they are, or as copies in VRAM."""
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
        """Start to read a block. Returns a function that waits for it and binds the parameters."""
        memory, in_ram = self.memory, self.memory.host is None
        layout = (file_layout if in_ram else packed_layout)([self._weights.sources[name] for name in names])
        buffer = memory.compute.allocate(layout.bytes, label)
        self.buffers.append(buffer)
        if in_ram:
            moved = memory.engine.read(layout.runs, buffer, label, [])
        else:
            staged = staged_layout(layout)
            passing = self._passing_buffer(staged.bytes)
            read = memory.engine.read(staged.runs, passing, label, [])
            link = (RAM, memory.compute.tier)
            moved = memory.engine.copy(passing.tensor[: staged.bytes], buffer, label, [read], link, staged.moves)

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
        finish()  # one block at a time, or RAM would have to hold the entire model
        if memory.device.type != "cpu":
            accelerator.of(memory.device).current_stream().synchronize()  # the buffer is about to be used again
        return lambda: None

    def _passing_buffer(self, bytes: int) -> Buffer:
        """The RAM that residents pass through from disk to VRAM, one at a time."""
        if self._passing is None or self._passing.bytes < bytes:
            if self._passing is not None:
                self._passing.free()
            self._passing = self.memory.ram.allocate(bytes, "residents on their way")
        return self._passing

    def verify(self, names: Sequence[str], views: Sequence[torch.Tensor]) -> None:
        if self._weights.verify is not None and not self.memory.fake:
            for name, view in zip(names, views, strict=True):
                self._weights.verify(name, view)

    def _forget_mapped(self, values: Sequence[torch.Tensor]) -> None:
        """Release a mapped checkpoint from RAM, after its ``values`` were copied."""
        if not self.memory.fake:
            forget(values)

    def store(self, block: Block, choice: str) -> BackingStore:
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
        """Bring tensors to one backing store: from their files, or without those from their ``values``."""
        if tier == RAM:
            store = RamStore(self.memory, sources, label)
            if self._weights.sources:
                store.fill_from_files(label).wait()
                self._weights.loaded(sum(source.bytes for source in sources))
            else:
                store.write_back(values)
                self._forget_mapped(values)
            return store
        if not self._weights.sources:
            sources = list(self.memory.scratch().store(sources, values))
            self._forget_mapped(values)
            layout = None  # the scratch file has the layout of a slot
        return DiskStore(self.memory, sources, label, layout)


MakeCompanion = Callable[[Placement, StreamedBlocks], Companion]
