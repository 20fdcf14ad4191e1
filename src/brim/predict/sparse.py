"""Sparse tensors of a trace: fake tensors whose indices and values are fake tensors of their own.

CUDA's kernels for them are written as other operations on these, in the order of their allocations
(aten/src/ATen/native/sparse/cuda), so every temporary is one of the trace. Other operations are computed on the CPU,
with known or assumed values: their results have the right shapes, and their kernels' temporaries are unknown. The
number of values after equal indices are joined depends on the indices; unknown ones are assumed to differ, the worst
case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from brim.model_inputs import tensors_in
from brim.predict import failures
from brim.predict.flops import Work
from brim.predict.lowering.cuda import indexing
from brim.predict.values.assumptions import Values, filled
from brim.predict.values.known import fits, flat_leaves, forget, give, known

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_ROWS = (torch.sparse_csr, torch.sparse_bsr)  # their first member has rows; the others' has columns
_NOTE = "sparse products: cuSPARSE's workspaces"


@dataclass(slots=True)
class Parts:
    """Members of a sparse tensor: indices and values; compressed: the beginning of each row, columns, values."""

    members: tuple[torch.Tensor, ...]
    coalesced: bool = True
    sparse_dim: int = 2

    @property
    def values(self) -> torch.Tensor:
        return self.members[-1]

    @property
    def indices(self) -> torch.Tensor:
        return self.members[0]


def is_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided and not value.is_mkldnn


def makes(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return True if ``func`` makes a sparse tensor, from other tensors or from none."""
    return func in _MAKERS or (func is _BAG_BACKWARD and bool(args[_BAG_IS_SPARSE]))


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a sparse tensor is among the arguments."""
    return any(is_sparse(leaf) for leaf in flat_leaves(args, kwargs))


def sized(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a factory, with the size derived from the indices where none is given."""
    members = FACTORIES[make]
    if len(args) != members or "size" in kwargs:
        return args
    parts = [part if isinstance(part, torch.Tensor) else torch.tensor(part) for part in args]
    if make is torch.sparse_coo_tensor:
        return (*args, [*(most + 1 for most in parts[0].amax(1).tolist()), *parts[1].shape[1:]])
    if make is torch.sparse_compressed_tensor or parts[1].dim() != 1:
        return args
    rows, columns = parts[0].numel() - 1, int(parts[1].max().item()) + 1
    return (*args, [rows, columns] if make is torch.sparse_csr_tensor else [columns, rows])


def parts_of(tensor: torch.Tensor) -> Parts:
    parts: Parts | None = getattr(tensor, "_brim_parts", None)
    if parts is None:  # made outside of the trace
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if tensor.layout is torch.sparse_coo:
                members = (tensor._indices(), tensor._values())
                parts = Parts(members, tensor.is_coalesced(), tensor.sparse_dim())
            else:
                parts = Parts((*_compressed(tensor), tensor.values()))
        tensor._brim_parts = parts  # type: ignore[attr-defined]
    return parts


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The dense tensor of a sparse one's values, in the same storage."""
    return parts_of(tensor).values


