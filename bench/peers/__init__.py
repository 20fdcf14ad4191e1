"""The contenders, one file each. A contender is set up as its own documentation says; its conversion is not timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One contender's task: where the weights are, where its own files may go, what it may hold."""

    checkpoint: Path
    scratch: Path
    budget_bytes: int
    weights_bytes: int
    largest_bytes: int  # the largest single weight (the embedding)
    block_bytes: int  # one decoder block


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to run. ``forward`` takes token ids [1, n] and returns logits [1, n, vocabulary]."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    generate: Callable[..., torch.Tensor] | None = None  # as transformers has it, where the contender offers it
    facts: Callable[[], dict[str, Any]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


class Contender(Protocol):
    """What each module here offers."""

    TITLE: str
    PACKAGE: str
    LIMITED: bool  # False: the reference, which holds everything
    CONVERTS_IN_LOAD: bool  # its conversion cannot be kept: memory counts from after the load

    def prepare(self, setting: Setting) -> None:
        """Its own conversion, once per checkpoint, neither timed nor limited."""

    def load(self, setting: Setting) -> Loaded: ...


# The visible list; "resident" is the reference: what the forward takes, and gives, when all weights are in memory.
# "beside_reads" is the same while the disk reads what a budget leaves out: perfect overlap, on this very machine.
NAMES = (
    "resident",
    "beside_reads",
    "brim_load",
    "accelerate_disk",
    "transformers_auto",
    "airllm_cpu",
    "ramtorch_nvme",
    "mmap_state",
)


def contender(name: str) -> Contender:
    return cast(Contender, importlib.import_module(f"peers.{name}"))


def empty_model(checkpoint: Path) -> Any:
    """The transformers model without weights, its computed buffers in place."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        factory: Any = AutoModelForCausalLM
        return factory.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.float32).eval()
