"""The options of ``brim generate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from brim.core.options import RAM_HELP, VRAM_HELP, Device, check, device_option, option, option_group
from brim.errors import UsageError
from brim.requests.plan import PRECISIONS_OF
from brim.requests.sampling import GREEDY, Sampling, check_stops

_AUTO: dict[str, Any] = {"auto": "auto"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A generation. ``prompt``: a text, or several for ``generate_many``; None in a conversation."""

    model: str | Path = option(kind="model", argument=True)
    prompt: str | Sequence[str] | None = option(
        None, "The prompt. The chat template is applied to it if the model has one. - reads it from stdin."
    )
    batch: int | Literal["auto"] = option(
        "auto", "Number of --prompts to process at once; auto: as many as fit.", min=1, words=_AUTO
    )
    prefill_chunk: int | Literal["auto"] = option(
        "auto",
        "Tokens of a prompt to process at once; auto: all, or as many as fit.",
        min=1,
        words=_AUTO,
    )
    vram: str | int | None = option(None, VRAM_HELP)
    ram: str | int | None = option(None, RAM_HELP)
    device: Device = device_option()
    precision: str | None = option(
        None,
        "fp32, bf16, fp16, int8 or int4; weights are converted once. Default: as stored.",
        names=PRECISIONS_OF["generate"],
    )
    plan: str | Path | None = option(None, "Run exactly the plan in this file, which brim plan wrote.")
    host_compute: bool = option(
        True,
        "Let the CPU compute blocks if that is faster; its results differ from the GPU's in the last bits.  "
        "[default: on]",
    )
    cuda_graphs: bool = option(
        True,
        "Launch a token's pass, or each streamed block, as one CUDA graph; results differ in the last bits.  "
        "[default: on]",
    )
    max_new_tokens: int = option(128, min=1)
    system: str | None = option(
        None, "System message, which the chat template puts before the prompt or conversation."
    )
    sampling: Sampling = option_group(Sampling, GREEDY)
    stop: Sequence[str] = option((), "End an answer before this text. May be given several times.")
    chat: bool | None = option(
        None, "Use the chat template or not; default: if the model has one.", flags=("--chat/--no-chat",)
    )
    verify: bool = option(False, "First compare a hub download with its SHA-256, which reads the whole download.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model. Off by default.")

    def check(self) -> None:
        """Raise UsageError for contradictory values."""
        check(self)
        self.sampling.check()
        check_stops(self.stop)
        if self.system is not None and self.chat is False:
            raise UsageError("Cannot use --system with --no-chat.", "Only a chat template has a place for it.")
        for flag, value in (("--batch", self.batch), ("--prefill-chunk", self.prefill_chunk)):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{flag} {value} was given.", "It must be auto, or a number from 1 on.")
        settled = {"--vram": self.vram, "--ram": self.ram, "--precision": self.precision}
        settled |= {"--batch": self.batch, "--prefill-chunk": self.prefill_chunk}
        given = [option for option, value in settled.items() if value not in (None, "auto")]
        given += ["--no-host-compute"] * (not self.host_compute)
        if self.plan is not None and given:
            raise UsageError(
                f"Cannot use {', '.join(given)} with a plan.", "The plan decides that.", "Leave out one."
            )
