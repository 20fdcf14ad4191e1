"""The options of ``brim plan``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from brim.cli.options import JSON, SETTINGS, SVG, OutputFile, html_field, json_field
from brim.core.options import option
from brim.requests.plan import MeshRequest


def file_name(output: Path, index: int) -> Path:
    """``plan.json``, ``plan.2.json``, ..."""
    return output if index == 0 else output.with_name(f"{output.stem}.{index + 1}{output.suffix}")


class _PlanFiles(OutputFile):
    """Return the file of the first plan, and those of the other plans in the same folder."""

    def further(self, path: Path, params: Mapping[str, Any]) -> Iterator[Path]:
        if any(params[name] for name in ("engine_name", "gpus", "compare_gpus")):
            return  # one file
        name = re.compile(rf"{re.escape(path.stem)}\.([0-9]{{1,9}}){re.escape(path.suffix)}")
        named = [entry for entry in params.values() if isinstance(entry, Path)]
        there = [entry.name for entry in named if entry.parent.resolve() == path.parent.resolve()]
        for other in sorted({*(entry.name for entry in path.parent.iterdir()), *there}):
            match = name.fullmatch(other)
            if (
                match is not None
                and file_name(path, int(match[1]) - 1).name == other
                and 2 <= int(match[1]) <= params["top"]
            ):
                yield path.with_name(other)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(MeshRequest):
    """The options of ``brim plan``: a request, and its answer's form."""

    engine_name: Literal["accelerate", "llama.cpp", "vllm", "diffusers", "deepspeed", "fsdp"] | None = option(
        None, "Write the settings with which another engine runs MODEL inside the budgets.", flags=("--for",)
    )
    compare_gpus: tuple[int, ...] | None = option(
        None, kind="gpu_counts", metavar="1,2,4,8", help="Compare a training on these numbers of GPUs."
    )
    price: float | None = option(None, min=0, help="With --compare-gpus: price of one GPU for one hour.")
    precisions: bool = option(False, "Compare each kind of block in int8 and in 16 bits.")
    output: Path | None = option(
        None,
        kind=_PlanFiles(JSON, SVG, SETTINGS),
        help="Write plan 1 to this file, for --plan, and other plans next to it (plan.2.json). With --compare-gpus: "
        "write its plot (SVG). With --for: write the engine's file, or its command.",
    )
    html: Path | None = html_field()
    as_json: bool = json_field()
