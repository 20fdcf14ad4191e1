"""A training plan in force on a model and its optimizer: composes the techniques and takes steps through them.

The same code runs on fake tensors; that run is the prediction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from brim.core import Decision, Plan, Timeline
from brim.core.hardware import DISK
from brim.memory.checkpoint_writing import Layout
from brim.memory.tiers import Memory
from brim.planning.strategy import state as training_state
from brim.planning.strategy.choice import Choice
from brim.printable import Readable
from brim.techniques import precision
from brim.techniques.activation_offload import inplace as inplace_activations
from brim.techniques.activation_offload import technique as activation_offload
from brim.techniques.base import HANDLE_ATTRIBUTE, Handle
from brim.techniques.blocks import Partition
from brim.techniques.checkpointing import technique as checkpointing
from brim.techniques.loss import chunked as chunked_loss
from brim.techniques.micro_batch import MicroBatch
from brim.techniques.optimizer_offload import technique as optimizer_offload
from brim.techniques.optimizer_offload.state_blocks import BLOCK_BYTES, GPU_BLOCK_BYTES, UPDATE_PARTS
from brim.techniques.streaming import weight_streaming
from brim.techniques.streaming.weight_streaming import RESIDENT, Weights, WeightStreaming
from brim.techniques.weights import place_weights
from brim.units import format_bytes

_LEAST_UPDATE_BYTES = 64 << 10


def apply_choice(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    memory: Memory,
    partition: Partition,
    weights: Weights,
    example: Any = None,
    *,
    update_bytes: int | None = None,
    in_place: Sequence[str] | None = None,
) -> Fitted:
    """Enforce ``plan``. After a failure the model and the optimizer are as before.

    ``partition`` has the blocks of the plan's weight streaming decisions; a block without a decision is resident.
    ``example`` is an input of the model, for plans with in-place activations. ``update_bytes`` are updated at once
    (None: depends on the model's size). ``in_place``: the in-place activations found earlier for such a plan
    (None: they are searched for).
    """
    fitted = Fitted(model, optimizer, _complete(plan, partition), memory)
    try:
        fitted._apply(partition, weights, example, update_bytes, in_place)
    except BaseException:
        fitted.remove()
        raise
    return fitted


def _complete(plan: Plan, partition: Partition) -> Plan:
    choices = plan.choices(weight_streaming.NAME)
    added = tuple(
        Decision(technique=weight_streaming.NAME, block=block.name, choice=RESIDENT, bytes=block.bytes)
        for block in partition.blocks
        if block.name not in choices
    )
    return replace(plan, decisions=plan.decisions + added)


class Fitted(Readable):
    """The handle of a model that ``brim.fit`` has fitted for training.

    Attributes:
        model: The model, in place.
        optimizer: Its optimizer.
        plan: The decisions and their promise.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, memory: Memory) -> None:
        self.model, self.optimizer, self.plan, self.memory = model, optimizer, plan, memory
        self.choice = Choice.of(plan)
        self._stepping = False
        self.streaming: WeightStreaming | None = None
        self.offload: optimizer_offload.OptimizerOffload | None = None
        self.in_place: tuple[str, ...] = ()
        self._handles: list[Handle] = []

    @property
    def title(self) -> str:
        return f"{self.plan.model}, {self.summary()}"

    def summary(self) -> str:
        """Return the techniques in force and the promised peaks, in a line."""
        choice, words = self.choice, []
        if choice.in_place:
            words.append("activations in place")
        if choice.checkpointing:
            pieces = f" of {choice.block_rows} rows at once" * bool(choice.block_rows)
            words.append(f"{next(iter(choice.checkpointing.values()))} checkpointing{pieces}")
        if choice.states != "keep":
            how = ", one at a time" * choice.brief_buffer + ", updated by the GPU" * bool(choice.gpu_sixteenths)
            words.append(f"optimizer states in {choice.states}{how}")
        if choice.activations:
            words.append("activations offloaded")
        if choice.streams:
            words.append("weights streamed")
        promised = ", ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in self.plan.promise.peak_bytes.items())
        return f"{', '.join(words) or 'everything in memory'} ({promised})"

    @property
    def is_partly_updated(self) -> bool:
        """True if the current step has begun to change weights, so that it cannot be repeated."""
        return self._stepping or (self.offload is not None and self.offload.partly_updated)

    def _apply(
        self,
        partition: Partition,
        weights: Weights,
        example: Any,
        update_bytes: int | None,
        in_place: Sequence[str] | None,
    ) -> None:
        choice, model, memory = self.choice, self.model, self.memory
        self.precision = self.hold(precision.apply(model, self.optimizer, choice.precision, device=memory.device))
        self.precision.keeps_casts = not (choice.checkpointing or choice.streams)
        if choice.checkpointing:
            self.hold(checkpointing.apply(model, choice.checkpointing, rows=choice.block_rows))
        if choice.chunk_tokens:
            self.hold(chunked_loss.apply(model, choice.chunk_tokens))
        if choice.in_place:
            self.in_place = self.hold(inplace_activations.apply(model, example, in_place)).names
        self.streaming = place_weights(model, partition, self.plan, memory, weights, training=True)
        self.hold(self.streaming)
        if weights.sources and not memory.fake:  # until now the parameters had no values
            self.precision.take_weights(self.streaming.value)
        if choice.activations:
            self.hold(activation_offload.apply(model, choice.activations, memory))
        if choice.offloads_optimizer or self._streams_trained(partition):
            self.offload = optimizer_offload.apply(
                model,
                self.optimizer,
                memory,
                states=choice.states,
                gradients=choice.gradients,
                streaming=self.streaming if choice.streams else None,
                block_bytes=bytes_at_once(model, choice, update_bytes),
                brief=choice.brief_buffer,
                gpu_sixteenths=choice.gpu_sixteenths,
            )
            self.hold(self.offload)

    def _streams_trained(self, partition: Partition) -> bool:
        """True if blocks that are loaded and dropped are trained: they are updated in their slots, block by block."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        moving = [b for b in partition.blocks if self.choice.streaming.get(b.name, RESIDENT) != RESIDENT]
        return any(not trained.isdisjoint(block.tensors) for block in moving)

    def hold(self, handle: Any, *, longest: bool = False) -> Any:
        """Remove ``handle`` together with this one: before those that are held already, or after them."""
        self._handles.insert(0 if longest else len(self._handles), handle)
        return handle

    def step(self, micros: Sequence[MicroBatch], *, clip_norm: float | None = None) -> torch.Tensor:
        """Do one step of the optimizer over the micro-batches of a batch, as ``brim train`` does. Returns the batch's
        loss, 0-dimensional.
        """
        self._stepping = False
        total: torch.Tensor | None = None
        for micro in micros:
            last = micro is micros[-1]
            with self._updating() if last and clip_norm is None else contextlib.nullcontext():
                loss = self._loss(micro)
                self.precision.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        if clip_norm is not None:
            self.precision.unscale(self.optimizer)
            self.clip_grad_norm_(clip_norm)
        self._stepping = True
        self.precision.step(self.optimizer)
        self._stepping = False
        self.optimizer.zero_grad(set_to_none=True)
        assert total is not None, "a batch has one micro-batch at least"
        return total

    def evaluate(self, inputs: Any) -> torch.Tensor:
        """The loss of a micro-batch, 0-dimensional, without dropout and with nothing stored for a backward pass."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                return self._loss(MicroBatch(inputs=inputs, weight=1))
        finally:
            for module, training in modes:
                module.training = training

    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        with self.precision.forward():
            inputs = tree_map_only(torch.Tensor, lambda value: value.to(self.memory.device), micro.inputs)
            output = self.model(**inputs) if isinstance(inputs, Mapping) else self.model(*inputs)
            loss = loss_of(output)
            # A product with 1 would be an operation that plain PyTorch does not have.
            return loss if micro.weight == 1 else loss * micro.weight

    def _updating(self) -> Any:
        if self.offload is not None and self.choice.in_backward:
            return self.offload.final()
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does, over all parameters of the optimizer, wherever gradients
        are. Exact.

        PyTorch's own function works as well while gradients stay in memory.

        Args:
            max_norm: The largest norm of the gradients.
            norm_type: The kind of norm; ``inf`` is the largest absolute value.

        Returns:
            The norm before clipping, 0-dimensional.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.offload is not None:
            return self.offload.clip_grad_norm_(max_norm, norm_type, parameters=parameters)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # -- state for checkpoints

    def value(self, name: str) -> torch.Tensor:
        """The present value of a parameter or buffer, wherever it rests."""
        assert self.streaming is not None, "it is removed"
        return self.streaming.value(name)

    def states(
        self,
        names: Mapping[torch.Tensor, str],
        check: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]] = iter,
    ) -> tuple[list[Layout], Iterator[tuple[str, torch.Tensor]]]:
        """Layout of the optimizer's state tensors, and the tensors, read one at a time. ``names``: parameter ->
        name; ``check`` passes the tensors on as they are in memory, or raises."""
        wrapped = training_state.WrappedStates(self.optimizer, names)
        own = partial(training_state.optimizer_tensors, self.optimizer, names)
        read = own if self.offload is None else self.offload.iter_state
        layout = [(name, value.dtype, tuple(value.shape)) for name, value in wrapped.packed(read(values=False))]
        return layout, wrapped.packed(check(read()))

    def load_states(
        self,
        names: Mapping[torch.Tensor, str],
        numbers: Mapping[str, Any],
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Restore the results of ``states`` and ``training_state.optimizer_numbers``."""
        load = None if self.offload is None else self.offload.load_state
        training_state.restore_optimizer(self.optimizer, names, numbers, tensors, load)

    def timeline(self) -> Timeline:
        """Memory events since the model was fitted. The fact ``held_bytes.disk`` is the peak of the scratch file."""
        assert self.streaming is not None, "it is removed"
        timeline = self.streaming.timeline()
        timeline.facts[f"held_bytes.{DISK}"] = self.memory.disk_peak_bytes
        return timeline

    def close(self) -> None:
        """Stop moving and close the files; model and optimizer cannot be used afterwards."""
        self.precision.close()
        if self.offload is not None:
            self.offload.close()  # before the memory of its updates
        self.memory.close()

    def remove(self) -> None:
        """Restore model and optimizer with everything in memory, as if they had never been fitted. A second call does
        nothing.
        """
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        for owner in (self.model, self.optimizer):
            if vars(owner).get(HANDLE_ATTRIBUTE) is self:
                del vars(owner)[HANDLE_ATTRIBUTE]


def bytes_at_once(model: nn.Module, choice: Choice, update_bytes: int | None = None) -> int:
    """Bytes updated at once: ``update_bytes`` or ``part_bytes`` of the model, within bounds."""
    most = GPU_BLOCK_BYTES if choice.gpu_sixteenths else BLOCK_BYTES
    return min(most, part_bytes(model) if update_bytes is None else update_bytes)


def part_bytes(model: nn.Module) -> int:
    """A sixteenth of the trained bytes, as three such parts pass through a buffer."""
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return max(_LEAST_UPDATE_BYTES, trained // UPDATE_PARTS)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output; without one, a stand-in that gives all outputs gradients."""
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else output
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else next(iter(values))
    return first if first.dim() == 0 else first.float().mean()
