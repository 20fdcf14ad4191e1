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
from brim.memory.backing_store import DiskStore
from brim.memory.tiers import Memory
from brim.techniques.base import refuse_second
from brim.techniques.blocks import Block, Partition
from brim.techniques.streaming.backward_streaming import BackwardStreaming
from brim.techniques.streaming.block_state import StreamedBlock
from brim.techniques.streaming.guards import Guards
from brim.techniques.streaming.hooks import (
    BlockCompilation,
    BlockHooks,
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
    Companion,
    MakeCompanion,
    Placement,
    Weights,
    loading_triggers,
)
from brim.techniques.streaming.ring import Ring
from brim.techniques.streaming.streamed_blocks import StreamedBlocks

__all__ = ["COMPUTE_RAM", "FROM_DISK", "FROM_RAM", "NAME", "RESIDENT", "RING_SLOTS", "STAGING_SLOTS", "Weights"]
__all__ += ["WeightStreaming", "apply"]

RING_SLOTS = "ring_slots"


def apply(
    model: nn.Module,
    partition: Partition,
    plan: Plan,
    memory: Memory,
    weights: Weights,
    companions: Sequence[MakeCompanion] = (),
    *,
    training: bool = False,
) -> WeightStreaming:
    """Put ``plan`` into force on ``model``. Raises UsageError when it is fitted already.

    ``companions`` serve the blocks that do not pass through the ring. With ``training`` gradients flow through
    streamed blocks, else they are refused. On any failure the model is left, or restored, as it was.
    """
    refuse_second(model)
    handle = WeightStreaming(model, plan, memory, weights, training=training)
    try:
        handle._place(partition, companions)
    except BaseException:
        handle._undo()
        raise
    return handle


