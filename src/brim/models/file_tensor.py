"""A tensor whose values are still in its file: it has a shape, a dtype, and the ranges of its bytes.

transformers' loading code runs on these tensors, so renames, merges, ties and checks are its own. The result has each
parameter's bytes. A chain of operations that only gathers stays a list of extents; any other operation (a
transposition, a cast) is recorded and done when the tensor is read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from brim.errors import TransferError, UnsupportedError
from brim.memory.checkpoint_files import Extent, TensorSource, merge_extents
from brim.memory.file_versions import check_version, opened_version
from brim.model_inputs import tensors_in

aten = torch.ops.aten

# With more and smaller pieces, gathering from disk is slower than one copy in a better order.
MAX_PIECES = 256
MIN_PIECE_BYTES = 64 << 10

_COMPARED_BYTES = 4 << 20

_SAME_BYTES = {aten.clone, aten.contiguous, aten._unsafe_view, aten.lift_fresh, aten._reshape_copy, aten.view_copy}


class FileTensor(torch.Tensor):
    """Row-major in its extents; if these are None, ``materialize`` computes the values."""

    extents: tuple[Extent, ...] | None
    origins: tuple[TensorSource, ...]  # the tensors in the files that it is computed from
    _compute: Callable[[], torch.Tensor] | None

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        extents: tuple[Extent, ...] | None,
        origins: tuple[TensorSource, ...],
        compute: Callable[[], torch.Tensor] | None = None,
    ) -> FileTensor:
        # "cpu", so that nothing tries to move it there.
        tensor = torch.Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device=torch.device("cpu"))
        tensor.extents, tensor.origins, tensor._compute = extents, origins, compute
        return tensor

    @classmethod
    def open(cls, source: TensorSource) -> FileTensor:
        meta = torch.empty(source.shape, dtype=source.dtype, device="meta")
        return cls(meta, merge_extents(source.extents), (source,))

    @classmethod
    def of(cls, value: torch.Tensor) -> FileTensor:
        """A tensor of known values, which is in no file."""
        return cls(value.to("meta"), None, (), lambda: value)

    def materialize(self) -> torch.Tensor:
        """The values, read now, contiguous on the CPU."""
        if self.extents is None:
            assert self._compute is not None
            return self._compute().contiguous()
        return _read(self.extents, self.numel() * self.dtype.itemsize).view(self.dtype).reshape(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FileTensor({', '.join(o.name for o in self.origins)}: {self.dtype}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "device"}
        tensors = tensors_in(args, kwargs)
        inputs = [leaf for leaf in tensors if isinstance(leaf, FileTensor)]
        if func._schema.is_mutable:
            if _is_throwaway(func, args):
                return args[0]
            raise UnsupportedError(
                f"Cannot run {func} on {inputs[0]!r} while the model is built.",
                "It changes weights in place, and they are still on disk.",
                "Load this model without brim.",
            )
        if func is aten.equal.default and len(inputs) == 2:
            return _equal(*args)

        def run_for_real() -> Any:
            return func(*tree_map(_real, args), **tree_map(_real, kwargs))

        if not all("Tensor" in str(returned.type) for returned in func._schema.returns):
            return run_for_real()
        metas = {id(leaf): torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in tensors}
        meta_args, meta_kwargs = tree_map(lambda leaf: metas.get(id(leaf), leaf), (args, kwargs))
        outputs = func(*meta_args, **meta_kwargs)
        origins = tuple({id(origin): origin for leaf in inputs for origin in leaf.origins}.values())

        def wrap(out: torch.Tensor, index: int | None) -> FileTensor:
            extents = _gathered(func, args, kwargs, inputs, metas, out)
            return cls(out, extents, origins, lambda: run_for_real() if index is None else run_for_real()[index])

        if isinstance(outputs, torch.Tensor):
            return wrap(outputs, None)
        return [wrap(out, index) for index, out in enumerate(outputs)]


def read_extent(extent: Extent, into: memoryview) -> None:
    """Read an extent's bytes. Raises TransferError when the file cannot be read or has become shorter."""
    try:
        with open(extent.path, "rb", buffering=0) as file:
            version = opened_version(extent.path, file.fileno())
            file.seek(extent.offset)
            done = 0
            while done < extent.bytes:
                count = file.readinto(into[done:])
                if not count:
                    raise TransferError(
                        f"Cannot read {extent.bytes} bytes at {extent.offset} of {extent.path}.",
                        f"The file ends {extent.bytes - done} bytes too soon: it changed while it was in use.",
                        "Fetch it again.",
                    )
                done += count
            check_version(extent.path, file.fileno(), version)
    except OSError as error:
        raise TransferError(f"Cannot read {extent.path}.", f"{error.strerror}.", "Check the disk.") from error


