"""Watch a program that has imported PyTorch: the planner is imported only when its first model is called."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from brim.core.hardware import RAM, VRAM
from brim.errors import BrimError, UsageError, first_line
from brim.measure.capacity import amount_bytes, free_bytes
from brim.printable import write_note
from brim.run.script.hooks import Call, Watcher, parameter_bytes
from brim.run.script.settings import VISIBLE, Settings
from brim.units import format_bytes, is_share

if TYPE_CHECKING:
    from brim.run.script.ample import Ample
    from brim.run.script.decide import Decisions
    from brim.run.script.device import PretendedDevice
    from brim.run.script.moves import DeferredMoves
    from brim.run.script.outcome import Outcome
    from brim.run.script.unified import Unified


_LARGE_BYTES = 1 << 20  # of new parameters: their model is looked up at once
_SMALL_SHARE = 64  # a step that takes less than this part of the budget is not planned
_LEAST_BYTES = 1 << 30  # assumed for a GPU's memory without a budget: asking for its size initializes CUDA
_TRIES = 3  # calls of a model with gradients until its optimizer exists
# Kernels' buffers, threads and caches of a prediction are outside of the tensors that budgets cover.
_BESIDE_TENSORS_BYTES = 64 << 20


class Launched:
    """The effects of brim on a program. ``refusal`` is the error with which brim ended it, if any."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.refusal: BrimError | None = None
        self.is_above_budget = False  # set at the end
        self._small_bytes = _least_budget_bytes(settings) // _SMALL_SHARE
        self._watcher = Watcher(self._decide, large_bytes=max(1, min(_LARGE_BYTES, self._small_bytes)))
        self._ample: Ample | None = None
        self._growth: Growth | None = None
        self._left_alone: dict[str, None] = {}  # names of models, in order
        self._decisions: Decisions | None = None
        self._device: PretendedDevice | None = None
        self._unified: Unified | None = None
        self._moves: DeferredMoves | None = None
        self._tries: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    @property
    def outcomes(self) -> list[Outcome]:
        return [] if self._decisions is None else self._decisions.outcomes

    def begin(self) -> None:
        """Begin right after the import of PyTorch.

        Raises UnsupportedError for unified mode without CUDA or RMM, UsageError for a GPU that is not there.
        """
        try:
            self._begin()
        except BrimError as error:
            self.refusal = error
            raise

    def _begin(self) -> None:
        if self.settings.index is not None:
            _check_alone(self.settings.device)
            self.settings = replace(self.settings, device="cuda")
        if self.settings.device == "cpu" and not _sees_cuda():
            from brim.run.script.device import PretendedDevice

            self._device = PretendedDevice()
            self._device.begin()
        if self.settings.mode == "unified":
            from brim.run.script.unified import Unified

            self._unified = Unified.for_process(self.settings)
        if self.settings.mode in ("auto", "stream"):
            if self.settings.device != "cpu" and self.settings.vram is not None and _sees_cuda():
                self._defer(self.settings.vram)
            self._watcher.begin()

    def _defer(self, vram: str | int) -> None:
        from brim.run.script.moves import DeferredMoves

        moves = self._moves = DeferredMoves(lambda: amount_bytes(vram, VRAM))
        self._watcher.on_armed = lambda armed: moves.begin() if armed else moves.end()

    def end(self) -> None:
        """End with the program: report growth, spilled bytes and decisions."""
        self._watcher.end()
        above = None if self._growth is None or self._unified is not None else self._growth.above()
        if above is not None:
            self.is_above_budget = True
            names = ", ".join(self._left_alone)
            why = f" ({names} as it is: make the largest call first)" if names else ""
            write_note(f"{above}{why}", red=True)
        if self._unified is not None:
            self._unified.write_summary(sys.stderr)
        if self.settings.report is not None:
            from brim.run.script.report import write_report

            write_report(self.settings.report, self.settings, self.outcomes, self._unified)
        if self._device is not None:
            self._device.end()

    def explain(self, error: BaseException) -> None:
        """Write the explanation of ``brim explain`` for an out-of-memory error to stderr; nothing for other
        errors."""
        from brim.run.script.retry import explanation

        for line in explanation(error):
            write_note(line)

    def _decide(self, call: Call) -> None:
        growth = self._growth or self._new_growth(call.model)
        try:
            outcome = None if self._is_negligible(call) else self._certain(call) or self._planned(call)
        except BrimError as error:
            self.refusal = error
            raise
        except Exception as error:  # the program must run as without brim
            name = type(call.model).__name__
            write_note(f"{name} is left as it is: {type(error).__name__}: {first_line(error)}")
            outcome = None
        self._note_growth(growth, call.model, outcome)
        if outcome is None:
            return
        if self._moves is not None and outcome.choice != "fitted":
            self._moves.finish(call.model)
        if outcome.has_optimizer or not any(p.requires_grad for p in call.model.parameters()):
            return
        tries = self._tries.get(call.model, 0)
        if outcome.task == "forward" or tries < _TRIES:  # it may be trained later
            self._tries[call.model] = tries + (outcome.task == "train")
            self._watcher.watch_again(call.model)

    def _is_negligible(self, call: Call) -> bool:
        return parameter_bytes(call.model) < self._small_bytes and self._bound().is_negligible(
            call, self._small_bytes
        )

    def _bound(self) -> Ample:
        from brim.run.script.ample import Ample

        if self._ample is None:
            self._ample = Ample(self.settings)
        return self._ample

    def _new_growth(self, model: nn.Module) -> Growth:
        growth = Growth(self.settings, on_gpu=self.settings.device != "cpu" and _sees_cuda())
        growth.note(model)
        return growth

    def _note_growth(self, growth: Growth, model: nn.Module, outcome: Outcome | None) -> None:
        if outcome is None or outcome.choice != "fitted":
            self._left_alone[type(model).__name__] = None
        if self._growth is None:
            pools = () if outcome is None else outcome.pools
            growth.note(model, sum(pool.held_bytes for pool in pools if pool.tier == RAM))
            self._growth = growth

    def _certain(self, call: Call) -> Outcome | None:
        """The outcome for a model that certainly fits; None where a prediction is needed: for the report, and after
        another model has needed one."""
        if self.settings.report is not None or self._decisions is not None:
            return None
        from brim.run.script.needs import living_optimizers

        call = replace(call, optimizers=living_optimizers(call))
        return self._bound().outcome(call)

    def _planned(self, call: Call) -> Outcome | None:
        from brim.run.script.decide import Decisions

        if self._decisions is None:
            bounded = () if self._ample is None else self._ample.outcomes
            self._decisions = Decisions(self.settings, self._give_up, bounded)
        return self._decisions.decide(call)

    def _give_up(self, name: str, why: str) -> str | None:
        """The fallback for a model that cannot be planned, or None."""
        if self.settings.mode != "auto" or not torch.cuda.is_available() or self.settings.device == "cpu":
            return None
        from brim.run.script.unified import Unified, is_installed

        if not is_installed():
            return None
        if self._unified is None:
            self._unified = Unified.for_thread(self.settings)
        write_note(f"{name} is left to unified memory: {why}")
        return "unified"


