"""Pipelining: a model cut into stages of consecutive layers, each on ranks of its own.

Huang et al., arXiv 1811.06965; Narayanan et al., arXiv 2104.04473. A stage is the model itself with the other layers
left out: the first has the embedding, the last the head and the loss. ``torch.distributed.pipelining`` runs them; a
prediction runs one stage's forward and backward on fake tensors, in the same way.

A zero-bubble pipeline (Qi et al., arXiv 2401.10241) works out the gradients of a stage's weights later than those of
what came in, where a rank would wait: the same graph is gone through twice, and kept until the second time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel.context_parallel import Context
from brim.techniques.parallel.tensor_parts import is_norm

_OF_LAYERS = re.compile("layer|block")  # as configurations name what they have one of for each layer


@dataclass(frozen=True, kw_only=True)
class Part:
    """Layers ``[first, first + layers)`` of ``of`` in all."""

    first: int
    layers: int
    of: int

    @property
    def embeds(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.first + self.layers == self.of


def cut(model: Any, part: Part, kept: Sequence[int] | None = None) -> Stage:
    """``model`` (transformers' causal language model) with the layers of ``part`` only, in place; of these with those
    at the places ``kept`` (None: all), for a shallower stage of the same kinds of layers.

    Raises UsageError for layers that it does not have, UnsupportedError where its one list of layers is not found.
    """
    stack, path = stack_of(model)
    if part.of != len(stack) or part.layers < 1 or part.first < 0 or part.first + part.layers > part.of:
        raise UsageError(
            f"Cannot take layers {part.first} to {part.first + part.layers - 1} of {part.of}.",
            f"{type(model).__name__} has {len(stack)} layers.",
        )
    inner = model.get_submodule(path.rpartition(".")[0])
    _keep(stack, inner, [part.first + place for place in (range(part.layers) if kept is None else kept)])
    stage = Stage(model, inner, part)
    if not part.has_head:
        _leave_out_head(model, inner, stack, stage.progress)
    if not part.embeds:
        _leave_out_embedding(inner, stack, stage.progress, has_head=part.has_head)
    inner.register_forward_pre_hook(stage.begin)
    stack[0].register_forward_pre_hook(stage.come_in, with_kwargs=True)
    stack[-1].register_forward_hook(stage.go_out)
    return stage


@dataclass
class Progress:
    """How far a decoder's forward pass is: before its layers, at them, or behind them."""

    place: Literal["before", "at", "behind"] = "before"


class Stage(nn.Module):
    """One stage. The first takes ``input_ids``, the others hidden states; the last gives the loss, the others hidden
    states. ``tokens_over``: a mesh that the tokens of hidden states are split over. ``context``: what cuts this
    rank's part out of each sequence."""

    def __init__(self, model: nn.Module, inner: nn.Module, part: Part) -> None:
        super().__init__()
        self.model, self.part = model, part
        self._inner = [inner]  # a part of ``model``: not a second child
        self.tokens_over: DeviceMesh | None = None
        self.context: Context | None = None
        self.progress = Progress()
        self._came_in: torch.Tensor | None = None
        self._goes_out: list[torch.Tensor] | None = None

    def begin(self, inner: nn.Module, args: Any) -> None:
        """A hook for the decoder."""
        self.progress.place = "before"

    def come_in(self, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A hook for the first layer: it gets what came in as it came. Decoders scale embeddings, or add to them,
        wherever these are from."""
        self.progress.place = "at"
        came_in, self._came_in = self._came_in, None
        if came_in is None:  # tokens, or somebody else calls, who sends by other ways
            return None
        alike = [
            tensor
            for tensor in (*args, *named.values())
            if isinstance(tensor, torch.Tensor) and tensor.shape == came_in.shape
        ]
        hidden = args[0] if args else named.get("hidden_states")
        if len(alike) != 1 or alike[0] is not hidden:
            raise UnsupportedError(
                f"Cannot cut {type(self.model).__name__} into stages.",
                "Its layers take other inputs than hidden states.",
            )
        if args:
            return (came_in, *args[1:]), named
        return args, {**named, "hidden_states": came_in}

    def go_out(self, layer: nn.Module, args: Any, output: Any) -> None:
        """A hook for the last layer: what it gives goes out, whatever the decoder does to it then."""
        self.progress.place = "behind"
        if self._goes_out is not None:
            self._goes_out.append(output[0] if isinstance(output, tuple) else output)

    @property
    def inner(self) -> nn.Module:
        """The decoder: embedding, layers and last norm, without the output layer."""
        return self._inner[0]

    def forward(self, given: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        context, named = self.context, dict[str, torch.Tensor]()
        if context is not None and self.part.embeds:
            given = context.own(given)
        if self.tokens_over is not None and not self.part.embeds:
            given = DTensor.from_local(given, self.tokens_over, [Shard(1)], run_check=False)
        if self.part.embeds:
            named["input_ids"] = given
        else:
            self._came_in, named["inputs_embeds"] = given, _shaped_like(given)
        if context is not None:
            named["position_ids"] = context.positions(given.shape[1], given.device)
        if self.part.has_head:
            assert labels is not None, "the last stage gives the loss"
            if context is not None:
                labels = named["shift_labels"] = context.following(labels)
            loss: torch.Tensor = self.model(**named, labels=labels, use_cache=False).loss
            return loss
        self._goes_out = []
        self._inner[0](**named, use_cache=False)
        (hidden,), self._goes_out = self._goes_out, None
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden


class InputHalf:
    """A backward pass up to what came in, as PyTorch's stages take it (torch/distributed/pipelining/stage.py,
    backward_one_chunk and backward_weight_one_chunk). ``finish`` works out the gradients of weights.

    A stage to which nothing comes in that has a gradient does all of it there. ``gradient``: of the output; None of
    a loss.
    """

    def __init__(
        self, stage: nn.Module, given: torch.Tensor, output: torch.Tensor, gradient: torch.Tensor | None
    ) -> None:
        self._stage, self._given, self._output, self._gradient = stage, given, output, gradient
        self._groups: list[dict[str, Any]] | None = None
        if given.requires_grad:
            gradients = None if gradient is None else [gradient]
            _, self._groups = stage_backward_input([output], gradients, [given], stage.parameters())

    def finish(self) -> None:
        if self._groups is None:
            stage_backward((self._output,), (self._gradient,), (self._given,))
        else:
            stage_backward_weight(self._stage.parameters(), self._groups)


def check_halves(checkpointing: str | None) -> None:
    """Raise UnsupportedError for what would be computed again for each half, and each weight, of a backward pass."""
    if checkpointing not in (None, "none"):
        raise UnsupportedError(
            f"Cannot use --zero-bubble with --checkpointing {checkpointing}.",
            "Each of its two backward passes would run the forward pass again.",
            "Leave one of them out.",
        )


def tied_table(model: Any) -> nn.Parameter | None:
    """The weight that is a model's embedding and its output layer, where it has one."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return table.weight if table is not None and head is not None and head.weight is table.weight else None


class TiedWeight:
    """A weight that the first stage has as its embedding and the last one as its output layer.

    Both copies get the sum of both gradients (megatron/core/distributed/finalize_model_grads.py), so they stay one.
    ``exchange`` sends this rank's gradient to the other's rank and fills the second tensor with what comes from
    there; in a prediction it does nothing.
    """

    def __init__(
        self, weight: nn.Parameter, exchange: Callable[[torch.Tensor, torch.Tensor], None] = lambda own, other: None
    ) -> None:
        self.weight, self._exchange = weight, exchange

    def add(self) -> None:
        """To be called once all gradients of a step are there."""
        gradient = self.weight.grad
        assert gradient is not None, "a step without a gradient of the embedding"
        if isinstance(gradient, DTensor) and isinstance(self.weight, DTensor):  # an embedding's may be whole
            gradient = gradient.redistribute(placements=self.weight.placements)
            self.weight.grad = gradient
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(own)
        self._exchange(own, other)
        own.add_(other)


def stack_of(model: nn.Module) -> tuple[nn.ModuleList, str]:
    """A model's list of layers and the path of its first. UnsupportedError: it has none or several."""
    parents = {path.rpartition(".")[0] for path in blocks(model)}
    lists = [(model.get_submodule(path), path) for path in parents]
    stacks = [(module, path) for module, path in lists if isinstance(module, nn.ModuleList)]
    if len(stacks) != 1 or len(lists) != 1:
        raise UnsupportedError(
            f"Cannot cut {type(model).__name__} into stages.", f"It has {len(stacks)} lists of layers, not one."
        )
    return stacks[0]


def _keep(stack: nn.ModuleList, inner: Any, kept: Sequence[int]) -> None:
    """Only those layers, and a configuration of the decoder's own whose lists of layers have only their entries.

    The decoder looks up what kind a layer is, and so the mask that it gets, by the layer's place in the stack.
    """
    of = len(stack)
    if len(kept) == of:
        return
    for place in sorted(set(range(of)) - set(kept), reverse=True):
        del stack[place]
    if getattr(inner, "config", None) is None:
        return
    config = inner.config = copy.deepcopy(inner.config)
    stored = vars(config)
    own = {name: type(value)(value[place] for place in kept) for name, value in of_layers(config, of)}
    stored |= {name: value for name, value in own.items() if name in stored}
    computed = {name: value for name, value in own.items() if name not in stored}
    if computed:
        config.__class__ = type(type(config).__name__, (type(config),), computed)


def of_layers(config: Any, layers: int) -> Iterator[tuple[str, Any]]:
    """What a configuration has one of for each layer, stored or worked out from its other settings."""
    kind = type(config)
    names = {*vars(config), *(name for name in dir(kind) if isinstance(getattr(kind, name), property))}
    for name in sorted(filter(_OF_LAYERS.search, names)):
        value = getattr(config, name)
        if isinstance(value, (list, tuple)) and len(value) == layers:
            yield name, value


def _leave_out_head(model: Any, inner: nn.Module, stack: nn.ModuleList, progress: Progress) -> None:
    """No last norm, and nothing of the model beside its decoder; a tied weight stays with the embedding."""
    name = _last_norm(inner, stack)
    if name is not None:
        setattr(inner, name, _Left(progress, "behind"))
    for name, child in list(model.named_children()):
        if all(part is not inner for part in child.modules()):
            delattr(model, name)


def _leave_out_embedding(inner: nn.Module, stack: nn.ModuleList, progress: Progress, *, has_head: bool) -> None:
    """Hidden states come in: what makes them of tokens, and its norm and its dropout, is left out."""
    stays = _last_norm(inner, stack) if has_head else None
    for name, child in list(inner.named_children()):
        embeds = any(isinstance(part, nn.Embedding) for part in child.modules())
        if child is stack or name == stays:
            continue
        if isinstance(child, nn.Embedding):
            setattr(inner, name, _Nothing())
        elif embeds or is_norm(child) or isinstance(child, nn.Dropout):
            setattr(inner, name, _Left(progress, "before"))


def _last_norm(inner: nn.Module, stack: nn.ModuleList) -> str | None:
    """By its name, and by its place among the decoder's parts; where that is wrong, ``_Left`` finds out."""
    norms = [name for name, child in inner.named_children() if child is not stack and is_norm(child)]
    return next(reversed([name for name in norms if "emb" not in name] or norms), None)


def _shaped_like(hidden: torch.Tensor) -> torch.Tensor:
    """To be given for embeddings, whose shape, dtype and device are looked at: without memory, and not what came in,
    as some decoders scale embeddings in place."""
    return hidden.detach() if isinstance(hidden, DTensor) else hidden.new_zeros(()).expand(hidden.shape)


class _Left(nn.Module):
    """In the place of what is done to hidden states on another stage, before the layers or behind them.

    Raises UnsupportedError where it is called at another moment: it does something else, too.
    """

    def __init__(self, progress: Progress, place: str) -> None:
        super().__init__()
        self._progress, self._place = progress, place

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        if self._progress.place != self._place:
            raise UnsupportedError(
                "Cannot cut a model into stages.",
                f"A part of its decoder seems to be {self._place} its layers, but runs at another time.",
                "Use --zero or --tp.",
            )
        tensors = (
            tensor
            for tensor in (*args, *named.values())
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        )
        return next(tensors)


class _Nothing(nn.Module):
    """In the place of a table of positions that an earlier stage has added."""

    def forward(self, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros((), device=positions.device, dtype=torch.get_default_dtype())


def parts(layers: Sequence[int]) -> list[Part]:
    """Consecutive parts of so many layers each."""
    stages, first = [], 0
    for count in layers:
        stages.append(Part(first=first, layers=count, of=sum(layers)))
        first += count
    return stages
