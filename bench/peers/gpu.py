"""The contenders of streaming_gpu.py: the host holds the model, the device a part of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch


@dataclass(frozen=True, kw_only=True)
class Task:
    """One contender's task: the module (weights in host memory), the device, and what it may hold there.

    ``example``: what the module will be called with.
    """

    module: Any
    device: torch.device
    budget_bytes: int
    example: dict[str, Any]
    working_bytes: int  # what the forward itself needs, for tools that are told only how much to keep


@dataclass(frozen=True, kw_only=True)
class Applied:
    """``facts`` may give ``streamed_bytes``, counted from the start."""

    facts: Callable[[], dict[str, Any]] = field(default=dict)
    remove: Callable[[], Any] = field(default=lambda: None)


class GpuContender(Protocol):
    """What each ``gpu_*`` module here offers. ``WARMUP``: forwards until its speed is the one it will keep."""

    TITLE: str
    WARMUP: int
    CAPPED: bool

    def apply(self, task: Task) -> Applied: ...


GPU_NAMES = ("gpu_resident", "gpu_brim", "gpu_accelerate", "gpu_diffusers", "gpu_mmgp", "gpu_flextensor")


def gpu_contender(name: str) -> GpuContender:
    return cast(GpuContender, importlib.import_module(f"peers.{name}"))