@dataclass(eq=False)
class SparseOperations:
    """Operations on sparse tensors, for one trace."""

    _values: Values
    _fakes: FakeTensorMode
    _describe: Callable[[str, Work], None]
    _not_modelled: set[str]

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on sparse tensors, by operations that the trace records."""
        told = _TOLD.get(func)
        if told is not None:
            result = told(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._on_the_cpu(func, args, kwargs)

    # -- making ----------------------------------------------------------------------------------------------------

    def _like(self, like: torch.Tensor, parts: Parts, shape: Sequence[int] | None = None) -> torch.Tensor:
        layout = like.layout
        return self._new(layout, tuple(like.shape) if shape is None else tuple(shape), parts)

    def _new(self, layout: torch.layout, shape: tuple[int, ...], parts: Parts) -> torch.Tensor:
        dtype, dims = parts.values.dtype, parts.sparse_dim
        with torch._C._DisableTorchDispatch():
            if layout is torch.sparse_coo:
                meta = _aten._sparse_coo_tensor_with_dims.default(
                    dims, len(shape) - dims, shape, dtype=dtype, layout=layout, device="meta"
                )
            else:
                meta = torch.empty(shape, dtype=dtype, layout=layout, device="meta")
        sparse = FakeTensor(self._fakes, meta, _CPU)
        sparse._brim_parts = parts  # type: ignore[attr-defined]
        return sparse

    def _coo(
        self, dims: int, dense: int, size: Sequence[int], indices: Any, values: Any, coalesced: Any = None, **_: Any
    ) -> Any:
        return self._new(torch.sparse_coo, tuple(size), Parts((indices, values), bool(coalesced), dims))

    def _empty_coo(self, dims: int, dense: int, size: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
        shape = tuple(size)
        values = torch.empty((0, *shape[dims:]), dtype=dtype)
        return self._new(
            torch.sparse_coo, shape, Parts((torch.empty((dims, 0), dtype=torch.long), values), True, dims)
        )

    def _compressed(
        self, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, size: Sequence[int], **options: Any
    ) -> Any:
        return self._new(options.get("layout") or torch.sparse_csr, tuple(size), Parts((rows, columns, values)))

    # -- looking ---------------------------------------------------------------------------------------------------

    def _count(self, tensor: torch.Tensor) -> int:
        return parts_of(tensor).members[1].size(0 if tensor.layout is torch.sparse_coo else -1)

    # -- copying ---------------------------------------------------------------------------------------------------

    def _same(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        parts = parts_of(tensor)
        return self._like(tensor, Parts(parts.members, parts.coalesced, parts.sparse_dim))

    def _clone(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        parts = parts_of(tensor)
        copies = [torch.clone(member, memory_format=torch.contiguous_format) for member in reversed(parts.members)]
        return self._like(tensor, Parts(tuple(reversed(copies)), parts.coalesced, parts.sparse_dim))

    def _to_copy(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        parts = parts_of(tensor)
        *places, values = parts.members
        order = [(member, member.dtype) for member in places]
        order.insert(len(order) if tensor.layout is torch.sparse_coo else 0, (values, dtype or values.dtype))
        copies = [_aten._to_copy.default(member, dtype=member_dtype) for member, member_dtype in order]
        if tensor.layout is not torch.sparse_coo:
            copies = [*copies[1:], copies[0]]
        return self._like(tensor, Parts(tuple(copies), parts.coalesced, parts.sparse_dim))

    def _scaled(self, func: OpOverload, tensor: torch.Tensor, *numbers: Any) -> torch.Tensor:
        """Apply an operation to values alone, where zeros stay zeros; indices are copied."""
        if not is_sparse(tensor) or any(isinstance(number, torch.Tensor) for number in numbers):
            return NotImplemented  # type: ignore[no-any-return]
        parts = parts_of(tensor)
        places = tuple(torch.clone(member) for member in parts.members[:-1])
        return self._like(tensor, Parts((*places, func(parts.values, *numbers)), parts.coalesced, parts.sparse_dim))

    def _transpose(self, tensor: torch.Tensor, *dims: int) -> torch.Tensor:
        """SparseTensorMath.cpp, ``_sparse_transpose``: both rows of a copy's indices change places."""
        first, second = dims or (0, 1)
        shape = list(tensor.shape)
        first, second = first % len(shape), second % len(shape)
        shape[first], shape[second] = shape[second], shape[first]
        if tensor.layout is not torch.sparse_coo:
            layout = {torch.sparse_csr: torch.sparse_csc, torch.sparse_csc: torch.sparse_csr}.get(tensor.layout)
            if layout is None or len(shape) != 2:
                return NotImplemented  # type: ignore[no-any-return]
            return self._new(layout, tuple(shape), parts_of(tensor))
        parts = parts_of(tensor)
        if max(first, second) >= parts.sparse_dim:
            return NotImplemented  # type: ignore[no-any-return]
        values, indices = torch.clone(parts.values), torch.clone(parts.indices)
        row = torch.clone(indices[first])
        indices[first].copy_(indices[second])
        indices[second].copy_(row)
        return self._like(tensor, Parts((indices, values), False, parts.sparse_dim), shape)

    # -- joining equal indices ----------------------------------------------------------------------------------

    def _coalesce(self, tensor: torch.Tensor) -> torch.Tensor:
        """SparseCUDATensor.cu: positions are sorted, and a new value begins at each new position."""
        parts = parts_of(tensor)
        indices, values = parts.members
        if parts.coalesced:
            return tensor
        count = indices.size(1)
        if count < 2:
            return self._like(tensor, Parts(parts.members, True, parts.sparse_dim))
        flat = indices.new_empty(count)
        order, begins = torch.empty_like(flat), torch.empty_like(flat)
        indices.new_empty(indexing.merge_sort_bytes(count), dtype=torch.uint8)
        indices.new_empty(indexing.thrust_unique_by_key_bytes(count), dtype=torch.uint8)
        places = self._distinct(indices, tuple(tensor.shape[: parts.sparse_dim]))
        left = places.size(1)
        joined = values.new_empty((left, *values.shape[1:]))
        fresh = flat[:left].unsqueeze(0) if parts.sparse_dim == 1 else indices.new_empty((parts.sparse_dim, left))
        del begins, order
        if (source := known(indices)) is not None:
            with _disable_current_modes():
                give(fresh, places, source.state.origin)
        if (amounts := known(values)) is not None and source is not None:
            with _disable_current_modes():
                whole = torch.sparse_coo_tensor(source.value, amounts.value, tuple(tensor.shape)).coalesce()
                give(joined, whole.values(), amounts.state.origin)
        return self._like(tensor, Parts((fresh, joined), True, parts.sparse_dim))

    def _distinct(self, indices: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Real indices, distinct and sorted; unknown ones are assumed to be distinct."""
        source = known(indices)
        if source is None:
            self._values.questions.assumed[failures.line()] = None
            with _disable_current_modes():
                return torch.zeros(tuple(indices.shape), dtype=torch.long)
        self._values.note(source.state.origin)
        with _disable_current_modes():
            flat = torch.zeros(indices.size(1), dtype=torch.long)
            for row, size in zip(source.value, shape, strict=True):
                flat = flat * size + row
            flat = flat.unique()
            rows = []
            for size in reversed(shape):
                rows.append(flat % size)
                flat = flat // size
            return torch.stack(tuple(reversed(rows)))

    def _coalesced(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if parts_of(tensor).coalesced else self._coalesce(tensor)

    def _set_coalesced(self, tensor: torch.Tensor, coalesced: bool) -> torch.Tensor:
        parts_of(tensor).coalesced = coalesced
        return tensor

    # -- products --------------------------------------------------------------------------------------------------

    def _mm(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if not is_sparse(first) or is_sparse(second):
            return NotImplemented  # type: ignore[no-any-return]
        zeros = second.new_zeros((first.size(0), second.size(1)))
        return self._addmm(zeros, first, second)

    def _addmm(self, start: torch.Tensor, first: torch.Tensor, second: torch.Tensor, **_: Any) -> torch.Tensor:
        """SparseCUDATensorMath.cu: rows are compressed to 32 bits; cuSPARSE writes columns in sequence, which are
        copied."""
        if not is_sparse(first) or is_sparse(second) or is_sparse(start) or first.dim() != 2:
            return NotImplemented  # type: ignore[no-any-return]
        result = second.new_empty((first.size(0), second.size(1)))
        count = self._count(first)
        if first.layout is torch.sparse_coo:
            first = self._coalesced(first)
            count = self._count(first)
            rows = second.new_empty(first.size(0) + 1, dtype=torch.int32)
            second.new_empty(count, dtype=torch.int32)
            columns = second.new_empty(count, dtype=torch.int32)
            by_columns = torch.empty_like(result)
            dense = second if _is_dense(second) else torch.clone(second, memory_format=torch.contiguous_format)
            del by_columns, columns, rows, dense
        elif first.layout is torch.sparse_csc:
            first = self._by_rows(first)
            dense = second if _is_dense(second) else torch.clone(second, memory_format=torch.contiguous_format)
            del dense
        self._not_modelled.add(_NOTE)
        amount, width = parts_of(first).values.element_size(), second.size(1)
        self._describe("aten._sparse_addmm.default", Work(
            2 * count * width, count * (8 + amount + width * amount), result.numel() * amount,
            str(second.dtype).removeprefix("torch."),
        ))  # fmt: skip
        return result

    def _by_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a matrix compressed by columns to one compressed by rows, by sorting its indices."""
        parts = parts_of(tensor)
        begins, places, values = parts.members
        count = places.size(-1)
        columns = torch.empty_like(places)
        indices = torch.stack((places, columns))
        del columns
        loose = self._new(torch.sparse_coo, tuple(tensor.shape), Parts((indices, values), False))
        for other in (begins, places):  # the result's values are known if those of the places are
            if known(other) is None:
                break
        else:
            with _disable_current_modes():
                lengths = known(begins).value.diff()  # type: ignore[union-attr]
                rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
                give(indices, torch.stack((known(places).value, rows)))  # type: ignore[union-attr]
        together = parts_of(self._coalesce(loose))
        begins = places.new_empty(tensor.size(0) + 1)
        assert together.indices.size(1) <= count
        return self._new(torch.sparse_csr, tuple(tensor.shape), Parts((begins, together.indices[1], together.values)))

    def _to_csr(self, tensor: torch.Tensor, dense_dim: int | None = None) -> torch.Tensor:
        if tensor.layout is not torch.sparse_coo or tensor.dim() != 2:
            return NotImplemented  # type: ignore[no-any-return]
        whole = self._coalesced(tensor)
        indices, values = parts_of(whole).members
        begins = indices.new_empty(tensor.size(0) + 1)
        source = known(indices)
        if source is not None:
            with _disable_current_modes():
                give(begins, torch._convert_indices_from_coo_to_csr(source.value[0].contiguous(), tensor.size(0)))
        columns = indices[1]
        return self._new(torch.sparse_csr, tuple(tensor.shape), Parts((begins, columns, values)))

    # -- with dense tensors ----------------------------------------------------------------------------------------

    def _mask(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """SparseTensor.cpp, ``sparse_mask``: a dense tensor times ones at the mask's places."""
        parts = parts_of(mask)
        if is_sparse(tensor) or mask.layout is not torch.sparse_coo or not parts.coalesced:
            return NotImplemented  # type: ignore[no-any-return]
        ones = parts.values.new_ones(1)
        gathered = torch.empty_like(parts.values)
        indices = torch.clone(parts.indices)
        product = torch.empty_like(parts.values)
        del gathered, ones
        return self._like(mask, Parts((indices, product), True, parts.sparse_dim))

    def _to_dense(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        parts = parts_of(tensor)
        dense = parts.values.new_zeros(tuple(tensor.shape))
        real = _real(tensor)
        if real is not None and fits(dense):
            with _disable_current_modes():
                give(dense, real.to_dense(), parts.values._brim_known.state.origin)  # type: ignore[attr-defined]
        return dense

    def _add(self, first: torch.Tensor, second: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        """SparseCUDATensorMath.cu: added values are appended; to dense tensors they are added in place."""
        if is_sparse(first) and is_sparse(second) and first.layout is torch.sparse_coo is second.layout:
            first_parts, second_parts = parts_of(first), parts_of(second)
            indices = torch.cat((first_parts.indices, second_parts.indices), 1)
            values = torch.cat((first_parts.values, second_parts.values), 0)
            return self._like(first, Parts((indices, values), False, first_parts.sparse_dim))
        if not is_sparse(first):
            return torch.clone(first)
        return NotImplemented  # type: ignore[no-any-return]

    def _add_(self, first: torch.Tensor, second: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
        if is_sparse(first):
            added = self._add(first, second)
            if added is not NotImplemented:
                first._brim_parts = parts_of(added)  # type: ignore[attr-defined]
                return first
        elif is_sparse(second) and second.layout is torch.sparse_coo:
            values = values_of(second)
            forget(first)
            self._describe("aten.add_.Tensor", Work(
                values.numel(), 2 * values.numel() * values.element_size(), values.numel() * values.element_size(),
                str(values.dtype).removeprefix("torch."),
            ))  # fmt: skip
            return first
        return NotImplemented  # type: ignore[no-any-return]

    def _bag_backward(
        self,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        bags: torch.Tensor,
        sizes: torch.Tensor,
        largest: torch.Tensor,
        rows: int,
        by_frequency: bool,
        kind: int,
        sparse: bool,
        weights: torch.Tensor | None,
        padding: int = -1,
    ) -> torch.Tensor:
        """EmbeddingBag.cpp, ``_embedding_bag_sparse_backward``: each index has its bag's gradient."""
        each = gradient.index_select(0, bags)
        if kind == _MEAN:
            each.mul_(sizes.to(gradient.dtype).reciprocal().unsqueeze(1).index_select(0, bags))
        elif weights is not None:
            each.mul_(weights.unsqueeze(1))
        shape = (rows, gradient.size(1))
        return self._new(torch.sparse_coo, shape, Parts((indices.reshape(1, -1), each), False, 1))

    def _zero_(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.sparse_coo:
            values_of(tensor).zero_()
            return tensor
        parts = parts_of(tensor)
        none = parts.indices.new_empty((parts.sparse_dim, 0)), parts.values.new_empty((0, *parts.values.shape[1:]))
        tensor._brim_parts = Parts(none, True, parts.sparse_dim)  # type: ignore[attr-defined]
        return tensor

    # -- everything else -------------------------------------------------------------------------------------------

    def _on_the_cpu(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute ``func`` on the CPU and copy its results for the trace."""
        tensors = tensors_in(args, kwargs)
        dense = [
            member for tensor in tensors for member in (parts_of(tensor).members if is_sparse(tensor) else (tensor,))
        ]
        complete = all(known(member) is not None for member in dense)
        if not complete and (self._values.strict or not all(fits(member) for member in dense)):
            raise failures.no_fake_kernel(func)
        replaced: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            filled_tensor = _filled_sparse(value) if is_sparse(value) else filled(value)
            replaced[id(filled_tensor)] = value
            return filled_tensor

        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            real_args, real_kwargs = tree_map(real, args), tree_map(real, kwargs)
            try:
                result = func(*real_args, **real_kwargs)
            except NotImplementedError as error:
                raise failures.no_fake_kernel(func) from error
        like = dense[0]

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in replaced:
                return self._written(replaced[id(value)], value)
            if not is_sparse(value):
                return _again(value, like, complete)
            parts = parts_of(value)
            members = tuple(
                _again(member, like, complete or not member.is_floating_point()) for member in parts.members
            )
            return self._new(value.layout, tuple(value.shape), Parts(members, parts.coalesced, parts.sparse_dim))

        if not complete:
            self._values.questions.assumed[failures.line()] = None
        return tree_map(fake, result)

    def _written(self, tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Copy back an argument that was written in place."""
        if is_sparse(tensor):
            before, after = parts_of(tensor), parts_of(real)
            if before.values.shape != after.values.shape:
                members = tuple(_again(member, before.values, False) for member in after.members)
                tensor._brim_parts = Parts(members, after.coalesced, after.sparse_dim)  # type: ignore[attr-defined]
        return tensor


def _compressed(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.layout in _ROWS:
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def _is_dense(matrix: torch.Tensor) -> bool:
    """Return True if cuSPARSE reads the matrix in place, by rows or by columns."""
    by_columns = matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)
    return by_columns or (matrix.stride(1) == 1 and matrix.stride(0) == matrix.size(1))


def _real(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real sparse tensor, if all its parts are known."""
    members = [known(member) for member in parts_of(tensor).members]
    if any(member is None for member in members):
        return None
    return _assembled(tensor, [member.value for member in members if member is not None])


def _filled_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """A real sparse tensor of the same shape and number of values; unknown indices all differ."""
    real = _real(tensor)
    if real is not None:
        return real
    parts = parts_of(tensor)
    members = [filled(member) for member in parts.members]
    if tensor.layout is torch.sparse_coo and known(parts.indices) is None:
        shape, count = tuple(tensor.shape[: parts.sparse_dim]), parts.indices.size(1)
        flat = torch.arange(count) % max(math.prod(shape), 1)
        rows: list[torch.Tensor] = []
        for size in reversed(shape):
            rows.insert(0, flat % size)
            flat = flat // size
        members[0] = torch.stack(rows)
    elif tensor.layout is not torch.sparse_coo and any(known(member) is None for member in parts.members[:2]):
        raise failures.not_traced(
            "An operation on a compressed sparse tensor with unknown indices",
            "Create the tensor from indices that the trace knows (literals, files, CPU tensors).",
        )
    return _assembled(tensor, members)


def _assembled(tensor: torch.Tensor, members: Sequence[torch.Tensor]) -> torch.Tensor:
    shape = tuple(tensor.shape)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tensor.layout is torch.sparse_coo:
            indices, values = members
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=parts_of(tensor).coalesced)
        begins, places, values = members
        return torch.sparse_compressed_tensor(begins, places, values, shape, layout=tensor.layout)


def _again(real: torch.Tensor, like: torch.Tensor, keeps: bool) -> torch.Tensor:
    """A tensor of the trace with that shape, on ``like``'s device; with its values where they are known."""
    copied = like.new_empty(tuple(real.shape), dtype=real.dtype)
    if keeps:
        with _disable_current_modes():
            give(copied, real.detach())
    return copied


def _member(number: int) -> Callable[..., torch.Tensor]:
    return lambda operations, tensor: _aten.alias.default(parts_of(tensor).members[number])


FACTORIES: dict[Callable[..., Any], int] = {
    torch.sparse_coo_tensor: 2, torch.sparse_csr_tensor: 3, torch.sparse_csc_tensor: 3,
    torch.sparse_compressed_tensor: 3,
}  # fmt: skip
"""PyTorch's functions that make a sparse tensor, and of how many parts."""
_BAG_BACKWARD = _aten._embedding_bag_backward.default
_BAG_IS_SPARSE = 9  # the position of the argument that says so
_MEAN = 1  # of a bag, by embedding_bag's numbering of reductions
_MAKERS = {
    _aten._sparse_coo_tensor_with_dims_and_tensors.default,
    _aten._sparse_coo_tensor_with_dims.default,
    _aten._sparse_coo_tensor_unsafe.default,
    _aten.sparse_coo_tensor.size,
    _aten._sparse_compressed_tensor_unsafe.default,
    _aten.sparse_compressed_tensor.comp_plain_value_size,
    _aten._sparse_csr_tensor_unsafe.default,
    _aten._to_sparse.default,
    _aten._to_sparse.sparse_dim,
    _aten._to_sparse_csr.default,
}
_SCALED = (
    _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default, _aten.sqrt.default,
    _aten.abs.default, _aten.relu.default, _aten.pow.Tensor_Scalar,
)  # fmt: skip


def _scale(func: OpOverload) -> Callable[..., Any]:
    return lambda operations, *args: operations._scaled(func, *args)


_TOLD: dict[OpOverload, Callable[..., Any]] = {
    _BAG_BACKWARD: SparseOperations._bag_backward,
    _aten._sparse_coo_tensor_with_dims_and_tensors.default: SparseOperations._coo,
    _aten._sparse_coo_tensor_with_dims.default: SparseOperations._empty_coo,
    _aten._sparse_compressed_tensor_unsafe.default: SparseOperations._compressed,
    _aten.sparse_compressed_tensor.comp_plain_value_size: SparseOperations._compressed,
    _aten._sparse_csr_tensor_unsafe.default: SparseOperations._compressed,
    _aten._to_sparse_csr.default: SparseOperations._to_csr,
    _aten._nnz.default: SparseOperations._count,
    _aten._indices.default: _member(0),
    _aten.indices.default: _member(0),
    _aten._values.default: _member(-1),
    _aten.values.default: _member(-1),
    _aten.crow_indices.default: _member(0),
    _aten.ccol_indices.default: _member(0),
    _aten.col_indices.default: _member(1),
    _aten.row_indices.default: _member(1),
    _aten.sparse_dim.default: lambda operations, tensor: parts_of(tensor).sparse_dim,
    _aten.dense_dim.default: lambda operations, tensor: parts_of(tensor).values.dim() - 1,
    _aten.is_coalesced.default: lambda operations, tensor: parts_of(tensor).coalesced,
    _aten._coalesced_.default: SparseOperations._set_coalesced,
    _aten.detach.default: SparseOperations._same,
    _aten.alias.default: SparseOperations._same,
    _aten.lift_fresh.default: SparseOperations._same,
    _aten.clone.default: SparseOperations._clone,
    _aten._to_copy.default: SparseOperations._to_copy,
    _aten.t.default: SparseOperations._transpose,
    _aten.transpose.int: SparseOperations._transpose,
    _aten._coalesce.default: SparseOperations._coalesce,
    _aten.mm.default: SparseOperations._mm,
    _aten.addmm.default: SparseOperations._addmm,
    _aten._sparse_addmm.default: SparseOperations._addmm,
    _aten.sparse_mask.default: SparseOperations._mask,
    _aten._to_dense.default: SparseOperations._to_dense,
    _aten.add.Tensor: SparseOperations._add,
    _aten.add_.Tensor: SparseOperations._add_,
    _aten.zero_.default: SparseOperations._zero_,
    **{func: _scale(func) for func in _SCALED},
}
