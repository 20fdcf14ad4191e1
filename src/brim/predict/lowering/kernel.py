"""Allocations of one kernel: the script that a rule writes and the recorder plays.

A rule is a function of a :class:`Kernel`. It says which temporaries the real kernel takes, in which order with the
outputs, and which are freed before the end; what is still held when the rule returns is freed there, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from brim.core.trace import Reduction
from brim.model_inputs import tensors_in

# In order: ("alloc", number, bytes), ("free", number, 0), ("out", number of the result's tensor, bytes), and
# ("keep", 0, bytes) for a library's workspace.
Script = tuple[tuple[str, int, int], ...]
TEMPORARIES = "its temporaries"  # not known here; PyTorch's CUDA build answers them


@dataclass(slots=True)
class Kernel:
    """A call of a kernel. ``outputs`` are the tensors whose storages are new, in the order of the result."""

    func: torch._ops.OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: list[torch.Tensor]
    result: Any
    on_device: bool = True  # False: of tensors on the host, which are the device's in a program that names none
    crossing: str | None = None  # of a copy between host and device: TO_DEVICE or TO_RAM
    stream: int = 0  # the number of the stream that it runs on
    capability: tuple[int, int] = (0, 0)  # of the GPU
    # Of the whole trace: what libraries have a workspace for.
    workspaces: set[Hashable] = field(default_factory=set)
    script: list[tuple[str, int, int]] = field(default_factory=list)  # (what, handle or output, bytes)
    libraries: list[str] = field(default_factory=list)  # whose workspaces it keeps, by the handles of these
    unknown: str = ""  # what the kernel takes besides, of unknown size
    reductions: dict[int, Reduction] = field(default_factory=dict)  # by the handles of their workspaces
    _handles: int = 0
    _emitted: set[int] = field(default_factory=set)

    def temp(self, bytes: int) -> int:
        """Take a temporary; returns a handle for ``free``. Kernels skip empty ones as the allocator does."""
        self._handles += 1
        if bytes > 0:
            self.script.append(("alloc", self._handles, int(bytes)))
        return self._handles

    def passing(self, bytes: int) -> None:
        """Take a temporary, and free it before anything else is taken."""
        self.free(self.temp(bytes))

    def contiguous(self, tensor: torch.Tensor | None) -> int:
        """Take what ``contiguous()`` copies of the tensor: nothing where it is dense, or not given."""
        return self.temp(0 if tensor is None or tensor.is_contiguous() else nbytes(tensor))

    def workspace(self, bytes: int, reduction: Reduction) -> int:
        """Take a reduction's workspace, which is written down where it is empty too: it is not at other sizes."""
        self._handles += 1
        self.reductions[self._handles] = reduction
        self.script.append(("alloc", self._handles, bytes))
        return self._handles

    def keep(self, bytes: int, library: str, *place: Hashable) -> None:
        """Take a library's workspace, which is never given back, where it has none for this place yet."""
        if (key := (library, self.on_device, *place)) not in self.workspaces:
            self.workspaces.add(key)
            self.script.append(("keep", len(self.libraries), bytes))
            self.libraries.append(library)

    def free(self, *handles: int) -> None:
        self.script.extend(("free", handle, 0) for handle in handles)

    def name(self, unknown: str = TEMPORARIES) -> None:
        """Name the kernel as one that also takes memory of unknown size."""
        self.unknown = f"{self.func.overloadpacket}: {unknown}"

    def emit(self, index: int | None = None, bytes: int = -1) -> None:
        """Allocate output ``index`` (all that are left: None) here; ``bytes`` where the real storage differs."""
        indices = range(len(self.outputs)) if index is None else (index,)
        for output_index in indices:
            if output_index < len(self.outputs) and output_index not in self._emitted:
                self._emitted.add(output_index)
                self.script.append(("out", output_index, bytes))

    def drop(self, tensor: torch.Tensor | None) -> None:
        """The real kernel makes no storage for this output."""
        for index, output in enumerate(self.outputs):
            if output is tensor and index not in self._emitted:
                self._emitted.add(index)
                self.script.append(("out", index, 0))

    def play(self, script: Script, keep: Callable[[Kernel], None] | None = None, *, by_values: bool = False) -> None:
        """Take what a script of a real run says. ``keep`` takes a library's workspace.

        ``by_values``: results are as long as values say, which the real run did not have.
        """
        results = tensors_in(self.result)
        handles: dict[int, int] = {}
        for action, number, bytes in script:
            if action == "alloc":
                handles[number] = self.temp(bytes)
            elif action == "out":
                expected = by_values or bytes == results[number].untyped_storage().nbytes()
                self._emit_storage(results[number], -1 if expected else bytes)
            elif action == "free":
                if by_values:
                    self.emit()
                self.free(handles[number])
            elif keep is not None:
                keep(self)
        for result in () if by_values else results:
            self.drop(result)  # the real kernel made no storage for it

    def _emit_storage(self, result: torch.Tensor, bytes: int) -> None:
        home = result.untyped_storage()._cdata
        for index, output in enumerate(self.outputs):
            if output.untyped_storage()._cdata == home:
                self.emit(index, bytes=bytes)

    def arg(self, name: str) -> Any:
        """An argument by its name in the schema, defaults included."""
        if name in self.kwargs:
            return self.kwargs[name]
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                return self.args[index] if index < len(self.args) else argument.default_value
        raise KeyError(name)


Rule = Callable[[Kernel], None]


def contiguous_before(*names: str) -> Rule:
    """A kernel that reads dense copies of these arguments, made before its outputs."""

    def rule(kernel: Kernel) -> None:
        for name in names:
            kernel.contiguous(kernel.arg(name))
        kernel.emit()

    return rule


def contiguous_after(*names: str) -> Rule:
    """As ``contiguous_before``; the copies are made after the outputs."""

    def rule(kernel: Kernel) -> None:
        kernel.emit()
        for name in names:
            kernel.contiguous(kernel.arg(name))

    return rule


def dense_or_channels_last(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous or has its channels last."""
    return tensor.is_contiguous() or has_channels_last(tensor)


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Return True if the channels are last, also where their number or that of all points is one."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)


def is_channels_last(tensor: torch.Tensor) -> bool:
    return dense_or_channels_last(tensor) and not tensor.is_contiguous()


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense copy of the tensor."""
    return tensor.numel() * tensor.element_size()


def copied_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in the tensor's suggested layout; 0 where it has that layout."""
    layout = torch._prims_common.suggest_memory_format(tensor)
    return 0 if tensor.is_contiguous(memory_format=layout) else nbytes(tensor)
