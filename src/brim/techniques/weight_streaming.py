"""Weight streaming: some blocks stay in the compute tier, the others pass through a small ring of slots.

Under a cyclic access pattern a pager (LRU) misses every block; the optimum keeps a fixed set and streams the rest
(Belady, 1966). Residents are spread evenly, so that the link has compute to hide behind all along the step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from brim.core import Plan, Timeline
from brim.core.hardware import DISK
from brim.memory.homes import DiskHome, RamHome
from brim.memory.tiers import Memory
from brim.techniques.base import refuse_second
from brim.techniques.blocks import Block, Partition
from brim.techniques.experts import CachedExperts, ListedExperts, expert_layers, passing_sources
from brim.techniques.experts_home import ExpertsHome
from brim.techniques.guards import Guards
from brim.techniques.hooks import Recover, Turns, Visit, note_steps, watch_lookup
from brim.techniques.host_compute import HostCompute
from brim.techniques.offloaded_parameter import reveal
from brim.techniques.placement import (
    COMPUTE_RAM,
    FROM_DISK,
    FROM_RAM,
    NAME,
    RESIDENT,
    STAGING_SLOTS,
    Placement,
    Weights,
    loads_for,
    options,
)
from brim.techniques.recall import Recall
from brim.techniques.ring import Ring
from brim.techniques.streamed import Streamed
from brim.techniques.updating import updating

__all__ = ["COMPUTE_RAM", "FROM_DISK", "FROM_RAM", "NAME", "RESIDENT", "RING_SLOTS", "STAGING_SLOTS", "Weights"]
__all__ += ["WeightStreaming", "apply", "options"]

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
    """The handle of a fitted module. ``blocks``: all parameters, by the name of what comes and goes together.

    ``partition`` and ``weights`` are what it was applied with. Several threads may call the module: their calls take
    ``turns``.
    """

    partition: Partition

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights, *, training: bool) -> None:
        self.model, self.plan, self.memory, self.weights = model, plan, memory, weights
        self.blocks: list[tuple[str, list[nn.Parameter]]] = []
        self._parameters = dict(model.named_parameters())
        # Where nothing has been moved out of the module, its own tensors are what it gets back.
        self._hollow = memory.fake or bool(weights.sources)
        self._originals = {name: p.data for name, p in self._parameters.items()} if self._hollow else {}
        self._devices = {name: p.device for name, p in self._parameters.items()}
        self._streamed: list[Streamed] = []
        self._hooks: list[Visit | torch.utils.hooks.RemovableHandle] = []
        self._guards = Guards(self)
        self.turns = Turns(model)
        self._placement = Placement(model, plan, memory, weights, self._guards)
        self._recall = Recall(self) if training else None
        self._ring: Ring | None = None
        self._host: HostCompute | None = None
        self._experts: CachedExperts | None = None
        self._brought_home: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._removed = False

    # -- what a user reads

    @property
    def misses(self) -> int:
        """Loads that compute had to wait for from their start: the order was not foreseen."""
        return self._ring.misses if self._ring is not None else 0

    def timeline(self) -> Timeline:
        """What memory did since the module was fitted.

        Its facts have, per tier, ``budget_bytes``, ``promised_bytes`` (the program's share and activations included)
        and ``held_bytes`` (the pool's peak); per way ``copied_bytes``; and ``misses``. With cached experts also
        ``expert_hits`` and ``expert_loads``.
        """
        made, recorder = self.memory.recorder.timeline, self.memory.recorder
        made.facts |= {f"budget_bytes.{tier}": count for tier, count in self.plan.budget_bytes.items()}
        made.facts |= {f"promised_bytes.{tier}": count for tier, count in self.plan.promise.peak_bytes.items()}
        pools = [self.memory.compute, *([self.memory.host] if self.memory.host else [])]
        made.facts |= {f"held_bytes.{pool.tier}": pool.peak_bytes for pool in pools}
        made.facts |= {f"copied_bytes.{way[0]}.{way[1]}": count for way, count in recorder.copied_bytes.items()}
        made.facts["misses"] = self.misses
        made.facts |= {} if self._experts is None else self._experts.facts()
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
        if self._streamed:
            self.turns.check_process()
        with self.turns.lock, torch.inference_mode(False):
            self._let_go()
            self.settle()
            read = {s.index: self._values(s) for s in self._streamed if s.home.tier == DISK}
            self._end(lambda s: read.pop(s.index, None) or self._values(s))

    def _undo(self) -> None:
        """Leave the module as ``apply`` found it."""
        if not self._hollow:
            self.remove()
            return
        self._end(lambda streamed: [self._originals[name] for name in streamed.block.tensors])
        for name, parameter in self._parameters.items():
            reveal(parameter, self._originals[name])

    def _end(self, values_of: Callable[[Streamed], Sequence[torch.Tensor]]) -> None:
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        self._guards.remove()
        self.memory.engine.close()
        for streamed in self._streamed:
            values = zip(streamed.parameters, streamed.block.tensors, values_of(streamed), strict=True)
            for parameter, name, value in values:
                reveal(parameter, value.to(self._devices[name]))
            if isinstance(streamed.home, (RamHome, ExpertsHome)):
                streamed.home.free()
        self._streamed.clear()
        if self._host is not None:
            self._host.free()
        for buffer in self._placement.buffers:
            buffer.free()
        self.memory.close()

    def _values(self, streamed: Streamed) -> list[torch.Tensor]:
        """The block's tensors as they are now, in memory of their own."""
        if self.memory.fake:
            return [self._originals[name] for name in streamed.block.tensors]
        return streamed.values()

    # -- placing

    def _place(self, partition: Partition) -> None:
        choices, placement, self.partition = self.plan.choices(NAME), self._placement, partition
        passing = [b for b in partition.blocks if choices[b.name] == FROM_DISK and self._moves(b)]
        layers = expert_layers(self.model, self.plan)
        staging = placement.make_staging(passing, passing_sources(layers, self.plan, placement.source))
        if COMPUTE_RAM in choices.values():
            self._host = HostCompute(self, partition)
        placement.keep_loose(partition)
        self._list_blocks(partition)
        leaving = [block for block in partition.blocks if choices[block.name] != RESIDENT]
        crowding = [block for block in leaving if self._crowds(block)]
        for block in crowding:  # or the compute tier would hold them beside the residents for a moment
            self._stream(block, choices[block.name])
        for block in partition.blocks:
            if choices[block.name] == RESIDENT:
                placement.keep(block)
        placement.all_kept()
        for block in leaving:
            if block not in crowding:
                self._stream(block, choices[block.name])
        if layers:
            self._experts = CachedExperts(self)
            for streamed in self._experts.place(layers):
                self._streamed.append(streamed)
                streamed.rest()
        placement.finish()
        for streamed in self._streamed:
            streamed.on_write = self._adopt_changes
        if self._streamed:
            self._make_ring()
            self._install()
        if staging is not None:
            staging.attach([s.home for s in self._streamed if isinstance(s.home, DiskHome)])
        self._guards.install([trigger for s in self._streamed for trigger in s.block.triggers])
        self.memory.give_back()

    def _list_blocks(self, partition: Partition) -> None:
        groups = [(block.name, block.tensors) for block in partition.blocks]
        groups += [("outside blocks", partition.loose)] if partition.loose else []
        self.blocks = [(name, [self._parameters[tensor] for tensor in tensors]) for name, tensors in groups]

    def _moves(self, block: Block) -> bool:
        """Whether the block ever comes to the compute tier: also to be updated there."""
        trained = self._recall is not None and any(self._parameters[name].requires_grad for name in block.tensors)
        return bool(loads_for(block)) or trained

    def _crowds(self, block: Block) -> bool:
        """Whether the module has the block in VRAM, which it is to leave."""
        memory = self.memory
        values = [self._parameters[name] for name in block.tensors]
        return memory.device.type == "cuda" and not memory.fake and any(memory.is_compute(p.device) for p in values)

    def _stream(self, block: Block, choice: str) -> None:
        parameters, home = [self._parameters[name] for name in block.tensors], self._placement.home(block, choice)
        device = self.memory.device
        apart = device.type != "cpu"
        streamed = Streamed(len(self._streamed), block, parameters, home, device, apart, self.memory.fake)
        self._streamed.append(streamed)
        streamed.rest()
        if choice == COMPUTE_RAM:
            assert self._host is not None
            self._host.take(streamed)

    def _passes(self, streamed: Streamed) -> bool:
        """Whether the block comes through the ring when its modules are called."""
        apart = (part is not None and part.has(streamed) for part in (self._host, self._experts))
        return bool(loads_for(streamed.block)) and not any(apart)

    def _listed(self, streamed: Streamed) -> ListedExperts | None:
        return None if self._experts is None else self._experts.carrier(streamed)

    def _carrier(self, streamed: Streamed) -> Ring | ListedExperts:
        """What brings the block when its modules are called."""
        carrier = self._listed(streamed) or self._ring
        assert carrier is not None
        return carrier

    def _make_ring(self) -> None:
        homes = {s.index: s.home for s in self._streamed if self._passes(s) and not self._listed(s)}
        if not homes:
            return
        size = max(home.layout.bytes for home in homes.values())
        count = self.plan.settings[RING_SLOTS]
        slots = self.memory.compute.allocate_row(size, [f"ring slot {i}" for i in range(count)])
        self._placement.buffers += slots
        self._ring = Ring(self.memory, homes, {s.index: s.block.name for s in self._streamed}, slots)
        self._ring.prefetch()

    # -- coming and going

    def _install(self) -> None:
        by_trigger: dict[str, list[Streamed]] = {}
        for streamed in self._streamed:
            for trigger in loads_for(streamed.block) if self._passes(streamed) else []:
                by_trigger.setdefault(trigger, []).append(streamed)
            for trigger in streamed.block.lookups:
                watch_lookup(self, self.model.get_submodule(trigger), streamed)
        for trigger, held in by_trigger.items():
            visit = Visit(self, held, self.model.get_submodule(trigger))
            self._hooks.append(visit)
            if self._recall is not None:
                self._guards.replace(self.model.get_submodule(trigger), "_call_impl", visit.guarded_call())
        if self._recall is not None:
            noting = note_steps({id(p) for s in self._streamed for p in s.parameters}, self._brought_home)
            self._hooks.append(noting)
            weakref.finalize(self, noting.remove)  # of all optimizers: it must not outlive the handle
        for part in (self._host, self._experts):
            if part is not None:
                part.install()
        if "" not in by_trigger:  # there the visit itself sees to it
            recover = torch.compiler.disable(Recover(self))
            self._hooks.append(self.model.register_forward_pre_hook(recover, prepend=True))
        if not self.memory.fake:
            self._guards.replace(self.model, "_call_impl", self.turns.taking(self.model._call_impl))

    def _begin_step(self) -> None:
        """The whole model is called."""
        if self._recall is not None and torch._C._current_graph_task_id() != -1:
            return  # backward repeats it (checkpointing): what is in use stays in use
        self._let_go()
        if self._recall is not None:  # once for all: an optimizer changes every block
            for streamed in self._streamed:
                self._adopt_changes(streamed)

    def _let_go(self) -> None:
        """Nothing is running: what still counts as in use was interrupted."""
        if self._recall is not None:
            self._recall.let_go()
        for streamed in self._streamed:
            if streamed.uses:
                if streamed.is_changed():  # after the interrupt, before this
                    streamed.home.write_back([p.data for p in streamed.parameters])
                streamed.uses = 0
                streamed.rest()
        if self._experts is not None:
            self._experts.begin_step()
        if self._ring is not None:
            self._ring.let_go()

    def _enter(self, streamed: Streamed) -> None:
        if streamed.uses:
            streamed.uses += 1
            return
        carrier = self._carrier(streamed)
        self._adopt_changes(streamed)
        streamed.uses = 1
        try:
            slot = carrier.acquire(streamed.index)
        except BaseException:
            streamed.uses = 0
            raise
        try:
            views = streamed.views.get(id(slot))
            if views is None:
                views = streamed.views[id(slot)] = streamed.home.layout.views(slot.tensor)
            if not streamed.verified:
                self._placement.verify(streamed.block.tensors, views)
                streamed.verified = True
            streamed.bind(views)
        except BaseException:
            streamed.uses = 0
            carrier.release(streamed.index)
            raise

    def _leave(self, streamed: Streamed, *, settle: bool = False) -> None:
        """What was changed may still be on its way when this returns, unless ``settle`` is asked."""
        if streamed.uses == 0:
            return  # entering failed
        streamed.uses -= 1
        if streamed.uses:
            return
        carrier = self._carrier(streamed)
        saved = changed = streamed.is_changed()
        try:
            if changed:
                saved = False
                self._save(streamed)
                if settle:  # whoever reads or writes the parameters next does so where they rest
                    streamed.home.settle()
                saved = True
        finally:  # a full scratch disk loses the change, not the slot
            streamed.rest()
            carrier.release(streamed.index)
            if changed and not saved:
                carrier.forget({streamed.index})

    def _save(self, streamed: Streamed) -> None:
        """What the user changed while the block was in use becomes its values."""
        if self._recall is None:
            streamed.home.write_back([p.data for p in streamed.parameters])
        else:
            assert self._ring is not None
            self._ring.save(streamed.index)

    def _adopt_changes(self, streamed: Streamed) -> None:
        if not streamed.uses and streamed.adopt_changes():
            if self._ring is not None:
                self._ring.forget({streamed.index})
            if self._experts is not None:
                self._experts.forget(streamed)

    # -- changing

    def updating(self, what: str | Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """Within, a block (named as in ``blocks``), or these parameters, have their values in the compute tier.

        What is trained of it goes back to where the block rests, beside whatever comes next; ``settle`` waits for
        it. As many blocks as the ring has slots can be in use at once. Raises UsageError for what is not the
        model's, BudgetError where a table that is only looked up from finds no room.
        """
        return updating(self, what)

    def is_updated_by(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """From now on steps of ``optimizer`` change these parameters within ``updating`` and nowhere else."""
        self._brought_home[optimizer] = {id(parameter) for parameter in parameters}

    def value(self, name: str) -> torch.Tensor:
        """A parameter or buffer as it is now, wherever it rests, on the CPU and in memory of its own.

        Raises KeyError for a name that the model has not, TransferError when the disk does not give it.
        """
        parameter = self._parameters.get(name)
        if parameter is None:  # a tied one by another of its names
            parameter = dict(self.model.named_parameters(remove_duplicate=False)).get(name)
        for streamed in self._streamed:
            for index, held in enumerate(streamed.parameters):
                if held is parameter and not self.memory.fake:
                    return streamed.value(index)
        found = parameter if parameter is not None else dict(self.model.named_buffers())[name]
        return found.detach().to("cpu", copy=True)

    def settle(self) -> None:
        """Wait until everything that was changed is where it rests. Raises the TransferError that was met."""
        if self._streamed:
            self.turns.check_process()
        for streamed in self._streamed:
            streamed.home.settle()
