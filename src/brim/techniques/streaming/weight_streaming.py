"""Weight streaming: some blocks stay in the compute tier, the others pass through a small ring of slots.

Under a cyclic access pattern a pager (LRU) misses every block; the optimum keeps a fixed set and streams the rest
(Belady, 1966). Residents are spread evenly, so that the link has compute to hide behind all along the step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from brim.core import Plan, Timeline
from brim.core.hardware import DISK
from brim.errors import UsageError
from brim.memory.backing_store import DiskStore, RamStore
from brim.memory.tiers import Memory
from brim.techniques.base import refuse_second
from brim.techniques.blocks import Block, Partition
from brim.techniques.cpu_compute.technique import TRANSFER_BYTES, HostCompute
from brim.techniques.experts.backing_store import ExpertsStore
from brim.techniques.experts.technique import CachedExperts, expert_layers, passing_sources
from brim.techniques.streaming.backward_streaming import BackwardStreaming
from brim.techniques.streaming.block_state import Streamed
from brim.techniques.streaming.gather_for_update import rests_in_ram, updating, updating_at_rest
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.hooks import (
    BlockHooks,
    Recover,
    Turns,
    check_rows,
    note_steps,
    settle_first,
    without_casts,
)
from brim.techniques.streaming.offloaded_parameter import reveal
from brim.techniques.streaming.placement import (
    COMPUTE_RAM,
    FROM_DISK,
    FROM_RAM,
    NAME,
    RESIDENT,
    STAGING_SLOTS,
    Placement,
    Weights,
    loads_for,
)
from brim.techniques.streaming.ring import Ring
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

__all__ = ["COMPUTE_RAM", "FROM_DISK", "FROM_RAM", "NAME", "RESIDENT", "RING_SLOTS", "STAGING_SLOTS", "Weights"]
__all__ += ["WeightStreaming", "apply"]

RING_SLOTS = "ring_slots"


def apply(
    model: nn.Module, partition: Partition, plan: Plan, memory: Memory, weights: Weights, *, training: bool = False
) -> WeightStreaming:
    """Put ``plan`` into force on ``model``. Raises UsageError when it is fitted already.

    With ``training`` gradients flow through streamed blocks; without, computing them is refused. On any failure the
    model is left, or made again, as it was.
    """
    refuse_second(model)
    handle = WeightStreaming(model, plan, memory, weights, training=training)
    try:
        handle._place(partition)
    except BaseException:
        handle._undo()
        raise
    return handle


class WeightStreaming:
    """The handle of a module that was fitted for inference. Several threads may call the module: their calls take
    turns.

    Attributes:
        model: The module, in place.
        plan: What was decided and promised.
        blocks: All parameters, by the name of what is moved together.
        partition: How the module was cut into blocks.
        weights: Where the values of its parameters are read from.
        turns: The lock by which threads take turns.
    """

    partition: Partition

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights, *, training: bool) -> None:
        self.model, self.plan, self.memory, self.weights = model, plan, memory, weights
        self.blocks: list[tuple[str, list[nn.Parameter]]] = []
        self._parameters = dict(model.named_parameters())
        # Where nothing has been moved out of the module, its own tensors are what it gets back.
        self._hollow = memory.fake or bool(weights.sources)
        self._originals = {
            name: p.data
            for name, p in self._parameters.items()
            if self._hollow and not self.memory.is_traced_on_device(p)
        }
        self._devices = {name: p.device for name, p in self._parameters.items()}
        self._hooks: list[BlockHooks | torch.utils.hooks.RemovableHandle] = []
        self._guards = Guards(model, memory)
        self.turns = Turns(model)
        self._placement = Placement(model, plan, memory, weights, self._guards)
        self._streamed_blocks = StreamedBlocks(memory, self._placement.verify, training=training)
        self._backward = BackwardStreaming(self._streamed_blocks, self.settle) if training else None
        self._host: HostCompute | None = None
        self._experts: CachedExperts | None = None
        self._written_back: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()

    # -- what a user reads

    @property
    def misses(self) -> int:
        """How often a block was called that was not loading yet: the order of calls was not foreseen, and compute
        waited.
        """
        ring = self._streamed_blocks.ring
        return ring.misses if ring is not None else 0

    def timeline(self) -> Timeline:
        """What memory did since the module was fitted.

        Its ``facts`` have, per tier, ``budget_bytes.ram`` (what was given), ``promised_bytes.ram`` (the program's
        share and activations included) and ``held_bytes.ram`` (the pool's peak); ``copied_bytes.disk.ram`` per way;
        ``misses``; with cached experts also ``expert_hits`` and ``expert_loads``.
        """
        timeline, recorder = self.memory.recorder.timeline, self.memory.recorder
        timeline.facts |= {f"budget_bytes.{tier}": count for tier, count in self.plan.budget_bytes.items()}
        timeline.facts |= {f"promised_bytes.{tier}": count for tier, count in self.plan.promise.peak_bytes.items()}
        pools = [self.memory.compute, *([self.memory.host] if self.memory.host else [])]
        timeline.facts |= {f"held_bytes.{pool.tier}": pool.peak_bytes for pool in pools}
        timeline.facts |= {f"copied_bytes.{way[0]}.{way[1]}": count for way, count in recorder.copied_bytes.items()}
        timeline.facts["misses"] = self.misses
        timeline.facts |= {} if self._experts is None else self._experts.facts()
        return timeline

    def close(self) -> None:
        """Stop moving, end every thread, close the files. The module cannot be called any more; ``remove`` still
        works.
        """
        self.memory.engine.close()
        self.memory.files.close()

    def remove(self) -> None:
        """Give the module back with all its parameters in memory, as it was before. A second call does nothing.

        The parameters come back whether they fit the budget or not.

        Raises:
            TransferError: The disk does not give them. Nothing has changed then, and it can be called again.
        """
        if self._streamed_blocks.removed:
            return
        if self._streamed_blocks:
            self.turns.check_process()
        with self.turns.lock, torch.inference_mode(False):
            self._let_go()
            self.settle()
            read = {s.index: self._values(s) for s in self._streamed_blocks if s.store.tier == DISK}
            self._end(lambda s: read.pop(s.index, None) or self._values(s))

    def _undo(self) -> None:
        """Leave the module as ``apply`` found it."""
        if not self._hollow:
            self.remove()
            return
        self._end(self._stored)
        for name, value in self._originals.items():
            reveal(self._parameters[name], value)

    def _end(self, values_of: Callable[[Streamed], Sequence[torch.Tensor]]) -> None:
        self._streamed_blocks.removed = True
        for hook in self._hooks:
            hook.remove()
        self._guards.remove()
        self.memory.engine.close()
        for streamed in self._streamed_blocks:
            values = zip(streamed.parameters, streamed.block.tensors, values_of(streamed), strict=True)
            for parameter, name, value in values:
                reveal(parameter, value.to(self._devices[name]))
            if isinstance(streamed.store, (RamStore, ExpertsStore)):
                streamed.store.free()
            streamed.forget()
        self._streamed_blocks.clear()
        if self._host is not None:
            self._host.free()
        for buffer in self._placement.buffers:
            buffer.free()
        self.memory.close()

    def _values(self, streamed: Streamed) -> list[torch.Tensor]:
        """The block's tensors as they are now, in memory of their own."""
        return self._stored(streamed) if self.memory.fake else streamed.values()

    def _stored(self, streamed: Streamed) -> list[torch.Tensor]:
        """The block's tensors as the module had them, except those that a trace has freed."""
        pairs = zip(streamed.block.tensors, streamed.parameters, strict=True)
        return [self._originals.get(name, p.data) for name, p in pairs]

    # -- placing

    def _place(self, partition: Partition) -> None:
        choices, placement, self.partition = self.plan.choices(NAME), self._placement, partition
        passing = [b for b in partition.blocks if choices[b.name] == FROM_DISK and self._moves(b)]
        layers = expert_layers(self.model, self.plan)
        staging = placement.make_staging(passing, passing_sources(layers, self.plan, placement.source))
        if COMPUTE_RAM in choices.values():
            transfer_bytes = self.plan.settings.get(TRANSFER_BYTES, 0)
            self._host = HostCompute(self._streamed_blocks, partition, transfer_bytes=transfer_bytes)
        self._list_blocks(partition)
        leaving = [block for block in partition.blocks if choices[block.name] != RESIDENT]
        crowding = [block for block in leaving if self._crowds(block)]
        for block in crowding:  # or the compute tier would hold them beside the residents for a moment
            self._stream(block, choices[block.name])
        if crowding:
            self.memory.give_back()
            staying = [block.tensors for block in partition.blocks if choices[block.name] == RESIDENT]
            placement.move_together([name for names in (partition.loose, *staying) for name in names])
            self.memory.give_back()
        placement.keep_loose(partition)
        for block in partition.blocks:
            if choices[block.name] == RESIDENT:
                placement.keep(block)
        placement.all_kept()
        for block in leaving:
            if block not in crowding:
                self._stream(block, choices[block.name])
        if layers:
            self._experts = CachedExperts(placement, self._streamed_blocks)
            self._experts.place(layers)
        placement.finish()
        for streamed in self._streamed_blocks:
            streamed.on_write = self._streamed_blocks.adopt_changes
        if self._streamed_blocks:
            self._make_ring()
            self._install()
        elif self._backward is None and not self.memory.fake and not self._has_room_for_casts():
            self._guards.replace(self.model, "_call_impl", without_casts(self.model._call_impl))
        if staging is not None:
            staging.attach([s.store for s in self._streamed_blocks if isinstance(s.store, DiskStore)])
        self._guards.install(self, self._streamed_blocks)
        self.memory.give_back()

    def _list_blocks(self, partition: Partition) -> None:
        groups = [(block.name, block.tensors) for block in partition.blocks]
        groups += [("outside blocks", partition.loose)] if partition.loose else []
        self.blocks = [(name, [self._parameters[tensor] for tensor in tensors]) for name, tensors in groups]

    def _has_room_for_casts(self) -> bool:
        """Whether the budget holds, beside what is promised, what autocast makes of each float32 weight and keeps."""
        tier, half = self.memory.compute.tier, torch.bfloat16.itemsize
        casts_bytes = sum(half * p.numel() for p in self._parameters.values() if p.dtype == torch.float32)
        budget, promised = self.plan.budget_bytes, self.plan.promise.peak_bytes
        return tier not in budget or promised.get(tier, 0) + casts_bytes <= budget[tier]

    def _moves(self, block: Block) -> bool:
        """Whether the block ever comes to the compute tier: also to be updated there."""
        trained = self._backward is not None and any(self._parameters[name].requires_grad for name in block.tensors)
        return bool(loads_for(block)) or trained

    def _crowds(self, block: Block) -> bool:
        """Whether the module has the block in VRAM, which it is to leave."""
        return any(self.memory.is_on_gpu(self._parameters[name]) for name in block.tensors)

    def _stream(self, block: Block, choice: str) -> None:
        parameters, store = [self._parameters[name] for name in block.tensors], self._placement.store(block, choice)
        for parameter in filter(
            self.memory.is_traced_on_device, parameters
        ):  # at rest they have no values in a trace
            parameter.data = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
        streamed = self._streamed_blocks.add(block, parameters, store)
        if choice == COMPUTE_RAM:
            assert self._host is not None
            self._host.take(streamed)

    def _passes(self, streamed: Streamed) -> bool:
        """Whether the block comes through the ring when its modules are called."""
        apart = (part is not None and part.has(streamed) for part in (self._host, self._experts))
        return bool(loads_for(streamed.block)) and not any(apart)

    def _make_ring(self) -> None:
        blocks = self._streamed_blocks
        stores = {s.index: s.store for s in blocks if self._passes(s) and s.index not in blocks.carriers}
        if not stores:
            return
        size = max(store.layout.bytes for store in stores.values())
        count = self.plan.settings[RING_SLOTS]
        slots = self.memory.compute.allocate_row(size, [f"ring slot {i}" for i in range(count)])
        self._placement.buffers += slots
        blocks.ring = Ring(self.memory, stores, {s.index: s.block.name for s in blocks}, slots)
        blocks.carriers |= dict.fromkeys(stores, blocks.ring)
        blocks.ring.prefetch()

    # -- coming and going

    def _install(self) -> None:
        by_trigger: dict[str, list[Streamed]] = {}
        for streamed in self._streamed_blocks:
            for trigger in loads_for(streamed.block) if self._passes(streamed) else []:
                by_trigger.setdefault(trigger, []).append(streamed)
            for trigger in streamed.block.lookups:
                self._watch_lookup(self.model.get_submodule(trigger), streamed)
        for trigger, blocks in by_trigger.items():
            module = self.model.get_submodule(trigger)
            begin_step = self._begin_step if module is self.model else None
            hooks = BlockHooks(self._streamed_blocks, blocks, module, self.turns, self._backward, begin_step)
            self._hooks.append(hooks)
            if self._backward is not None:
                self._guards.replace(module, "_call_impl", hooks.guarded_call())
        if self._backward is not None:
            noting = note_steps({id(p) for s in self._streamed_blocks for p in s.parameters}, self._written_back)
            self._hooks.append(noting)
            weakref.finalize(self, noting.remove)  # of all optimizers: it must not outlive the handle
        if self._host is not None:
            self._host.install(self.model, self._guards)
        if self._experts is not None:
            self._experts.install(self._guards)
        if "" not in by_trigger:  # its own hooks see to it
            recover = torch.compiler.disable(Recover(self._begin_step))
            self._hooks.append(self.model.register_forward_pre_hook(recover, prepend=True))
        if not self.memory.fake:
            self._guards.replace(self.model, "_call_impl", self.turns.taking(self.model._call_impl))

    def _watch_lookup(self, table: nn.Module, streamed: Streamed) -> None:
        """Have rows of ``table`` picked where it rests."""
        if self.memory.fake:
            return
        if self.memory.device.type != "cpu":
            self._guards.look_up(table)
        if isinstance(streamed.store, DiskStore):
            self._hooks.append(check_rows(table, streamed.store, streamed))
        elif self._backward is not None:
            self._hooks.append(settle_first(table, streamed.store))

    def _begin_step(self) -> None:
        """The whole model is called."""
        if self._backward is not None and torch._C._current_graph_task_id() != -1:
            return  # backward repeats it (checkpointing): what is in use stays in use
        self._let_go()
        if self._backward is not None:  # once for all: an optimizer changes every block
            self._streamed_blocks.adopt_all_changes()

    def _let_go(self) -> None:
        """Nothing is running: what still counts as in use was interrupted."""
        if self._backward is not None:
            self._backward.let_go()
        self._streamed_blocks.let_go()
        if self._experts is not None:
            self._experts.begin_step()
        if self._streamed_blocks.ring is not None:
            self._streamed_blocks.ring.let_go()

    # -- changing

    @contextlib.contextmanager
    def updating(self, what: str | Iterable[nn.Parameter]) -> Iterator[None]:
        """Within, a block (named as in ``blocks``), or these parameters, have their values in the compute tier.

        What is trained of it goes back to where the block rests, beside whatever comes next; ``settle`` waits for
        it. As many blocks as the ring has slots can be in use at once. Raises UsageError for what is not the
        model's, BudgetError where a table that is only looked up from finds no room.
        """
        with updating(self._streamed_blocks, self._host, self._to_update(what)):
            yield

    def rests_in_ram(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all of these lie in RAM beside a GPU now, where ``updating_at_rest`` lets them be changed."""
        return rests_in_ram(self._streamed_blocks, self._host, {id(p) for p in parameters})

    @contextlib.contextmanager
    def updating_at_rest(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within, these parameters point to where they rest in RAM, without gradients. No weight is copied.

        Raises UsageError for what is not the model's.
        """
        with updating_at_rest(self._streamed_blocks, self._to_update(parameters)):
            yield

    def _to_update(self, what: str | Iterable[nn.Parameter]) -> list[nn.Parameter]:
        if isinstance(what, str):
            named = dict(self.blocks)
            if what not in named:
                raise UsageError(f"Cannot update the block {what!r}.", f"Known: {', '.join(named)}.")
            return named[what]
        parameters = list(what)
        strange = {id(p) for p in parameters} - {id(p) for p in self._parameters.values()}
        if strange:
            raise UsageError(f"Cannot update {len(parameters)} parameters.", f"{len(strange)} are not the model's.")
        return parameters

    def is_updated_by(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """From now on steps of ``optimizer`` change these parameters within ``updating`` and nowhere else."""
        self._written_back[optimizer] = {id(parameter) for parameter in parameters}

    def value(self, name: str) -> torch.Tensor:
        """A parameter or buffer as it is now, wherever it rests, on the CPU and in memory of its own.

        Raises KeyError for a name that the model has not, TransferError when the disk does not give it.
        """
        parameter = self._parameters.get(name)
        if parameter is None:  # a tied one by another of its names
            parameter = dict(self.model.named_parameters(remove_duplicate=False)).get(name)
        for streamed in self._streamed_blocks:
            for index, held_parameter in enumerate(streamed.parameters):
                if held_parameter is parameter and not self.memory.fake:
                    return streamed.value(index)
        tensor = parameter if parameter is not None else dict(self.model.named_buffers())[name]
        return tensor.detach().to("cpu", copy=True)

    def settle(self) -> None:
        """Wait until everything that was changed is where it rests. Raises the TransferError that was met."""
        if self._streamed_blocks:
            self.turns.check_process()
        self._streamed_blocks.settle()
