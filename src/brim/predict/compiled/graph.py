"""Graphs of a block's forward and backward pass, as a compiler makes them before its kernels.

AOTAutograd traces both passes at once and PyTorch's min-cut partitioner says what the first keeps for the second
(torch/_functorch/partitioners.py), as ``torch.compile`` has them do before Inductor writes kernels. Both run here on
fake tensors of their own, which no trace sees.
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

_regions = itertools.count(1)  # checkpointed ones: what crosses from one into another is kept


@dataclass(frozen=True)
class Layout:
    """A tensor without its values. ``share``: of a DTensor, how it lies on its mesh, where the rest is this rank's
    part."""

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

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class Graphs:
    """``forward`` gives its ``outputs``, then what is kept; ``backward`` takes what is kept, then the outputs'
    gradients, and gives those of all inputs (None where there is none)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: tuple[Layout, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor is all here."""
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def captured(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Layout], weights: int) -> Graphs:
    """Both passes of ``function``, which takes tensors and gives tensors; the first ``weights`` of them are there
    anyhow, so that keeping them is free. Raises whatever PyTorch does for what cannot be one graph."""
    from torch._functorch import partitioners  # with the compiler, seconds that most programs need not wait for
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
            flat, tuple(layout.made() for layout in inputs), trace_joint=True, decompositions=select_decomp_table()
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
    """``torch.utils.checkpoint`` tells the partitioner what to compute again, as in torch.compile
    (torch/_higher_order_ops/wrap.py, tag_activation_checkpoint_impl), and computes nothing again itself."""
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
