"""Pipelining: a model cut into stages of consecutive layers, each on ranks of its own.

Huang et al., arXiv 1811.06965; Narayanan et al., arXiv 2104.04473. A stage is the model itself with the other layers
left out: the first has the embedding, the last the head and the loss. ``torch.distributed.pipelining`` runs them; a
prediction runs one stage's forward and backward on fake tensors, in the same way.

A zero-bubble pipeline (Qi et al., arXiv 2401.10241) works out the gradients of a stage's weights later than those of
what came in, where a rank would wait: the same graph is gone through twice, and kept until the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard

from brim.errors import UnsupportedError, UsageError
from brim.techniques.checkpointing import blocks
from brim.techniques.context_parallel import Context

NAME = "pipeline"


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


def cut(model: Any, part: Part) -> Stage:
    """``model`` (transformers' causal language model) with the layers of ``part`` only, in place.

    Raises UsageError for layers that it does not have, UnsupportedError where its one list of layers is not found.
    """
    stack, path = _stack(model)
    if part.of != len(stack) or part.layers < 1 or part.first < 0 or part.first + part.layers > part.of:
        raise UsageError(
            f"Layers {part.first} to {part.first + part.layers - 1} of {part.of} were asked for.",
            f"{type(model).__name__} has {len(stack)}.",
        )
    del stack[part.first + part.layers :]
    del stack[: part.first]
    inner = model.get_submodule(path.rpartition(".")[0])
    if not part.has_head:
        _leave_out_head(model, inner)
    if not part.embeds:
        _leave_out_embedding(inner)
    return Stage(model, inner, part)


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
        named["input_ids" if self.part.embeds else "inputs_embeds"] = given
        if context is not None:
            named["position_ids"] = context.positions(given.shape[1], given.device)
        if self.part.has_head:
            assert labels is not None, "the last stage gives the loss"
            if context is not None:
                labels = named["shift_labels"] = context.following(labels)
            loss: torch.Tensor = self.model(**named, labels=labels, use_cache=False).loss
            return loss
        hidden: torch.Tensor = self._inner[0](**named, use_cache=False)[0]
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
            f"--zero-bubble was asked for with --checkpointing {checkpointing}.",
            "Its two backward passes would each compute the forward pass again.",
            "Leave one of them out.",
        )


def tied_table(model: Any) -> nn.Parameter | None:
    """The weight that is a model's embedding and its output layer, where it has one."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return table.weight if table is not None and head is not None and head.weight is table.weight else None


class Twin:
    """A weight of which the first stage has a copy as its embedding and the last one as its output layer.

    Both copies get the sum of both gradients, as Megatron-LM does it (core/distributed/finalize_model_grads.py), so
    that they stay one. ``exchange`` sends this rank's gradient to the other's rank and fills the second tensor with
    what comes from there; in a prediction it does nothing.
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


def _stack(model: nn.Module) -> tuple[nn.ModuleList, str]:
    parents = {path.rpartition(".")[0] for path in blocks(model)}
    lists = [(model.get_submodule(path), path) for path in parents]
    found = [(module, path) for module, path in lists if isinstance(module, nn.ModuleList)]
    if len(found) != 1 or len(lists) != 1:
        raise UnsupportedError(
            f"{type(model).__name__} was to be cut into stages.", f"It has {len(found)} lists of layers, not one."
        )
    return found[0]


def _leave_out_head(model: Any, inner: nn.Module) -> None:
    """No last norm and no output layer; a tied weight stays with the embedding."""
    names = [name for name, child in inner.named_children() if _is_norm(child)]
    if names:
        setattr(inner, names[-1], nn.Identity())
    for name, child in list(model.named_children()):
        if child is not inner and isinstance(child, nn.Linear):
            delattr(model, name)


def _leave_out_embedding(inner: nn.Module) -> None:
    """Hidden states come in: tables of tokens go, tables of positions add nothing, dropout was done."""
    for name, child in list(inner.named_children()):
        if isinstance(child, nn.Embedding):
            setattr(inner, name, _Nothing())
        elif isinstance(child, nn.Dropout):
            setattr(inner, name, nn.Identity())


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Norm", "LayerNorm", "RMSNorm"))


class _Nothing(nn.Module):
    """In the place of a table of positions that an earlier stage has added."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device, dtype=torch.get_default_dtype())


def parts(layers: Sequence[int]) -> list[Part]:
    """Consecutive parts of so many layers each."""
    found, first = [], 0
    for count in layers:
        found.append(Part(first=first, layers=count, of=sum(layers)))
        first += count
    return found
