"""Runs samples of PyTorch's operators on a device or in traces of one process, a line of JSON for each."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
_LINE = re.compile(r"\.py:\d+")
_BLOCK_BYTES = 512


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another order: one of operators.py's ``LAYOUTS``."""
    if tensor.layout != torch.strided or tensor.dim() < 2:
        return tensor
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "cut":
        rows = tensor.new_zeros(*tensor.shape[:-1], tensor.size(-1) + 3)
        rows[..., 1:-2] = tensor
        return rows[..., 1:-2]
    if layout == "channels-last" and tensor.dim() in (4, 5):
        return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
    return tensor


def _grown(op: Any, sample: Any, times: int) -> tuple[Any, ...] | None:
    """A sample with so many times as many rows; None where the operator does not take that."""
    first = next((one for one in tree_leaves(sample.input) if isinstance(one, torch.Tensor) and one.dim()), None)
    if first is None or first.layout != torch.strided:
        return None

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.size(0) != first.size(0):
            return tensor
        return tensor.detach().repeat(times, *[1] * (tensor.dim() - 1)).requires_grad_(tensor.requires_grad)

    made: tuple[Any, ...] = tree_map_only(torch.Tensor, longer, (sample.input, sample.args, sample.kwargs))
    try:
        op(made[0], *made[1], **made[2])
    except Exception:  # whatever says that its inputs do not belong together
        return None
    return made


def samples(
    names: list[str], most: int, layout: str, half: bool, times: int
) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Up to ``most`` of each operator (all, or ``names``): a name, and what moves its inputs to the GPU and returns a
    step."""
    for op in op_db:
        if names and _name(op) not in names:
            continue
        dtypes = (torch.bfloat16,) if half else _DTYPES
        dtype = next((one for one in dtypes if one in op.dtypesIfCUDA), None)
        if dtype is None:
            continue
        grad = dtype.is_floating_point and op.supports_autograd
        torch.manual_seed(0)
        try:
            made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), most))
        except Exception:  # such samples need what this machine lacks
            continue
        for number, sample in enumerate(made):
            inputs = _grown(op, sample, times) if times > 1 else (sample.input, sample.args, sample.kwargs)
            if inputs is not None:
                yield f"{_name(op)}:{number}", _build(op, inputs, layout)


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _build(op: Any, inputs: tuple[Any, ...], layout: str) -> Callable[[], Callable[[], Any]]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return _laid_out(tensor.detach().cuda(), layout).requires_grad_(tensor.requires_grad)

    def build() -> Callable[[], Any]:
        first, args, kwargs = tree_map_only(torch.Tensor, move, inputs)
        kwargs = {name: torch.device("cuda") if isinstance(value, torch.device) else "cuda" if name == "device" else
                  value for name, value in kwargs.items()}  # fmt: skip

        def step() -> Any:
            made = op(first, *args, **kwargs)
            roots = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor) and one.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
            return made

        return step

    return build


def measured(build: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    """What a step allocates at its peak, above what its inputs take."""
    torch._C._cuda_clearCublasWorkspaces()  # each sample as in a process of its own
    gc.collect()
    step = build()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
    made = step()
    peak = torch.cuda.max_memory_allocated() - before
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    del made
    return {"peak": peak, "sizes": sizes}


def traced(build: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    import brim
    from brim.errors import BrimError
    from brim.estimation.simulation import lives
    from brim.predict.lowering.cuda import convolution

    convolution._MEASURED = None  # the rehearsal device's cuDNN has one engine, without a workspace
    try:
        made = brim.trace(build, steps=1, target="cuda", capability=(9, 0))
    except BrimError as error:
        return {"refused": " ".join(str(error).split())[:300], "names_line": bool(_LINE.search(str(error)))}
    begins = made.step_starts[0]
    held = most = 0
    sizes = []
    for storage, born, _ in lives(made):
        if (storage.born if born else storage.died or 0) < begins:
            continue
        held += (-(-storage.bytes // _BLOCK_BYTES) * _BLOCK_BYTES) * (1 if born else -1)
        most = max(most, held)
        if born:
            sizes.append(storage.bytes)
    return {"peak": most, "sizes": sizes, "asked": bool(made.notes), "not_modelled": list(made.not_modelled)}


def main() -> None:
    how, most, begin, layout, dtypes, times, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    gc.freeze()  # the table of all operators is not looked through for each sample
    run = measured if how == "device" else traced
    for number, (name, build) in enumerate(samples(names, int(most), layout, dtypes == "half", int(times))):
        if number < int(begin):
            continue
        print(json.dumps({"number": number, "name": name}), flush=True)
        try:
            answer = run(build)
        except Exception as error:
            answer = {"failed": "".join(traceback.format_exception_only(error))[:300],
                      "where": traceback.format_exc()[-600:]}  # fmt: skip
        print(json.dumps({"name": name} | answer), flush=True)


if __name__ == "__main__":
    main()
