"""Weight streaming: some blocks stay in the compute tier, the others pass through a small ring of slots.

Under a cyclic access pattern a pager (LRU) misses every block; the optimum keeps a fixed set and streams the rest
(Belady, 1966). Residents are spread evenly, so that the link has compute to hide behind all along the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from brim.core import Plan, Timeline
from brim.core.hardware import RAM
from brim.memory.checkpoint_files import TensorSource
from brim.memory.layout import file_layout, packed_layout
from brim.memory.pool import Buffer
from brim.memory.tiers import DiskHome, Home, Memory, RamHome, Staging
from brim.techniques.base import refuse_second
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.guards import Guards
from brim.techniques.hooks import Recover, Visit, check_rows
from brim.techniques.ring import Ring
from brim.techniques.streamed import Streamed

NAME = "weight_streaming"
RESIDENT, FROM_RAM, FROM_DISK = "resident", "stream:ram", "stream:disk"
RING_SLOTS, STAGING_SLOTS = "ring_slots", "staging_slots"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Where the parameters come from. Empty ``sources``: they are in the module already.

    ``verify`` is called with a tensor's name and value when it has been read for the first time.
    """

    sources: Mapping[str, TensorSource] = field(default_factory=dict)
    verify: Callable[[str, torch.Tensor], None] | None = None


def apply(model: nn.Module, partition: Partition, plan: Plan, memory: Memory, weights: Weights) -> WeightStreaming:
    """Put ``plan`` into force on ``model``. Raises UsageError when it is fitted already.

    On any failure the model is left, or made again, as it was.
    """
    refuse_second(model)
    handle = WeightStreaming(model, plan, memory, weights)
    try:
        handle._place(partition)
    except BaseException:
        handle._undo()
        raise
    return handle


