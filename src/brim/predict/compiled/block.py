"""Trace a module's forward as ``torch.compile(..., fullgraph=True)`` would run it: with the memory of its two graphs'
kernels, and of the tensors that the partitioner saves between them.

AOTAutograd traces both passes at once and PyTorch's min-cut partitioner chooses the tensors that the first saves for
the second (torch/_functorch/partitioners.py), as under ``torch.compile`` before Inductor. Both run here on fake
tensors of their own, which no trace sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from brim.errors import BrimError
from brim.predict.compiled.kernels import Program
from brim.predict.compiled.torch_compile import capturing
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


@dataclass(eq=False)
class CompiledBlock:
    """``forward`` of ``module``, compiled. Blocks with the same ``known`` share graphs: layers that are alike are
    compiled once, as torch.compile does."""

    _module: nn.Module
    _forward: Callable[..., Any]
    _known: dict[Any, _Compiled]

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
        parts = tuple((name, type(part), _settings(part)) for name, part in self._module.named_modules())
        key = (parts, str(tree), plain, tuple(map(_key, layouts)), tuple(own))
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


def _settings(part: nn.Module) -> Any:
    plain_values = [(name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN)]
    plain = tuple(pair for pair in plain_values if pair[0] not in _OF_ITS_PLACE)
    hooks = (len(part._forward_pre_hooks), len(part._forward_hooks))
    instead = vars(part).get("forward")
    return plain, hooks, type(instead), getattr(instead, "choice", None)


# -- a block's graphs, as a compiler sees them before it makes kernels -----------------------------------------------

_regions = itertools.count(1)  # checkpointed ones: tensors that cross from one into another are saved


@dataclass(frozen=True)
class Layout:
    """A tensor without its values. ``share``: for a DTensor its placement on the mesh; the other fields are this
    rank's part."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    share: Any = None  # DTensorSpec

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        own = local(tensor)
        return cls(
            size=tuple(own.shape), stride=tuple(own.stride()), dtype=own.dtype, requires_grad=tensor.requires_grad,
            share=tensor._spec if isinstance(tensor, DTensor) else None,
        )  # fmt: skip

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class Graphs:
    """``forward`` returns its ``outputs``, then the saved tensors; ``backward`` takes these and the outputs'
    gradients, and returns the gradients of all inputs (None where there is none)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: tuple[Layout, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or any other tensor itself."""
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def captured(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Layout], weights: int) -> Graphs:
    """Capture both passes of ``function``, which takes and returns tensors; saving the first ``weights`` of them is
    free, as they exist anyway. Raises PyTorch's exceptions where it is not one graph."""
    from torch._functorch import partitioners  # imports the compiler: seconds that most programs need not wait for
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    outputs: list[Layout] = []

    def flat(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = [_spread(tensor, layout) for tensor, layout in zip(given, inputs, strict=True)]
        results = function(*whole)
        outputs[:] = [Layout.of(result) for result in results]
        return tuple(result.to_local() if isinstance(result, DTensor) else result for result in results)

    with capturing(), _disable_current_modes(), FakeTensorMode(), torch.enable_grad(), _checkpoints_as_tags():
        joint: Any = aot_export_joint_simple(
            flat, tuple(layout.empty() for layout in inputs), trace_joint=True, decompositions=select_decomp_table()
        )
        with mock.patch.object(partitioners, "has_recomputable_rng_ops", lambda graph: False):  # states of few bytes
            forward, backward = partitioners.min_cut_rematerialization_partition(
                joint, None, num_fwd_outputs=len(outputs), static_lifetime_input_indices=list(range(weights))
            )
    return Graphs(forward=forward, backward=backward, outputs=tuple(outputs))


def _spread(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.share is None:
        return tensor
    share = layout.share
    return DTensor.from_local(
        tensor, share.mesh, share.placements, run_check=False, shape=share.tensor_meta.shape,
        stride=share.tensor_meta.stride,
    )  # fmt: skip


@contextmanager
def _checkpoints_as_tags() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` tag operations for the partitioner to recompute, as in torch.compile
    (torch/_higher_order_ops/wrap.py, tag_activation_checkpoint_impl), and recompute nothing itself."""
    true = checkpoints._checkpoint_without_reentrant_generator

    def tagging(
        function: Any, rng: bool, contexts: Any, check: str, debug: bool, early: bool, *args: Any, **kwargs: Any
    ) -> Any:
        return true(function, False, lambda: _tags(contexts), "none", False, False, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        stack.enter_context(mock.patch.object(checkpoints, "_checkpoint_without_reentrant_generator", tagging))
        yield


def _tags(contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    forward, _ = contexts()
    forward, again = create_selective_checkpoint_contexts(getattr(forward, "policy_fn", _again))
    forward.ac_graph_id = next(_regions)
    return forward, again


def _again(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
