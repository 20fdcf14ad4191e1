"""Weight streaming: some blocks stay in the compute tier, the others pass through a small ring of slots.

Under a cyclic access pattern a pager (LRU) misses every block; the optimum keeps a fixed set and streams the rest
(Belady, 1966). Residents are spread evenly, so that the link has compute to hide behind all along the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from brim.core import Plan, Timeline
from brim.core.hardware import RAM
from brim.errors import UnsupportedError
from brim.memory.checkpoint_files import TensorSource
from brim.memory.layout import file_layout, packed_layout
from brim.memory.pool import Buffer
from brim.memory.tiers import DiskHome, Home, Memory, RamHome, Staging
from brim.techniques.base import refuse_second
from brim.techniques.blocks import Block, Partition, tensor_bytes
from brim.techniques.guards import Guards
from brim.techniques.ring import Ring

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
        handle.remove()
        raise
    return handle


@dataclass
class _Streamed:
    """A block that comes and goes."""

    index: int
    block: Block
    parameters: list[nn.Parameter]
    home: Home
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by slot address
    versions: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    uses: int = 0
    verified: bool = False


class WeightStreaming:
    """The handle of a fitted module."""

    def __init__(self, model: nn.Module, plan: Plan, memory: Memory, weights: Weights) -> None:
        self.model, self.plan, self.memory = model, plan, memory
        self._weights = weights
        self._parameters = dict(model.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._originals = {name: p.data for name, p in self._parameters.items()} if memory.fake else {}
        self._streamed: list[_Streamed] = []
        self._buffers: list[Buffer] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
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
        """What memory did since the module was fitted."""
        return self.memory.recorder.timeline

    def close(self) -> None:
        """Stop moving and end every thread. The module cannot be called any more; ``remove`` still works."""
        self.memory.engine.close()

    def remove(self) -> None:
        """Give the module back with all its parameters in memory, as it was before. A second call does nothing.

        Raises nothing for want of budget: the parameters come back whether they fit or not.
        """
        if self._removed:
            return
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        self._guards.remove()
        self.memory.engine.close()
        self._bring_back()
        for buffer in self._buffers:
            buffer.free()
        self.memory.close()

    def _bring_back(self) -> None:
        for streamed in self._streamed:
            self._adopt_changes(streamed)
            values: Iterable[torch.Tensor] = streamed.home.values()
            if self.memory.fake:
                values = [self._originals[name] for name in streamed.block.tensors]
            for parameter, value in zip(streamed.parameters, values, strict=True):
                parameter.data = value
            if isinstance(streamed.home, RamHome):
                streamed.home.free()
        self._streamed.clear()

    # -- placing

    def _place(self, partition: Partition) -> None:
        choices = self.plan.choices(NAME)
        staging = self._staging(partition, choices)
        self._keep_loose(partition)
        pending = [self._keep(b) for b in partition.blocks if choices[b.name] == RESIDENT]
        for block in partition.blocks:
            if choices[block.name] != RESIDENT:
                self._stream(block, choices[block.name])
        for finish in pending:
            finish()
        if self._passing is not None:
            self._passing.free()
        if self._streamed:
            self._make_ring()
            self._install()
        if staging is not None:
            staging.attach([s.home for s in self._streamed if isinstance(s.home, DiskHome)])
        self._guards.install([trigger for s in self._streamed for trigger in s.block.triggers])

    def _staging(self, partition: Partition, choices: Mapping[str, str]) -> Staging | None:
        """RAM slots between disk and VRAM; none where RAM itself is the compute tier."""
        host = self.memory.host
        if host is None or not any(choice == FROM_DISK for choice in choices.values()):
            return None
        sources = self._weights.sources
        size = max(
            packed_layout([self._source(n, sources) for n in b.tensors]).bytes
            for b in partition.blocks
            if choices[b.name] == FROM_DISK
        )
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
        if self.memory.host is None or all(p.device.type == self.memory.device.type == "cuda" for p in parameters):
            self._buffers.append(self.memory.compute.account(sum(tensor_bytes(p) for p in parameters), label))
            return
        layout = packed_layout([self._source(self._names[id(p)], {}) for p in parameters])
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
            if not self._weights.sources and not self.memory.fake:
                sources = list(self.memory.scratch().store(sources, [p.data for p in parameters]))
            home = DiskHome(self.memory, sources)
        streamed = _Streamed(index=len(self._streamed), block=block, parameters=parameters, home=home)
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
        by_trigger: dict[str, list[_Streamed]] = {}
        for streamed in self._streamed:
            for trigger in self._loads_for(streamed.block):
                by_trigger.setdefault(trigger, []).append(streamed)
            if self.memory.device.type != "cpu":
                for trigger in streamed.block.lookups:
                    self._guards.look_up(self.model.get_submodule(trigger), streamed.home, self.memory.device)
        for trigger, held in by_trigger.items():
            module = self.model.get_submodule(trigger)
            enter = torch.compiler.disable(_Enter(self, held))
            leave = torch.compiler.disable(_Leave(self, held))
            # Ours first and last, so that the user's own hooks see the weights in place.
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def _enter(self, streamed: _Streamed) -> None:
        streamed.uses += 1
        if streamed.uses > 1:
            return
        assert self._ring is not None
        try:
            self._adopt_changes(streamed)
            slot = self._ring.acquire(streamed.index)
            views = streamed.views.get(id(slot))
            if views is None:
                views = streamed.views[id(slot)] = streamed.home.layout.views(slot.tensor)
            if not streamed.verified:
                self._verify(streamed.block.tensors, views)
                streamed.verified = True
        except BaseException:
            streamed.uses = 0
            raise
        self._bind(streamed, views)

    def _leave(self, streamed: _Streamed) -> None:
        if streamed.uses == 0:
            return  # entering failed
        streamed.uses -= 1
        if streamed.uses:
            return
        assert self._ring is not None
        changed = [p._version for p in streamed.parameters] != streamed.versions
        if changed:
            streamed.home.write_back([p.data for p in streamed.parameters])
        self._rest(streamed)
        self._ring.release(streamed.index)
        if changed:
            self._ring.forget()

    def _bind(self, streamed: _Streamed, views: Sequence[torch.Tensor]) -> None:
        for parameter, view in zip(streamed.parameters, views, strict=True):
            parameter.data = view
        streamed.versions = [p._version for p in streamed.parameters]

    def _rest(self, streamed: _Streamed) -> None:
        """Point the parameters to where the block rests."""
        if self.memory.fake:
            return
        on_device = self.memory.device.type != "cpu"
        for parameter, view in zip(streamed.parameters, streamed.home.rest(), strict=True):
            # On another device a view of RAM would make the module look as if it were on the CPU.
            parameter.data = _unreadable(parameter, self.memory.device) if view is None or on_device else view
        streamed.versions = [p._version for p in streamed.parameters]
        streamed.addresses = [p.data_ptr() for p in streamed.parameters]

    def _adopt_changes(self, streamed: _Streamed) -> None:
        """The user wrote to parameters at rest (an in-place change, ``p.data = ...``): make it the block's value."""
        if self.memory.fake or streamed.uses > 1:
            return
        versions = [p._version for p in streamed.parameters]
        addresses = [p.data_ptr() for p in streamed.parameters]
        if versions == streamed.versions and addresses == streamed.addresses:
            return
        held = streamed.home.values()
        same = [
            v == w and a == b
            for v, w, a, b in zip(versions, streamed.versions, addresses, streamed.addresses, strict=True)
        ]
        streamed.home.write_back(
            [value if kept else p.data for value, kept, p in zip(held, same, streamed.parameters, strict=True)]
        )
        streamed.views.clear()
        self._rest(streamed)
        if self._ring is not None:
            self._ring.forget()


