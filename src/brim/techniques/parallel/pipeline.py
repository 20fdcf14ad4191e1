"""Pipelining: a model cut into stages of consecutive layers, each on its own ranks.

Huang et al., arXiv 1811.06965; Narayanan et al., arXiv 2104.04473. A stage is the model without the other layers: the
first has the embedding, the last the head and the loss. ``torch.distributed.pipelining`` runs them; a prediction runs
a stage's forward and backward on fake tensors, in the same way.
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
from torch.distributed.tensor import DTensor, Shard

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing.technique import blocks
from brim.techniques.parallel.context_parallel import Context
from brim.techniques.parallel.tensor_parts import is_norm

_LAYER_SETTING = re.compile("layer|block")  # the names of settings with an entry for each layer


@dataclass(frozen=True, kw_only=True)
class Part:
    """The layers ``[first, first + layers)`` of ``of`` layers."""

    first: int
    layers: int
    of: int

    @property
    def embeds(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.first + self.layers == self.of


def cut(model: Any, part: Part, places: Sequence[int] | None = None) -> Stage:
    """Reduce ``model`` (transformers' causal language model), in place, to the layers of ``part``, or to those at
    ``places`` of it, for a shallower stage of the same kinds of layers.

    Raises UsageError for layers that it does not have, UnsupportedError unless it has a single list of layers.
    """
    stack, path = stack_of(model)
    if part.of != len(stack) or part.layers < 1 or part.first < 0 or part.first + part.layers > part.of:
        raise UsageError(
            f"Cannot take layers {part.first} to {part.first + part.layers - 1} of {part.of}.",
            f"{type(model).__name__} has {len(stack)} layers.",
        )
    inner = model.get_submodule(path.rpartition(".")[0])
    _keep(stack, inner, [part.first + place for place in (range(part.layers) if places is None else places)])
    stage = Stage(model, inner, part)
    if not part.has_head:
        _remove_head(model, inner, stack, stage.progress)
    if not part.embeds:
        _remove_embedding(inner, stack, stage.progress, has_head=part.has_head)
    inner.register_forward_pre_hook(stage.begin)
    stack[0].register_forward_pre_hook(stage.enter_layers, with_kwargs=True)
    stack[-1].register_forward_hook(stage.leave_layers)
    return stage


@dataclass
class Progress:
    """The progress of a decoder's forward pass: before, in or behind its layers."""

    place: Literal["before", "at", "behind"] = "before"


class Stage(nn.Module):
    """A stage. The first takes ``input_ids``, the others hidden states; the last returns the loss, the others hidden
    states. ``tokens_over``: a mesh that the tokens of hidden states are split over. ``context`` cuts this rank's part
    out of each sequence."""

    def __init__(self, model: nn.Module, inner: nn.Module, part: Part) -> None:
        super().__init__()
        self.model, self.part = model, part
        self._inner = [inner]  # a part of ``model``: not a second child
        self.tokens_over: DeviceMesh | None = None
        self.context: Context | None = None
        self.progress = Progress()
        self._received: torch.Tensor | None = None
        self._sent: list[torch.Tensor] | None = None

    def begin(self, inner: nn.Module, args: Any) -> None:
        """Note the begin of the decoder, as its hook."""
        self.progress.place = "before"

    def enter_layers(self, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Replace the first layer's input by the received hidden states, as its hook: decoders scale embeddings, or
        add to them, wherever these are from.
        """
        self.progress.place = "at"
        received, self._received = self._received, None
        if received is None:  # tokens, or a call by other code, with other inputs
            return None
        alike = [
            tensor
            for tensor in (*args, *named.values())
            if isinstance(tensor, torch.Tensor) and tensor.shape == received.shape
        ]
        hidden = args[0] if args else named.get("hidden_states")
        if len(alike) != 1 or alike[0] is not hidden:
            raise UnsupportedError(
                f"Cannot cut {type(self.model).__name__} into stages.",
                "Its layers take other inputs than hidden states.",
            )
        if args:
            return (received, *args[1:]), named
        return args, {**named, "hidden_states": received}

    def leave_layers(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Keep the last layer's output to be sent, as its hook, whatever the decoder does to it then."""
        self.progress.place = "behind"
        if self._sent is not None:
            self._sent.append(output[0] if isinstance(output, tuple) else output)

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
            self._received, named["inputs_embeds"] = given, _shaped_like(given)
        if context is not None:
            named["position_ids"] = context.positions(given.shape[1], given.device)
        if self.part.has_head:
            assert labels is not None, "the last stage gives the loss"
            if context is not None:
                labels = named["shift_labels"] = context.following(labels)
            loss: torch.Tensor = self.model(**named, labels=labels, use_cache=False).loss
            return loss
        self._sent = []
        self._inner[0](**named, use_cache=False)
        (hidden,), self._sent = self._sent, None
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden


def tied_table(model: Any) -> nn.Parameter | None:
    """The weight that a model's embedding and its output layer share, or None."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return table.weight if table is not None and head is not None and head.weight is table.weight else None


@dataclass(eq=False)
class TiedWeight:
    """A weight that the first stage has as its embedding and the last as its output layer.

    Both copies get the sum of both gradients (megatron/core/distributed/finalize_model_grads.py), so they stay equal.
    ``exchange`` sends this rank's gradient to the other rank and receives that one's into the second tensor; in a
    prediction it does nothing.
    """

    weight: nn.Parameter
    _exchange: Callable[[torch.Tensor, torch.Tensor], None] = lambda own, other: None

    def add(self) -> None:
        """Add the other rank's gradient, once all gradients of a step are complete."""
        gradient = self.weight.grad
        assert gradient is not None, "a step without a gradient of the embedding"
        if isinstance(gradient, DTensor) and isinstance(self.weight, DTensor):  # an embedding's may be replicated
            gradient = gradient.redistribute(placements=self.weight.placements)
            self.weight.grad = gradient
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(own)
        self._exchange(own, other)
        own.add_(other)


def stack_of(model: nn.Module) -> tuple[nn.ModuleList, str]:
    """A model's list of layers and its path. Raises UnsupportedError if it has none or several."""
    parents = {path.rpartition(".")[0] for path in blocks(model)}
    lists = [(model.get_submodule(path), path) for path in parents]
    stacks = [(module, path) for module, path in lists if isinstance(module, nn.ModuleList)]
    if len(stacks) != 1 or len(lists) != 1:
        raise UnsupportedError(
            f"Cannot cut {type(model).__name__} into stages.", f"It has {len(stacks)} lists of layers, not one."
        )
    return stacks[0]


def _keep(stack: nn.ModuleList, inner: Any, places: Sequence[int]) -> None:
    """Keep the layers at ``places``, and their entries in a copy of the decoder's configuration.

    The decoder looks up the kind of a layer, and so its mask, by the layer's place in the stack.
    """
    of = len(stack)
    if len(places) == of:
        return
    for place in sorted(set(range(of)) - set(places), reverse=True):
        del stack[place]
    if getattr(inner, "config", None) is None:
        return
    config = inner.config = copy.deepcopy(inner.config)
    stored = vars(config)
    own = {name: type(value)(value[place] for place in places) for name, value in layer_settings(config, of)}
    stored |= {name: value for name, value in own.items() if name in stored}
    computed = {name: value for name, value in own.items() if name not in stored}
    if computed:
        config.__class__ = type(type(config).__name__, (type(config),), computed)


def layer_settings(config: Any, layers: int) -> Iterator[tuple[str, Any]]:
    """The settings of a configuration with an entry for each layer, stored or computed from other settings."""
    kind = type(config)
    names = {*vars(config), *(name for name in dir(kind) if isinstance(getattr(kind, name), property))}
    for name in sorted(filter(_LAYER_SETTING.search, names)):
        value = getattr(config, name)
        if isinstance(value, (list, tuple)) and len(value) == layers:
            yield name, value


def _remove_head(model: Any, inner: nn.Module, stack: nn.ModuleList, progress: Progress) -> None:
    """Remove the last norm, and all parts beside the decoder; a tied weight stays with the embedding."""
    name = _last_norm(inner, stack)
    if name is not None:
        setattr(inner, name, _Removed(progress, "behind"))
    for name, child in list(model.named_children()):
        if all(part is not inner for part in child.modules()):
            delattr(model, name)


def _remove_embedding(inner: nn.Module, stack: nn.ModuleList, progress: Progress, *, has_head: bool) -> None:
    """Remove the embedding with its norm and its dropout: the stage gets hidden states."""
    stays = _last_norm(inner, stack) if has_head else None
    for name, child in list(inner.named_children()):
        embeds = any(isinstance(part, nn.Embedding) for part in child.modules())
        if child is stack or name == stays:
            continue
        if isinstance(child, nn.Embedding):
            setattr(inner, name, _NoPositions())
        elif embeds or is_norm(child) or isinstance(child, nn.Dropout):
            setattr(inner, name, _Removed(progress, "before"))


def _last_norm(inner: nn.Module, stack: nn.ModuleList) -> str | None:
    """The last norm by its name and its place among the decoder's parts; ``_Removed`` raises if that is wrong."""
    norms = [name for name, child in inner.named_children() if child is not stack and is_norm(child)]
    return next(reversed([name for name in norms if "emb" not in name] or norms), None)


def _shaped_like(hidden: torch.Tensor) -> torch.Tensor:
    """A tensor without memory in the shape, dtype and device of the embeddings. It is not ``hidden`` itself, as some
    decoders scale embeddings in place."""
    return hidden.detach() if isinstance(hidden, DTensor) else hidden.new_zeros(()).expand(hidden.shape)


class _Removed(nn.Module):
    """Replaces a module that another stage applies to hidden states, before or behind the layers.

    Raises UnsupportedError if it is called at another time: then it has another purpose.
    """

    def __init__(self, progress: Progress, place: str) -> None:
        super().__init__()
        self._progress, self._place = progress, place

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        if self._progress.place != self._place:
            raise UnsupportedError(
                "Cannot cut a model into stages.",
                f"A module that brim took for one {self._place} its layers runs at another time.",
                "Use --zero or --tp.",
            )
        tensors = (
            tensor
            for tensor in (*args, *named.values())
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        )
        return next(tensors)


class _NoPositions(nn.Module):
    """Replaces a table of positions that an earlier stage has added."""

    def forward(self, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros((), device=positions.device, dtype=torch.get_default_dtype())


def parts(layers: Sequence[int]) -> list[Part]:
    """Consecutive parts with the given numbers of layers."""
    stages, first = [], 0
    for count in layers:
        stages.append(Part(first=first, layers=count, of=sum(layers)))
        first += count
    return stages
