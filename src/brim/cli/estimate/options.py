"""The options of ``brim estimate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.cli.options import html_field, json_field
from brim.core.options import option, option_group
from brim.estimation.ranks.job import MegatronOptions
from brim.estimation.ranks.split import Split
from brim.estimation.workload import Workload


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """The options of ``brim estimate``. ``arguments`` are a program's own."""

    model: str = option(kind="described_model", argument=True)
    arguments: tuple[str, ...] = option((), kind="program", argument=True, metavar="[ARGS]...")
    workload: Mapping[str, Any] = option_group(Workload)
    compiled: bool = option(
        False,
        flags=("--compile",),
        help="With --gpus: compile each block with torch.compile, with checkpointing inside.",
    )
    gpu: str | None = option(
        None,
        kind="gpu",
        help='The GPU, for example "RTX 4090". Without it, memory is unlimited and no seconds are predicted.',
    )
    vram: str | int | None = option(
        None,
        "Memory of a GPU that is not in the catalog; no seconds are predicted. With --gpu, its free memory: "
        "20GiB or 90%.",
    )
    alloc_conf: str = option("", 'Settings of PyTorch\'s allocator, for example "expandable_segments:True".')
    split: Mapping[str, Any] = option_group(Split, only_given=True)
    engine: str | None = option(
        None, "torch (FSDP2, DTensor, pipelining) or megatron (with Transformer Engine). [default: torch]"
    )
    megatron: Mapping[str, Any] = option_group(MegatronOptions, only_given=True)
    html: Path | None = html_field()
    as_json: bool = json_field()
