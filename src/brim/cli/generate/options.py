"""The options of ``brim generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from brim.cli.options import html_field, json_field
from brim.core.options import option
from brim.requests.generate import Request


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Request):
    """The options of ``brim generate``: a request, its ranks, and its report's form."""

    prompts: Path | None = option(
        None,
        "A file with one prompt per line, or .jsonl with objects that have a prompt. Blank lines are skipped.",
        kind="existing_file",
        after="prompt",
    )
    context: int | None = option(
        None, "Maximum number of tokens of a conversation.  [default: 4096, or the model's]", min=2, after="stop"
    )
    gpus: int | None = option(None, "Split the model over this number of GPUs or CPU processes.", min=1)
    split: Literal["layers", "tensors"] | None = option(
        None, "With --gpus: split layers, or tensors.  [default: layers]"
    )
    timeout: float | None = option(None, "With --gpus: seconds to wait for a rank.  [default: 600]", min=1)
    html: Path | None = html_field()
    as_json: bool = json_field()
