"""The options by which several commands split a job over GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from brim.core.options import option_fields
from brim.errors import UsageError
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.split import Split


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def split_of(
    values: Mapping[str, Any], engine: str | None, megatron: Mapping[str, Any], *, batch: int = 1
) -> Split | None:
    """The split of the options that were given; None where one GPU is meant.

    Raises UsageError where they are given without ``--gpus``, or Megatron-LM's for another engine.
    """
    if megatron and engine != "megatron":
        raise UsageError(
            f"Cannot use {_flags(MegatronOptions, megatron)} without --engine megatron.",
            "Other engines have no such options.", "Give --engine megatron.",
        )  # fmt: skip
    if "gpus" not in values:
        flags = " and ".join(filter(None, [_flags(Split, values), "" if engine is None else "--engine"]))
        if flags:
            raise UsageError(f"Cannot use {flags} without --gpus.", "It splits a job over GPUs.", "Give --gpus.")
        return None
    if batch != 1:
        raise UsageError("Cannot use --batch with --gpus.", todo="Give --micro-batch and --global-batch.")
    if values.get("offload_shards") and values["gpus"] == 1:
        raise UsageError(
            "Cannot use --offload-shards with one GPU.", "There are no shards on one GPU.",
            "Give more --gpus; brim plan finds what one GPU can do with its host's RAM.",
        )  # fmt: skip
    return Split(**values)


def _flags(kind: type, names: Iterable[str]) -> str:
    return " and ".join(field.flag for field in option_fields(kind) if field.name in names)
