"""``DistributedDataParallel`` over one rank: what its C++ reducer keeps and copies, on fake tensors.

Follows torch/csrc/distributed/c10d/reducer.cpp and comm.cpp. Gradients are copied into buckets, and back once all are
there unless they are views of buckets; after the first backward pass the buckets are built again, in the order in
which gradients came. Communication takes no memory, because there is only one rank.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import distributed

from brim.predict import failures

_assigned: Any = getattr(distributed, "_compute_bucket_assignment_by_size", None)  # buckets, by positions
_IN_FLIGHT = 2  # coalesced broadcasts


@contextmanager
def data_parallel() -> Iterator[None]:
    """While open, PyTorch's ``DistributedDataParallel`` reduces by ``Reducer``."""
    if not distributed.is_available():
        yield
        return
    replaced = {
        "Reducer": Reducer,
        "Logger": _Logger,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_verify_params_across_processes": _nothing,
        "_register_comm_hook": _no_hook,
        "_register_builtin_comm_hook": _no_hook,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(distributed, name, value))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _no_hook(*args: Any) -> None:
    raise failures.not_traced(
        "A communication hook", "Leave the hook out: a trace sends no gradients to other ranks."
    )


class _Logger:
    def __init__(self, reducer: Reducer) -> None: ...

    set_construction_data_and_log = set_runtime_stats_and_log = set_error_and_log = _set_static_graph = _nothing


class Reducer:
    """``c10d::Reducer``, as ``DistributedDataParallel`` calls it."""

    set_logger = prepare_for_forward = _set_forward_pass_work_handle = _nothing
    _check_reducer_finalized = _set_ddp_runtime_logging_sample_rate = _nothing

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: object,
        expect_sparse_gradient: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        param_to_name_mapping: object,
        first_bucket_bytes_cap: int,
        *others: object,
    ) -> None:
        self._parameters, self._as_views = list(parameters), gradient_as_bucket_view
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._rebuilds, self._finds_unused = not find_unused_parameters, find_unused_parameters
        self._order: list[int] = []  # the order of gradients, until the buckets are built again
        self._expects = False
        self._ready: list[int] = []
        self._views: dict[int, torch.Tensor] = {}
        self._make(bucket_indices)
        if find_unused_parameters:
            self._used = self._parameters[0].new_empty(len(self._parameters), dtype=torch.int32)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_came, weakref.ref(self), index))
            for index, parameter in enumerate(self._parameters)
        ]
        weakref.finalize(self, _removed, self._hooks)

    def _remove_autograd_hooks(self) -> None:
        _removed(self._hooks)

    def _make(self, bucket_indices: Sequence[Sequence[int]]) -> None:
        self._views.clear()
        for indices in bucket_indices:
            parameters = [self._parameters[index] for index in indices]
            with torch.no_grad():
                flat = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
                offset = 0
                for index, parameter in zip(indices, parameters, strict=True):
                    self._views[index] = flat.as_strided(parameter.shape, parameter.stride(), offset)
                    offset += parameter.numel()

    def _set_static_graph(self) -> None:
        self._rebuilds = True

    def _rebuild_buckets(self) -> bool:
        if not self._rebuilds or len(self._order) < len(self._parameters):
            return False
        parameters = [self._parameters[index] for index in self._order]
        sparse = [False] * len(parameters)
        indices, _ = _assigned(parameters, self._limits, sparse, self._order)
        self._order, self._rebuilds = [], False
        self._make(indices)
        return True

    def prepare_for_backward(self, outputs: object) -> None:
        self._expects, self._ready = True, []

    def came(self, index: int, parameter: torch.Tensor) -> None:
        """Note that a parameter has its gradient."""
        if not self._expects:  # gradients are added up, for a later step
            return
        self._ready.append(index)
        # After the last gradient; unused parameters have none. A backward pass within a backward pass
        # (reentrant checkpointing) ends separately.
        if len(self._ready) == (1 if self._finds_unused else len(self._parameters)):
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)
        if self._rebuilds:
            self._order.append(index)
        view = self._views[index]
        assert parameter.grad is not None
        with torch.no_grad():
            view.copy_(parameter.grad)
        if self._as_views:
            parameter.grad = view

    def _finalize(self) -> None:
        ready, self._ready, self._expects = self._ready, [], False
        if self._as_views:
            return
        with torch.no_grad():
            for index in ready:
                gradient = self._parameters[index].grad
                assert gradient is not None
                gradient.copy_(self._views[index])


def _came(reducer: weakref.ref[Reducer], index: int, parameter: torch.Tensor) -> None:
    if (alive := reducer()) is not None:
        alive.came(index, parameter)


def _removed(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _broadcast_coalesced(group: object, tensors: Sequence[torch.Tensor], buffer_size: int, source: int = 0) -> None:
    """comm.cpp, ``broadcast_coalesced``: tensors are sent together, as large as a buffer, and copied back."""
    under_way: deque[tuple[torch.Tensor, list[torch.Tensor]]] = deque()
    indices, _ = _assigned(list(tensors), [buffer_size])
    with torch.no_grad():
        for bucket in indices:
            together = [tensors[index] for index in bucket]
            under_way.append((torch._utils._flatten_dense_tensors(together), together))
            if len(under_way) > _IN_FLIGHT:
                _arrive(*under_way.popleft())
        while under_way:
            _arrive(*under_way.popleft())


def _arrive(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, sent in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors), strict=True):
        tensor.copy_(sent)
