"""Settings of ``brim run``: a leaf module, which needs no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brim.core.options import RAM_HELP, VRAM_HELP, option
from brim.errors import UsageError
from brim.units import parse_bytes

MODES = ("auto", "stream", "unified", "off")
DEVICES = ("auto", "cuda", "cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # read by CUDA when it is initialized
REPORTS = (".html", ".json")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of ``brim run``. A budget of None is nine tenths of the free memory.

    ``device`` is one of ``DEVICES``, or a GPU by number ("cuda:1"): the program then sees no other. ``report``: the
    file for a report on the decisions for the program's models.
    """

    vram: str | int | None = option(None, VRAM_HELP)
    ram: str | int | None = option(None, RAM_HELP)
    mode: str = option(
        "auto",
        "stream: plan every model. unified: VRAM, then RAM read over the link. auto: stream, or unified if a "
        "model cannot be planned.",
        words={mode: mode for mode in MODES},
    )
    device: str = option(
        "auto",
        "cpu: without CUDA, the program's calls of CUDA run on the CPU. cuda:1: the program sees only that GPU.",
        kind="program_device",
    )
    report: Path | None = option(None, "Write a report on each model: .html or .json.", kind="report")
    managed: bool = option(False, "In unified mode: managed memory instead of page-locked RAM.")
    insist: bool = option(False, "Allow more managed memory than the device has free. This can hang the driver.")

    def __post_init__(self) -> None:
        kind, colon, number = self.device.partition(":")
        numbered = kind == "cuda" and colon and number.isdecimal()
        device = kind if numbered else self.device
        for name, value, allowed in (("mode", self.mode, MODES), ("device", device, DEVICES)):
            if value not in allowed:
                raise UsageError(f"brim run has no {name} {value!r}.", f"Allowed are {', '.join(allowed)}.")
        for amount in (self.vram, self.ram):
            if amount is not None:
                parse_bytes(amount, 1)  # checks the syntax of a share
        if self.report is not None and self.report.suffix not in REPORTS:
            raise UsageError(
                f"Cannot write a report to {self.report}.",
                f"The name ends in {self.report.suffix or 'no suffix'}.",
                f"Use a name that ends in {' or '.join(REPORTS)}.",
            )

    @property
    def index(self) -> int | None:
        """The number of the program's only GPU; None if it was not chosen by number."""
        number = self.device.partition(":")[2]
        return int(number) if number else None

    def show_alone(self, environment: MutableMapping[str, str]) -> None:
        """Let a process with this environment, and its children, see only the chosen GPU.

        It is ``cuda`` in every thread.

        Raises UsageError where ``CUDA_VISIBLE_DEVICES`` does not list it.
        """
        assert self.index is not None
        visible = environment.get(VISIBLE)
        shown = None if visible is None else visible.split(",")
        if shown is not None and self.index >= len(shown):
            raise UsageError(f"Cannot use device {self.device!r}.", f"{VISIBLE}={visible} does not list it.")
        environment[VISIBLE] = str(self.index) if shown is None else shown[self.index].strip()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Settings from ``BRIM_VRAM``, ``BRIM_RAM``, ``BRIM_MODE``, ``BRIM_DEVICE``, ``BRIM_REPORT``, where not
        empty."""
        values: dict[str, Any] = {}
        for name in ("vram", "ram", "mode", "device", "report"):
            value = environment.get(f"BRIM_{name.upper()}", "")
            if value:
                values[name] = Path(value) if name == "report" else value
        return cls(**values)