def _unreadable(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Stands for values that are not there: the right shape and device, no memory, and NaN to whoever reads it."""
    with torch.inference_mode(False):
        filler = float("nan") if parameter.dtype.is_floating_point else 0
        return torch.full((), filler, dtype=parameter.dtype, device=device).expand(parameter.shape)


class _Enter:
    """The forward pre-hook of a trigger."""

    def __init__(self, handle: WeightStreaming, held: list[_Streamed]) -> None:
        self._handle, self._held = handle, held

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if torch.is_grad_enabled():
            _refuse_gradients(module, self._held, args, kwargs)
        for streamed in self._held:
            self._handle._enter(streamed)


class _Leave:
    """The forward hook of a trigger; also called when its forward raised."""

    def __init__(self, handle: WeightStreaming, held: list[_Streamed]) -> None:
        self._handle, self._held = handle, held

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        for streamed in reversed(self._held):
            self._handle._leave(streamed)


def _refuse_gradients(
    module: nn.Module, held: list[_Streamed], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Autograd would keep a slot's bytes for backward, and they are another block's by then."""
    tensors = [*args, *kwargs.values(), *module.parameters()]
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"Gradients were to be computed through {held[0].block.name}, whose weights are streamed.",
            "This handle streams for inference only.",
            "Run the model under torch.no_grad(), or give a budget that holds it whole.",
        )