def _is_throwaway(func: Any, args: Any) -> bool:
    """Return whether only freshly computed values are written, as when initialization fills a parametrized weight,
    which is computed from its parameters at each access."""
    written = [
        value
        for slot, value in zip(func._schema.arguments, args, strict=False)
        if slot.alias_info is not None and slot.alias_info.is_write
    ]
    return all(
        isinstance(value, FileTensor) and value.extents is None and not isinstance(value, torch.nn.Parameter)
        for value in written
    )


def _equal(first: FileTensor, second: FileTensor) -> bool:
    """Return whether two tensors hold the same values; tied weights stored twice are compared piece by piece."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.extents is None or second.extents is None:
        return bool(torch.equal(_real(first), _real(second)))
    if first.extents == second.extents:
        return True
    size = first.numel() * first.dtype.itemsize
    for start in range(0, size, _COMPARED_BYTES):
        count = min(_COMPARED_BYTES, size - start)
        pieces = [_read(_take(side.extents or (), start, count), count).view(first.dtype) for side in (first, second)]
        if not torch.equal(*pieces):
            return False
    return True


def _read(extents: Iterable[Extent], size: int) -> torch.Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    view, position = data.numpy().data, 0
    for extent in extents:
        read_extent(extent, view[position : position + extent.bytes])
        position += extent.bytes
    return data


def _real(leaf: Any) -> Any:
    return leaf.materialize() if isinstance(leaf, FileTensor) else leaf


def _gathered(
    func: Any, args: Any, kwargs: Any, inputs: list[FileTensor], metas: dict[int, torch.Tensor], out: torch.Tensor
) -> tuple[Extent, ...] | None:
    """A result's bytes as extents of its inputs' bytes, or None if the operation does more than gather."""
    packet = func.overloadpacket
    if any(leaf.extents is None or leaf.dtype != out.dtype for leaf in inputs):
        return None
    if packet in (aten.cat, aten.stack):
        if len(inputs) != len(args[0]):
            return None
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        pieces = _interleave(list(args[0]), dim % out.dim(), out)
    elif packet in _SAME_BYTES or packet is aten._to_copy:
        pieces = iter(inputs[0].extents or ())
    elif len(inputs) == 1 and metas[id(inputs[0])].untyped_storage()._cdata == out.untyped_storage()._cdata:
        pieces = _strided(inputs[0], out)
    else:
        return None
    return _if_worth_it(pieces, out)


def _if_worth_it(pieces: Iterator[Extent], out: torch.Tensor) -> tuple[Extent, ...] | None:
    limit = max(MAX_PIECES, out.numel() * out.dtype.itemsize // MIN_PIECE_BYTES)
    # Count after merging neighbours, but do not walk the elements of a transposed matrix one by one.
    few = list(itertools.islice(pieces, 64 * limit + 1))
    merged = merge_extents(few)
    return merged if len(few) <= 64 * limit and len(merged) <= limit else None


def _interleave(tensors: list[FileTensor], dim: int, out: torch.Tensor) -> Iterator[Extent]:
    """``cat`` or ``stack`` along ``dim``: for each index before it, one run of bytes from every input in turn."""
    outer = math.prod(out.shape[:dim])
    for index in range(outer):
        for tensor in tensors:
            run_bytes = tensor.numel() * tensor.dtype.itemsize // outer
            yield from _take(tensor.extents or (), index * run_bytes, run_bytes)


def _strided(tensor: FileTensor, out: torch.Tensor) -> Iterator[Extent]:
    """Yield the runs of bytes of a view of a row-major tensor, from its strides."""
    sizes, strides, run = list(out.shape), list(out.stride()), 1
    while sizes and (sizes[-1] == 1 or strides[-1] == run):
        run *= sizes.pop()
        strides.pop()
    item = out.dtype.itemsize
    for index in itertools.product(*map(range, sizes)):
        start = int(out.storage_offset()) + sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield from _take(tensor.extents or (), start * item, run * item)


def _take(extents: tuple[Extent, ...], start: int, count: int) -> Iterator[Extent]:
    """``count`` bytes from ``start`` on of the extents laid end to end."""
    for extent in extents:
        if count <= 0:
            return
        if start < extent.bytes:
            part = min(extent.bytes - start, count)
            yield Extent(path=extent.path, offset=extent.offset + start, bytes=part)
            count -= part
            start = extent.bytes
        start -= extent.bytes