class WeightStreaming:
    """The handle of a module that was fitted for inference. Calls from several threads run one after the other.

    Attributes:
        model: The module, in place.
        plan: The plan in force.
        blocks: All parameters, by the name of their block.
        partition: The blocks of the module.
        weights: The sources of its parameters.
        turns: The lock of its calls.
    """

    partition: Partition

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights, *, training: bool) -> None:
        self.model, self.plan, self.memory, self.weights = model, plan, memory, weights
        self.blocks: list[tuple[str, list[nn.Parameter]]] = []
        self._guards = Guards(model, memory)
        self._placement = Placement(model, plan, memory, weights, self._guards)
        self._parameters = self._placement.parameters
        # If the module's own tensors stay in memory, it gets them back at the end.
        self._hollow = memory.fake or bool(weights.sources)
        self._originals = {
            name: p.data
            for name, p in self._parameters.items()
            if self._hollow and not self.memory.is_traced_on_device(p)
        }
        self._devices = {name: p.device for name, p in self._parameters.items()}
        self.at_end = contextlib.ExitStack()  # what ``remove`` undoes
        self.turns, self._compilation = Turns(model), BlockCompilation()
        self._streamed_blocks = StreamedBlocks(memory, self._placement.verify, training=training)
        self._backward = BackwardStreaming(self._streamed_blocks, self.settle) if training else None
        self._companions: list[Companion] = []
        self._written_back: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()

    # -- what a user reads

    @property
    def misses(self) -> int:
        """How often compute waited for a block that was not loading yet: the order of calls was not predicted."""
        ring = self._streamed_blocks.ring
        return ring.misses if ring is not None else 0

    def timeline(self) -> Timeline:
        """The timeline of memory since the module was fitted.

        Its ``facts`` have, per tier, ``budget_bytes.ram``, ``promised_bytes.ram`` (the program's share and
        activations included) and ``held_bytes.ram`` (the pool's peak); ``copied_bytes.disk.ram`` per link;
        ``misses``; with cached experts also ``expert_hits`` and ``expert_loads``.
        """
        timeline, recorder = self.memory.recorder.timeline, self.memory.recorder
        timeline.facts |= {f"budget_bytes.{tier}": count for tier, count in self.plan.budget_bytes.items()}
        timeline.facts |= {f"promised_bytes.{tier}": count for tier, count in self.plan.promise.peak_bytes.items()}
        pools = [self.memory.compute, *([self.memory.host] if self.memory.host else [])]
        timeline.facts |= {f"held_bytes.{pool.tier}": pool.peak_bytes for pool in pools}
        timeline.facts |= {
            f"copied_bytes.{link[0]}.{link[1]}": count for link, count in recorder.copied_bytes.items()
        }
        timeline.facts["misses"] = self.misses
        for companion in self._companions:
            timeline.facts |= companion.facts()
        return timeline

    def close(self) -> None:
        """End every thread and close the files. The module cannot be called any more; ``remove`` still works."""
        self.memory.engine.close()
        self.memory.files.close()

    def remove(self) -> None:
        """Give the module back with all its parameters in memory, as it was before. A second call does nothing.

        The parameters come back whether they fit the budget or not.

        Raises:
            TransferError: The disk cannot be read. Nothing has changed then, and it can be called again.
        """
        if self._streamed_blocks.removed:
            return
        if self._streamed_blocks:
            self.turns.check_process()
        with self.turns.lock, torch.inference_mode(False):
            self._recover()
            self.settle()
            read = {s.index: self._values(s) for s in self._streamed_blocks if s.store.tier == DISK}
            self._end(lambda s: read.pop(s.index, None) or self._values(s))

    def _undo(self) -> None:
        """Restore the module as it was before ``apply``."""
        if not self._hollow:
            self.remove()
            return
        self._end(self._stored)
        for name, value in self._originals.items():
            reveal(self._parameters[name], value)

    def _end(self, values_of: Callable[[StreamedBlock], Sequence[torch.Tensor]]) -> None:
        self._streamed_blocks.removed = True
        self.at_end.close()
        self._guards.remove()
        self.memory.engine.close()
        for streamed in self._streamed_blocks:
            values = zip(streamed.parameters, streamed.block.tensors, values_of(streamed), strict=True)
            for parameter, name, value in values:
                reveal(parameter, value.to(self._devices[name]))
            streamed.store.free()
            streamed.forget()
        self._streamed_blocks.clear()
        for companion in self._companions:
            companion.free()
        for buffer in self._placement.buffers:
            buffer.free()
        self.memory.close()

    def _values(self, streamed: StreamedBlock) -> list[torch.Tensor]:
        return self._stored(streamed) if self.memory.fake else streamed.values()

    def _stored(self, streamed: StreamedBlock) -> list[torch.Tensor]:
        """The tensors of the block that the module had before, except those that a trace has freed."""
        pairs = zip(streamed.block.tensors, streamed.parameters, strict=True)
        return [self._originals.get(name, p.data) for name, p in pairs]

    # -- placing

    def _place(self, partition: Partition, companions: Sequence[MakeCompanion]) -> None:
        choices, placement, self.partition = self.plan.choices(NAME), self._placement, partition
        self._companions = [make(placement, self._streamed_blocks) for make in companions]
        passing = [b for b in partition.blocks if choices[b.name] == FROM_DISK and self._moves(b)]
        staging = placement.make_staging(passing, [part for c in self._companions for part in c.staged()])
        for companion in self._companions:
            companion.prepare()
        groups = [(block.name, block.tensors) for block in partition.blocks]
        groups += [("outside blocks", partition.loose)] if partition.loose else []
        self.blocks = [(name, [self._parameters[tensor] for tensor in tensors]) for name, tensors in groups]
        leaving = [block for block in partition.blocks if choices[block.name] != RESIDENT]
        crowding = [b for b in leaving if any(self.memory.is_on_gpu(self._parameters[name]) for name in b.tensors)]
        for block in crowding:  # first, or they would be in the compute tier together with the residents
            self._stream(block, choices[block.name])
        if crowding:
            self.memory.empty_cache()
            staying = [block.tensors for block in partition.blocks if choices[block.name] == RESIDENT]
            placement.move_together([name for names in (partition.loose, *staying) for name in names])
            self.memory.empty_cache()
        placement.keep_loose(partition)
        for block in partition.blocks:
            if choices[block.name] == RESIDENT:
                placement.keep(block)
        placement.end_residents()
        for block in leaving:
            if block not in crowding:
                self._stream(block, choices[block.name])
        for companion in self._companions:
            companion.place()
        placement.finish()
        self.memory.files.uses_page_cache = False
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
        self.memory.empty_cache()

    def _has_room_for_casts(self) -> bool:
        """Return whether the budget has room for autocast's 16-bit copies of all float32 weights."""
        tier, half = self.memory.compute.tier, torch.bfloat16.itemsize
        casts_bytes = sum(half * p.numel() for p in self._parameters.values() if p.dtype == torch.float32)
        budget, promised = self.plan.budget_bytes, self.plan.promise.peak_bytes
        return tier not in budget or promised.get(tier, 0) + casts_bytes <= budget[tier]

    def _moves(self, block: Block) -> bool:
        """Return whether the block is ever loaded into the compute tier, for a call or an update."""
        trained = self._backward is not None and any(self._parameters[name].requires_grad for name in block.tensors)
        return bool(loading_triggers(block)) or trained

    def _stream(self, block: Block, choice: str) -> None:
        parameters, store = [self._parameters[name] for name in block.tensors], self._placement.store(block, choice)
        for parameter in filter(self.memory.is_traced_on_device, parameters):  # at rest a trace has no values
            parameter.data = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
        streamed = self._streamed_blocks.add(block, parameters, store)
        for companion in self._companions:
            companion.take(streamed, choice)
        assert choice != COMPUTE_RAM or streamed.index in self._streamed_blocks.gathering

    def _passes(self, streamed: StreamedBlock) -> bool:
        """Return whether the block is loaded into a slot when its modules are called."""
        blocks = self._streamed_blocks
        stays = streamed.index in blocks.gathering or streamed.index in blocks.drop_copies
        return bool(loading_triggers(streamed.block)) and not stays

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

    # -- loading and releasing

    def _install(self) -> None:
        by_trigger: dict[str, list[StreamedBlock]] = {}
        for streamed in self._streamed_blocks:
            for trigger in loading_triggers(streamed.block) if self._passes(streamed) else []:
                by_trigger.setdefault(trigger, []).append(streamed)
            for trigger in streamed.block.lookups:
                self._watch_lookup(self.model.get_submodule(trigger), streamed)
        for trigger, blocks in by_trigger.items():
            module = self.model.get_submodule(trigger)
            begin_step = self._begin_step if module is self.model else None
            hooks = BlockHooks(self._streamed_blocks, blocks, module, self.turns, self._backward, begin_step)
            self.at_end.callback(hooks.remove)
            if self._backward is not None:
                replaced = vars(module).get("_call_impl")  # by a chunked loss, whose chunks are calls of the block
                owner, name = (replaced, "inner") if hasattr(replaced, "inner") else (module, "_call_impl")
                self._guards.replace(owner, name, hooks.guarded_call())
        if self._backward is not None:
            noting = note_steps({id(p) for s in self._streamed_blocks for p in s.parameters}, self._written_back)
            self.at_end.callback(noting.remove)
            weakref.finalize(self, noting.remove)  # of all optimizers: it must not outlive the handle
        for companion in self._companions:
            companion.install(self._guards)
        if "" not in by_trigger:  # else the hooks of the model itself call it
            recover = torch.compiler.disable(lambda module, args: self._begin_step())
            self.at_end.callback(self.model.register_forward_pre_hook(recover, prepend=True).remove)
        if not self.memory.fake:
            self._compile_blocks()
            call = self._compilation.replacement(self.turns.taking(self.model._call_impl), is_block=False)
            self._guards.replace(self.model, "_call_impl", call)

    def _compile_blocks(self) -> None:
        """Let ``torch.compile`` of the model compile each block that the compute tier computes once in a step."""
        streamed = {s.block.name: s for s in self._streamed_blocks}
        computed = [b for b in self.partition.blocks if b.name not in streamed or self._passes(streamed[b.name])]
        for module in {self.model.get_submodule(trigger) for block in computed for trigger in block.triggers}:
            if module is not self.model and "forward" not in vars(module):  # which checkpointing replaces
                call = self._compilation.replacement(module._call_impl, is_block=True)
                self._guards.replace(module, "_call_impl", call)

    def _watch_lookup(self, table: nn.Module, streamed: StreamedBlock) -> None:
        """Let look-ups read rows of ``table`` at rest."""
        if self.memory.fake:
            return
        if self.memory.device.type != "cpu":
            self._guards.look_up(table)
        if isinstance(streamed.store, DiskStore):
            self.at_end.callback(check_rows(table, streamed.store, streamed).remove)
        elif self._backward is not None:
            self.at_end.callback(settle_first(table, streamed.store).remove)

    def _begin_step(self) -> None:
        if self._backward is not None and torch._C._current_graph_task_id() != -1:
            return  # backward repeats the call (checkpointing): blocks in use stay in use
        self._recover()
        if self._backward is not None:  # immediately, because an optimizer changes every block
            self._streamed_blocks.adopt_all_changes()

    def _recover(self) -> None:
        """Release all blocks of an interrupted step: nothing is running."""
        if self._backward is not None:
            self._backward.recover()
        self._streamed_blocks.recover()
        for companion in self._companions:
            companion.begin_step()
        if self._streamed_blocks.ring is not None:
            self._streamed_blocks.ring.recover()

    # -- changing

    @contextlib.contextmanager
    def updating(self, what: str | Iterable[nn.Parameter]) -> Iterator[None]:
        """Keep a block (named as in ``blocks``), or these parameters, in the compute tier to be changed.

        Changes of trained parameters are saved in the background; ``settle`` waits for them. As many blocks as the
        ring has slots can be in use at once. Raises UsageError for an unknown block or a parameter of another model,
        BudgetError where a table that is only looked up from has no room.
        """
        with self._streamed_blocks.updating(self._to_update(what)):
            yield

    def rests_in_ram(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether all of these are in RAM beside a GPU, as ``updating_at_rest`` needs it."""
        return self._streamed_blocks.rests_in_ram({id(p) for p in parameters})

    @contextlib.contextmanager
    def updating_at_rest(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Point these parameters to RAM, where they rest, without gradients, to be changed without a copy.

        Raises UsageError for a parameter of another model.
        """
        with self._streamed_blocks.updating_at_rest(self._to_update(parameters)):
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
            raise UsageError(
                f"Cannot update {len(parameters)} parameters.", f"{len(strange)} of them are not in the model."
            )
        return parameters

    def is_updated_by(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Declare that steps of ``optimizer`` change these parameters only within ``updating``."""
        self._written_back[optimizer] = {id(parameter) for parameter in parameters}

    def value(self, name: str) -> torch.Tensor:
        """The present value of a parameter or buffer, copied to the CPU.

        Raises KeyError for an unknown name, TransferError when the disk cannot be read.
        """
        parameter = self._parameters.get(name)
        if parameter is None:  # a tied one by another of its names
            parameter = dict(self.model.named_parameters(remove_duplicate=False)).get(name)
        for streamed in self._streamed_blocks:
            for index, streamed_parameter in enumerate(streamed.parameters):
                if streamed_parameter is parameter and not self.memory.fake:
                    return streamed.value(index)
        tensor = parameter if parameter is not None else dict(self.model.named_buffers())[name]
        return tensor.detach().to("cpu", copy=True)

    def settle(self) -> None:
        """Wait until all changes are stored. Raises the TransferError of one that failed."""
        if self._streamed_blocks:
            self.turns.check_process()
        self._streamed_blocks.settle()
