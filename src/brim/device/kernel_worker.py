"""The resident process: PyTorch's CUDA build on the device answers what operators allocate, one at a time.

Each line on standard input is a call as JSON (see ``kernels``), each line on standard output its answer:
``{"script": [...]}`` or ``{"error": "..."}``. An entry of a script is ``["alloc", handle, bytes]``,
``["free", handle, 0]``, ``["out", leaf, bytes]`` for the storage of the result's leaf of that number, or
``["keep", 0, bytes]`` for memory that stays but is not part of the result, such as cuBLAS's workspace.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_MOST_EVENTS = 100_000
_RELEASE_ABOVE_BYTES = 1 << 36  # of the allocator's addresses


def decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        shape, strides, offset, dtype, device = content
        return _tensor(shape, strides, offset, getattr(torch, dtype), device)
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    return getattr(torch, content)  # a dtype, a layout or a memory format


def _tensor(shape: list[int], strides: list[int], offset: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.empty(last + 1 if 0 not in shape else offset, dtype=dtype, device=device)
    return flat.as_strided(shape, strides, offset)


def answer(call: dict[str, Any]) -> list[list[Any]]:
    namespace, name, overload = call["op"].split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    args = decoded(call["args"])
    kwargs = {key: decoded(value) for key, value in call["kwargs"].items()}
    torch.set_default_dtype(decoded(call["default"]))
    torch._C._cuda_clearCublasWorkspaces()  # they belong to a stream, not to the operator
    given = {storage.data_ptr() for storage in _storages([args, kwargs])}
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS, context=None)
    try:
        with torch.no_grad():
            result = operator(*args, **kwargs)
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    leaves = {storage.data_ptr(): index for index, storage in reversed([*enumerate(_storages(result))])}
    resized = {storage.data_ptr() for storage in _storages([args, kwargs])} - given
    return _script(events, leaves, resized)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    nowhere = torch.UntypedStorage(0)  # of zeros that are known to be zeros
    return [nowhere if tensor._is_zerotensor() else tensor.untyped_storage() for tensor in tensors]


def _script(events: list[dict[str, Any]], leaves: dict[int, int], resized: set[int]) -> list[list[Any]]:
    """Return the events with handles instead of addresses, without those of resized arguments."""
    script: list[list[Any]] = []
    open_at: dict[int, int] = {}  # address -> position of its allocation in the script
    for event in events:
        address = event["addr"]
        if event["action"] == "alloc":
            open_at[address] = len(script)
            script.append(["alloc", len(script), event["size"]])
        elif event["action"] == "free_requested" and address in open_at:
            script.append(["free", open_at.pop(address), 0])
    left_out = set()
    for address, index in open_at.items():
        bytes = script[index][2]
        if address in leaves:
            script[index] = ["out", leaves[address], bytes]
        elif address in resized:
            left_out.add(index)
        else:
            script[index] = ["keep", 0, bytes]
    return [entry for index, entry in enumerate(script) if index not in left_out]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    torch.cuda.init()
    for line in sys.stdin:
        try:
            said: dict[str, Any] = {"script": answer(json.loads(line))}
        except Exception as error:  # any error of the operator is the answer
            said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(said), file=answers, flush=True)
        if torch.cuda.memory_reserved() > _RELEASE_ABOVE_BYTES:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
