"""Enforce a mode of values in a process: by its environment, as soon as it has imported PyTorch.

``BRIM_REHEARSAL_VALUES`` is ``whole`` (integers, booleans and small floats are computed, other values are made up) or
``all`` (every operator is computed); without it nothing happens. ``startup`` beside this file is a folder for
``PYTHONPATH``: Python imports its ``sitecustomize`` in every process, so it holds for children too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from brim import device
from brim.errors import UnsupportedError, UsageError
from brim.run.script.import_hook import when_imported

VARIABLE = "BRIM_REHEARSAL_VALUES"
MODES = ("whole", "all")
STARTUP = Path(__file__).with_name("startup")

# Operators that create, reshape or describe tensors without a kernel, or only read them.
_NO_KERNEL = frozenset(
    """empty empty_strided empty_permuted as_strided view view_as_complex view_as_real _reshape_alias unfold
    resize_ set_ record_stream is_pinned _pin_memory _efficientzerotensor
    _cudnn_init_dropout_state _cudnn_rnn_flatten_weight _nested_view_from_buffer is_set_to _assert_async
    _debug_has_internal_overlap _use_cudnn_ctc_loss _use_miopen_ctc_loss _nested_from_padded
    _nested_tensor_from_mask _local_scalar_dense_backward _resize_output_""".split()  # noqa: SIM905
)


def environment(mode: str, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with which a process and its children compute values. ``mode``: ``whole`` or ``all``.

    ``inherited``: the environment to extend; None extends that of this process.
    """
    inherited = os.environ if inherited is None else inherited
    source = str(Path(__file__).parents[2])  # brim's own folder: the other interpreter may not have it installed
    paths = [str(STARTUP), source, *filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))]
    return {VARIABLE: _checked(mode), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def by_environment() -> None:
    """Enforce the mode of the environment when PyTorch is imported."""
    mode = os.environ.get(VARIABLE, "")
    if mode:
        _checked(mode)
        when_imported("torch", lambda _: InForce.put(mode))


class InForce:
    """The values in force in this process."""

    now: InForce | None = None

    def __init__(self, mode: str) -> None:
        import torch

        from brim.rehearsal import values_library
        from brim.rehearsal.made_up import Reads

        self.mode, self.reads = mode, Reads()
        self._native = values_library.load(Path(torch.__file__).parents[1])
        self._libraries: list[torch.library.Library] = []  # their registrations end with them
        self._native.brim_values_mode(int(mode == "all"))
        self.host_weights: HostWeights | None = None  # in mode ``all`` weights are computed too

    @classmethod
    def put(cls, mode: str) -> InForce:
        """Replace the kernels of this process. It can be done once in a process."""
        assert cls.now is None, "values are put into force once"
        in_force = cls(_checked(mode))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about overridden kernels
            in_force._callbacks()
            in_force._references()
            in_force._replace()
            in_force._join_device()
            if mode == "whole":
                in_force._leave_host_weights()
        cls.now = in_force
        return in_force

    @property
    def not_computed(self) -> list[str]:
        """Operators without a kernel for the CPU."""
        return sorted(self._native.brim_values_failed().decode().split())

    @property
    def attention(self) -> dict[str, int]:
        """Count of each kernel that ``scaled_dot_product_attention`` chose (flash, efficient, cudnn, math)."""
        lines = self._native.brim_values_attention().decode().splitlines()
        return {name: int(times) for name, times in map(str.split, lines)}

    def _join_device(self) -> None:
        """Connect to the device: it works asynchronously, so kernels wait for what their stream is ordered after, and
        it tells whether a graph is being captured."""
        try:
            library = device.loaded().library
        except UnsupportedError:
            return  # another simulated CUDA, which works synchronously
        self._native.brim_values_device(
            library.brim_device_begin_kernel,
            library.brim_device_kernel_access,
            library.brim_device_capture,
            library.brim_device_next_count,
        )

    def _leave_host_weights(self) -> None:
        if self._native.brim_values_host_copies():
            raise UnsupportedError("Cannot replace copies on the host.", self._native.brim_values_error().decode())
        self.host_weights = HostWeights()

    def _callbacks(self) -> None:
        import torch

        from brim.rehearsal import made_up

        library = torch.library.Library("brim_rehearsal", "DEF")
        library.define("noted(str what, bool is_integer) -> ()")
        library.define("make_up(str name, Tensor[] inputs, int[] integers, float? number, Tensor[] results) -> ()")
        library.impl("noted", self.reads.note, "CompositeExplicitAutograd")
        library.impl("make_up", made_up.fill, "CompositeExplicitAutograd")
        self._libraries.append(library)

    def _references(self) -> None:
        import torch

        from brim.rehearsal import references

        library = torch.library.Library("aten", "IMPL")
        for overload, function in references.overloads():
            library.impl(overload, references.bound(overload, function, self._native.brim_values_seed), "PrivateUse1")
        self._libraries.append(library)

    def _replace(self) -> None:
        import torch

        for name in sorted(torch._C._dispatch_get_all_op_names()):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if not name.startswith("aten::") or packet in _NO_KERNEL:
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") and packet + overload != "copy_":
                continue
            tags = getattr(getattr(torch.ops.aten, packet), overload or "default").tags
            random = torch.Tag.nondeterministic_seeded in tags
            if self._native.brim_values_replace(f"aten::{packet}".encode(), overload.encode(), int(random)):
                raise UnsupportedError(
                    f"Cannot replace the kernel of {name}.", self._native.brim_values_error().decode()
                )
        if self._native.brim_values_other_keys():
            raise UnsupportedError("Cannot replace other kernels.", self._native.brim_values_error().decode())


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(f"Unknown mode {VARIABLE}={mode}.", f"Known: {' and '.join(MODES)}.")
    return mode


LARGE_BYTES = 8 << 20  # as in values.cpp
_INITIALISERS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
    "kaiming_normal_", "orthogonal_", "sparse_",
)  # fmt: skip


class HostWeights:
    """Leaves large weights that a program creates on the CPU untouched, so that they take no RAM; they read as zeros.

    On the device large floats are made up anyway; without this, a model of 8 billion parameters that is created on
    the CPU and moved to the GPU would take 32 GB of RAM of the machine that rehearses it. ``left_bytes``: of them.
    """

    def __init__(self) -> None:
        from torch.nn import init

        self.left_bytes = 0
        for name in _INITIALISERS:
            setattr(init, name, self._around(getattr(init, name)))

    def _around(self, initialise: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(initialise)
        def _initialise(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if not self._is_left(tensor):
                return initialise(tensor, *arguments, **named)
            self.left_bytes += tensor.nbytes
            return tensor

        return _initialise

    @staticmethod
    def _is_left(tensor: Any) -> bool:
        import torch

        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if not plain or not tensor.is_floating_point() or tensor.nbytes < LARGE_BYTES:
            return False
        return bool(torch.ops.brim_rehearsal.left_zero(tensor.detach()))