def _least_budget_bytes(settings: Settings) -> int:
    """The smallest budget, without asking a GPU."""
    amounts = ((settings.vram, RAM if settings.device == "cpu" else VRAM), (settings.ram, RAM))
    budgets = [
        amount_bytes(amount, tier)
        for amount, tier in amounts
        if amount is not None and not (tier == VRAM and is_share(amount))  # large, and its size initializes CUDA
    ]
    return min([_LEAST_BYTES, free_bytes(RAM), *budgets])


def _check_alone(device: str) -> None:
    """Raise UsageError if the program's GPU does not exist, or CUDA has been initialized already."""
    visible = os.environ.get(VISIBLE, "")
    if torch.cuda.is_initialized():
        raise UsageError(
            f"Cannot use device {device!r} alone.",
            "CUDA is already in use in this process.",
            f"Set {VISIBLE}={visible} before the program starts.",
        )
    if not torch.cuda.device_count():
        raise UsageError(f"Cannot use device {device!r}.", f"PyTorch sees no such GPU ({VISIBLE}={visible}).")


def _sees_cuda() -> bool:
    """True if there is a CUDA device. CUDA is not initialized: a program may still set ``CUDA_VISIBLE_DEVICES`` and
    fork children that use CUDA. NVIDIA's management library is asked; only without it, CUDA itself."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"  # PyTorch's own setting, read at each call
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Growth:
    """Growth since the first call of a model, compared only with budgets that were given."""

    def __init__(self, settings: Settings, *, on_gpu: bool) -> None:
        amounts = {VRAM: settings.vram} if on_gpu else {RAM: settings.ram, VRAM: settings.vram}
        budgets = [amount_bytes(n, t if on_gpu else RAM) for t, n in amounts.items() if n is not None]
        self._budget_bytes = min(budgets, default=None)
        self._on_gpu = on_gpu
        self._begin_bytes = self._begin_peak_bytes = 0

    def note(self, model: nn.Module, brim_bytes: int = 0) -> None:
        """Note what the program holds besides ``model``, before the decision for it and after.

        A decision gives the heap's free memory back: taking that memory again is no growth. After it brim holds
        ``brim_bytes`` of the resident memory for the model.
        """
        if self._budget_bytes is None or self._on_gpu or (counts := _counts()) is None:
            return
        from brim.memory.mapped import present_bytes

        own = brim_bytes or present_bytes([*model.parameters(), *model.buffers()])
        self._begin_bytes = max(self._begin_bytes, counts["RssAnon"] + counts["RssShmem"] - own)
        self._begin_peak_bytes = counts["VmHWM"]

    def above(self) -> str | None:
        """A sentence on how far the program is above its budget; None if it is not."""
        if self._budget_bytes is None:
            return None
        grown_bytes, allowed_bytes = self._measured_bytes(), self._budget_bytes
        if not self._on_gpu:
            allowed_bytes += _BESIDE_TENSORS_BYTES
        if grown_bytes <= allowed_bytes:
            return None
        tier = "VRAM" if self._on_gpu else "RAM"
        budget = format_bytes(self._budget_bytes)
        return f"the program took {format_bytes(grown_bytes)} of {tier}, and its budget is {budget}"

    def _measured_bytes(self) -> int:
        if self._on_gpu:
            if torch.cuda.memory.get_allocator_backend() != "native":
                return 0  # other backends do not count
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        counts = _counts()
        if counts is None or counts["VmHWM"] == self._begin_peak_bytes:  # no higher than before the first call
            return 0
        return counts["VmHWM"] - counts["RssFile"] - self._begin_bytes


def _counts() -> dict[str, int] | None:
    """Bytes of the process by the kernel's names (peak and resident); None where the kernel does not report them."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    parts = (line.split() for line in lines)
    counts = {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts if part[-1] == "kB"}
    return counts if counts.keys() >= {"VmHWM", "RssAnon", "RssShmem", "RssFile"} else None
