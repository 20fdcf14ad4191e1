"""Graphs of a block's forward and backward pass, as a compiler sees them before it makes kernels.

AOTAutograd traces both passes at once and PyTorch's min-cut partitioner chooses the tensors that the first saves for
the second (torch/_functorch/partitioners.py), as under ``torch.compile`` before Inductor. Both run here on fake
tensors of their own, which no trace sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpoints
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from brim.predict.compiled.torch_compile import capturing

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
