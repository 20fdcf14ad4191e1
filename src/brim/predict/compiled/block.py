"""Trace a module's forward as ``torch.compile(..., fullgraph=True)`` would run it: with the memory of its two graphs'
kernels, and of the tensors that the partitioner saves between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from brim.errors import BrimError
from brim.predict.compiled.graph import Graphs, Layout, captured, local
from brim.predict.compiled.kernels import Program
from brim.predict.patches import silenced

_PLAIN = (int, float, bool, str, type(None), torch.dtype)
_OF_ITS_PLACE = ("layer_idx",)  # differs between layers that work alike otherwise


class NotOneGraph(Exception):
    """The forward of a module is not a single graph of tensors."""


@dataclass(frozen=True)
class _Compiled:
    graphs: Graphs
    forward: Program
    backward: Program
    results: Any  # tree of what the module returns, its tensors as places in the outputs
    places: tuple[Any, ...]


class CompiledBlock:
    """``forward`` of ``module``, compiled. Blocks with the same ``known`` share graphs: layers that are alike are
    compiled once, as torch.compile does."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], known: dict[Any, _Compiled]) -> None:
        self._module, self._forward, self._known = module, forward, known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block. Raises NotOneGraph before anything ran."""
        own = _tensors_of(self._module)
        leaves, tree = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors = [*own.values(), *inputs]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return self._forward(*args, **kwargs)
        layouts = tuple(map(Layout.of, tensors))
        plain = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        key = (_likeness(self._module), str(tree), plain, tuple(map(_key, layouts)), tuple(own))
        if key not in self._known:
            self._known[key] = self._compiled(own, leaves, tree, layouts)
        compiled = self._known[key]
        outputs = _Run.apply(compiled, *tensors)  # type: ignore[no-untyped-call]
        values = [outputs[place] if type(place) is _Place else place for place in compiled.places]
        return tree_unflatten(values, compiled.results)

    def _compiled(
        self, own: dict[str, torch.Tensor], leaves: Sequence[Any], tree: Any, layouts: Sequence[Layout]
    ) -> _Compiled:
        shape: list[Any] = []

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            inputs = iter(tensors[len(own) :])
            values = [next(inputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(values, tree)
            with _holding(self._module, dict(zip(own, tensors, strict=False))):
                result_leaves, results = tree_flatten(self._forward(*args, **kwargs))
            outputs = [value for value in result_leaves if isinstance(value, torch.Tensor)]
            numbers = iter(range(len(outputs)))
            shape[:] = [
                results,
                tuple(_Place(next(numbers)) if isinstance(v, torch.Tensor) else v for v in result_leaves),
            ]
            return outputs

        try:
            with silenced("torch._functorch"):
                graphs = captured(flat, layouts, len(own))
        except Exception as error:
            if _is_brims_own(error):
                raise
            raise NotOneGraph(f"{type(error).__name__}: {error}") from error
        kept = _inputs_kept(graphs)
        return _Compiled(
            graphs=graphs, forward=Program(graphs.forward.graph),
            backward=Program(graphs.backward.graph, kept), results=shape[0], places=shape[1],
        )  # fmt: skip


class _Place(int):
    """A tensor among a graph's outputs."""


class _Run(torch.autograd.Function):
    """AOTAutograd's ``CompiledFunction``: one node for the whole block."""

    @staticmethod
    def forward(ctx: Any, compiled: _Compiled, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = compiled.forward.play([local(tensor) for tensor in tensors])
        many = len(compiled.graphs.outputs)
        kept: Any = results[many:]
        ctx.compiled, ctx.spreads = compiled, [_share(tensor) for tensor in tensors]
        ctx.save_for_backward(*kept)
        layouts = compiled.graphs.outputs
        outputs = tuple(_dtensor(value, layout.share) for value, layout in zip(results[:many], layouts, strict=True))
        plain = [out for out, layout in zip(outputs, layouts, strict=True) if not layout.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        compiled: _Compiled = ctx.compiled
        layouts = compiled.graphs.outputs
        output_gradients = [
            _like(given, lay) for given, lay in zip(gradients, layouts, strict=True) if lay.requires_grad
        ]
        inputs = [*ctx.saved_tensors, *output_gradients]
        ctx.maybe_clear_saved_tensors()
        del output_gradients, gradients
        input_gradients = compiled.backward.play(inputs)
        return (None, *(_dtensor(value, share) for value, share in zip(input_gradients, ctx.spreads, strict=True)))


def _share(tensor: torch.Tensor) -> Any:
    return tensor._spec if isinstance(tensor, DTensor) else None


def _dtensor(value: Any, share: Any) -> Any:
    if value is None or share is None:
        return value
    return DTensor(value, share, requires_grad=value.requires_grad)


def _like(gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A gradient in the layout of the graph's input: AOTAutograd copies one of another layout."""
    if layout.share is not None and isinstance(gradient, DTensor) and gradient.placements != layout.share.placements:
        gradient = gradient.redistribute(placements=layout.share.placements)
    own = local(gradient)
    return (
        own
        if own.stride() == layout.stride
        else torch.empty_strided(layout.size, layout.stride, dtype=own.dtype, device=own.device).copy_(own)
    )


def _is_brims_own(error: Exception) -> bool:
    """Return True if the error says nothing of the module: PyTorch asserts one graph, brim its own rules."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    raised_in = "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, BrimError) or (isinstance(error, AssertionError) and raised_in.startswith("brim."))


def _inputs_kept(graphs: Graphs) -> list[int]:
    """Indices of saved tensors that are inputs of the forward pass, which have other owners too."""
    output = next(node for node in graphs.forward.graph.nodes if node.op == "output")
    many = len(graphs.outputs)
    results = set(output.args[0][:many])
    saved = output.args[0][many:]
    return [at for at, node in enumerate(saved) if node.op == "placeholder" or node in results]


# -- a module ------------------------------------------------------------------------------------------------------


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def _holding(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """While open, the module has ``tensors`` as its parameters and buffers."""
    before = [(part, part._parameters, part._buffers) for part in module.modules()]
    instead = {id(held): tensors[name] for name, held in _tensors_of(module).items()}

    def exchanged(named: Mapping[str, Any]) -> Any:
        return {name: instead.get(id(tensor), tensor) for name, tensor in named.items()}

    try:
        for part, parameters, buffers in before:
            part._parameters, part._buffers = exchanged(parameters), exchanged(buffers)
        yield
    finally:
        for part, parameters, buffers in before:
            part._parameters, part._buffers = parameters, buffers


def _key(layout: Layout) -> Any:
    share = layout.share
    placed = None if share is None else (id(share.mesh), str(share.placements), tuple(share.tensor_meta.shape))
    return (layout.size, layout.stride, layout.dtype, layout.requires_grad, placed)


def _likeness(module: nn.Module) -> Any:
    """Return the properties that two modules share where they work alike."""
    return tuple((name, type(part), _settings(part)) for name, part in module.named_modules())


def _settings(part: nn.Module) -> Any:
    plain_values = [(name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN)]
    plain = tuple(pair for pair in plain_values if pair[0] not in _OF_ITS_PLACE)
    hooks = (len(part._forward_pre_hooks), len(part._forward_hooks))
    instead = vars(part).get("forward")
    return plain, hooks, type(instead), getattr(instead, "choice", None)