class WeightStreaming:
    """The handle of a fitted module."""

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights) -> None:
        self.model, self.plan, self.memory = model, plan, memory
        self._weights = weights
        self._parameters = dict(model.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        # Where nothing has been moved out of the module, its own tensors are what it gets back.
        self._hollow = memory.fake or bool(weights.sources)
        self._originals = {name: p.data for name, p in self._parameters.items()} if self._hollow else {}
        self._streamed: list[Streamed] = []
        self._buffers: list[Buffer] = []
        self._hooks: list[Visit | torch.utils.hooks.RemovableHandle] = []
        self._guards = Guards(self)
        self._ring: Ring | None = None
        self._passing: Buffer | None = None
        self._removed = False

    # -- what a user reads

    @property
    def misses(self) -> int:
        """Loads that compute had to wait for from their start: the order was not foreseen."""
        return self._ring.misses if self._ring is not None else 0

    def timeline(self) -> Timeline:
        """What memory did since the module was fitted.

        Its facts have, per tier, ``budget_bytes``, ``promised_bytes`` (the program's share and activations included)
        and ``held_bytes`` (the pool's peak); per way ``copied_bytes``; and ``misses``.
        """
        made, recorder = self.memory.recorder.timeline, self.memory.recorder
        made.facts |= {f"budget_bytes.{tier}": count for tier, count in self.plan.budget_bytes.items()}
        made.facts |= {f"promised_bytes.{tier}": count for tier, count in self.plan.promise.peak_bytes.items()}
        pools = [self.memory.compute, *([self.memory.host] if self.memory.host else [])]
        made.facts |= {f"held_bytes.{pool.tier}": pool.peak_bytes for pool in pools}
        made.facts |= {f"copied_bytes.{way[0]}.{way[1]}": count for way, count in recorder.copied_bytes.items()}
        made.facts["misses"] = self.misses
        return made

    def close(self) -> None:
        """Stop moving, end every thread, close the files. The module cannot be called; ``remove`` still works."""
        self.memory.engine.close()
        self.memory.files.close()

    def remove(self) -> None:
        """Give the module back with all its parameters in memory, as it was before. A second call does nothing.

        Raises nothing for want of budget: the parameters come back whether they fit or not. Raises TransferError
        when the disk does not give them: then nothing has changed, and it can be called again.
        """
        if self._removed:
            return
        self._let_go()
        with torch.inference_mode(False):
            read = {s.index: self._values(s) for s in self._streamed if isinstance(s.home, DiskHome)}
            self._end(lambda s: read.pop(s.index, None) or self._values(s))

    def _undo(self) -> None:
        """Leave the module as ``apply`` found it."""
        if not self._hollow:
            self.remove()
            return
        self._end(lambda streamed: [self._originals[name] for name in streamed.block.tensors])
        for name, parameter in self._parameters.items():
            parameter.data = self._originals[name]

    def _end(self, values_of: Callable[[Streamed], Sequence[torch.Tensor]]) -> None:
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        self._guards.remove()
        self.memory.engine.close()
        for streamed in self._streamed:
            for parameter, value in zip(streamed.parameters, values_of(streamed), strict=True):
                parameter.data = value
            if isinstance(streamed.home, RamHome):
                streamed.home.free()
        self._streamed.clear()
        for buffer in self._buffers:
            buffer.free()
        self.memory.close()

    def _values(self, streamed: Streamed) -> list[torch.Tensor]:
        """The block's tensors as they are now, in memory of their own."""
        if self.memory.fake:
            return [self._originals[name] for name in streamed.block.tensors]
        return streamed.values()

    # -- placing

    def _place(self, partition: Partition) -> None:
        choices = self.plan.choices(NAME)
        staging = self._staging(partition, choices)
        self._keep_loose(partition)
        pending = [self._keep(b) for b in partition.blocks if choices[b.name] == RESIDENT]
        if self._passing is not None:
            self._passing.free()
        for block in partition.blocks:
            if choices[block.name] != RESIDENT:
                self._stream(block, choices[block.name])
        for finish in pending:
            finish()
        if self._streamed:
            self._make_ring()
            self._install()
        if staging is not None:
            staging.attach([s.home for s in self._streamed if isinstance(s.home, DiskHome)])
        self._guards.install([trigger for s in self._streamed for trigger in s.block.triggers])

    def _staging(self, partition: Partition, choices: Mapping[str, str]) -> Staging | None:
        """RAM slots between disk and VRAM; none where RAM itself is the compute tier."""
        host, sources = self.memory.host, self._weights.sources
        passing = [b for b in partition.blocks if choices[b.name] == FROM_DISK and self._loads_for(b)]
        if host is None or not passing:
            return None
        size = max(packed_layout([self._source(n, sources) for n in b.tensors]).bytes for b in passing)
        slots = [host.allocate(size, f"staging {i}") for i in range(self.plan.settings.get(STAGING_SLOTS, 2))]
        self._buffers += slots
        self.memory.staging = Staging(slots)
        return self.memory.staging

    def _source(self, name: str, sources: Mapping[str, TensorSource]) -> TensorSource:
        if name in sources:
            return sources[name]
        data = self._parameters[name].data
        return TensorSource(name=name, dtype=data.dtype, shape=tuple(data.shape), extents=())

    def _keep_loose(self, partition: Partition) -> None:
        """What belongs to no block: parameters and buffers that stay in the compute tier for good."""
        stored = [name for name in partition.loose if name in self._weights.sources]
        present = [name for name in partition.loose if name not in self._weights.sources]
        if stored:
            self._place_resident("outside blocks", stored)()
        if present:
            self._adopt_resident("outside blocks", [self._parameters[name] for name in present])
        buffers = sum(tensor_bytes(buffer) for buffer in self.model.buffers())
        if buffers:
            self._buffers.append(self.memory.compute.account(buffers, "buffers"))
        self._guards.move_buffers()

    def _keep(self, block: Block) -> Callable[[], None]:
        return self._place_resident(block.name, block.tensors)

    def _place_resident(self, label: str, names: Sequence[str]) -> Callable[[], None]:
        """Start bringing tensors to the compute tier for good; what is returned waits and binds them."""
        parameters = [self._parameters[name] for name in names]
        if not self._weights.sources:
            self._adopt_resident(label, parameters)
            return lambda: None
        sources = [self._weights.sources[name] for name in names]
        return self._load_resident(label, parameters, sources)

    def _adopt_resident(self, label: str, parameters: list[nn.Parameter]) -> None:
        """Tensors that are in the module already: they stay where they are, or are copied to VRAM."""
        layout = packed_layout([self._source(self._names[id(p)], {}) for p in parameters])
        if self.memory.host is None or all(p.device.type == self.memory.device.type == "cuda" for p in parameters):
            self._buffers.append(self.memory.compute.account(layout.bytes, label))
            return
        buffer = self.memory.compute.allocate(layout.bytes, label)
        self._buffers.append(buffer)
        for parameter, view in zip(parameters, layout.views(buffer.tensor), strict=True):
            self._guards.restore_later(parameter)
            if not self.memory.fake:
                parameter.data = view.copy_(parameter.data)

    def _load_resident(
        self, label: str, parameters: list[nn.Parameter], sources: list[TensorSource]
    ) -> Callable[[], None]:
        in_ram = self.memory.host is None
        layout = (file_layout if in_ram else packed_layout)(sources)
        buffer = self.memory.compute.allocate(layout.bytes, label)
        self._buffers.append(buffer)
        if in_ram:
            moved = self.memory.engine.read(layout.runs, buffer, label, [])
        else:
            passing = self._passage(layout.bytes)
            read = self.memory.engine.read(layout.runs, passing, label, [])
            way = (RAM, self.memory.compute.tier)
            moved = self.memory.engine.copy(passing.tensor[: layout.bytes], buffer, label, [read], way)

        def finish() -> None:
            moved.wait()
            views = layout.views(buffer.tensor)
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data = view
            self._verify([source.name for source in sources], views)

        if in_ram:
            return finish
        finish()  # one block at a time, or RAM would have to hold the whole model on its way
        if self.memory.device.type == "cuda":
            torch.cuda.current_stream(self.memory.device).synchronize()  # the passage is about to be used again
        return lambda: None

    def _passage(self, bytes: int) -> Buffer:
        """RAM that residents pass through on their way from disk to VRAM, one at a time; kept for the next."""
        if self._passing is None or self._passing.bytes < bytes:
            if self._passing is not None:
                self._passing.free()
            self._passing = self.memory.ram.allocate(bytes, "residents on their way")
        return self._passing

    def _verify(self, names: Sequence[str], views: Sequence[torch.Tensor]) -> None:
        if self._weights.verify is not None and not self.memory.fake:
            for name, view in zip(names, views, strict=True):
                self._weights.verify(name, view)

    def _stream(self, block: Block, choice: str) -> None:
        parameters = [self._parameters[name] for name in block.tensors]
        sources = [self._source(name, self._weights.sources) for name in block.tensors]
        home: Home
        if choice == FROM_RAM:
            home = RamHome(self.memory, sources, block.name)
            if self._weights.sources:
                home.fill_from_files(block.name).wait()
            else:
                home.write_back([p.data for p in parameters])
        else:
            if not self._weights.sources:
                sources = list(self.memory.scratch().store(sources, [p.data for p in parameters]))
            home = DiskHome(self.memory, sources, block.name)
        streamed = Streamed(len(self._streamed), block, parameters, home, self.memory.device)
        self._streamed.append(streamed)
        self._rest(streamed)

    def _make_ring(self) -> None:
        homes = {s.index: s.home for s in self._streamed if self._loads_for(s.block)}
        if not homes:
            return
        size = max(home.layout.bytes for home in homes.values())
        count = self.plan.settings[RING_SLOTS]
        slots = [self.memory.compute.allocate(size, f"ring slot {i}") for i in range(count)]
        self._buffers += slots
        self._ring = Ring(self.memory, homes, {s.index: s.block.name for s in self._streamed}, slots)
        self._ring.prefetch()

    # -- coming and going

    def _loads_for(self, block: Block) -> list[str]:
        """The triggers that need the block itself; a lookup reads its few rows where the table rests."""
        return [trigger for trigger in block.triggers if trigger not in block.lookups]

    def _install(self) -> None:
        by_trigger: dict[str, list[Streamed]] = {}
        for streamed in self._streamed:
            for trigger in self._loads_for(streamed.block):
                by_trigger.setdefault(trigger, []).append(streamed)
            if self.memory.device.type != "cpu":
                for trigger in streamed.block.lookups:
                    self._guards.look_up(self.model.get_submodule(trigger), streamed.home, self.memory.device)
        for trigger, held in by_trigger.items():
            self._hooks.append(Visit(self, held, self.model.get_submodule(trigger)))
        for streamed in self._streamed:
            if isinstance(streamed.home, DiskHome) and not self.memory.fake:
                for trigger in streamed.block.lookups:
                    self._hooks.append(check_rows(self.model.get_submodule(trigger), streamed.home, streamed))
        if "" not in by_trigger:  # there the visit itself sees to it
            recover = torch.compiler.disable(Recover(self))
            self._hooks.append(self.model.register_forward_pre_hook(recover, prepend=True))

    def _let_go(self) -> None:
        """Nothing is running: what still counts as in use was interrupted."""
        for streamed in self._streamed:
            if streamed.uses:
                streamed.uses = 0
                self._rest(streamed)
        if self._ring is not None:
            self._ring.let_go()

    def _enter(self, streamed: Streamed) -> None:
        if streamed.uses:
            streamed.uses += 1
            return
        assert self._ring is not None
        self._adopt_changes(streamed)
        streamed.uses = 1
        try:
            slot = self._ring.acquire(streamed.index)
        except BaseException:
            streamed.uses = 0
            raise
        try:
            views = streamed.views.get(id(slot))
            if views is None:
                views = streamed.views[id(slot)] = streamed.home.layout.views(slot.tensor)
            if not streamed.verified:
                self._verify(streamed.block.tensors, views)
                streamed.verified = True
            streamed.bind(views)
        except BaseException:
            streamed.uses = 0
            self._ring.release(streamed.index)
            raise

    def _leave(self, streamed: Streamed) -> None:
        if streamed.uses == 0:
            return  # entering failed
        streamed.uses -= 1
        if streamed.uses:
            return
        assert self._ring is not None
        changed = streamed.is_changed()
        try:
            if changed:
                streamed.home.write_back([p.data for p in streamed.parameters])
        finally:  # a full scratch disk loses the change, not the slot
            self._rest(streamed)
            self._ring.release(streamed.index)
            if changed:
                self._ring.forget()

    def _rest(self, streamed: Streamed) -> None:
        if not self.memory.fake:
            streamed.rest()

    def _adopt_changes(self, streamed: Streamed) -> None:
        if not self.memory.fake and not streamed.uses and streamed.adopt_changes() and self._ring is not None:
            self._ring.forget()
