"""Advice against running out of memory, the most promising first, and popular advice that does not help."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from brim.report.oom.cause import UNSET_BYTES, Cause, is_shared_memory, unallocated_bytes
from brim.report.oom.programs import IN_RAM, OF_FAMILY, program_advice, remedies, spelled
from brim.report.phase import BY_PHASE, NAMED, PRECISION, RECOMPUTE, SMALLER, Advice, advice_of, phase_of
from brim.units import MIB, format_bytes

EXPANDABLE, REPLAY, WHO = NAMED["expandable"], NAMED["replay"], NAMED["who"]
_BY_CAUSE, _BY_FAMILY, _ON_TPU = (advice_of(kind) for kind in ("cause", "family", "tpu"))
# Causes for which a smaller setting is not the first advice.
_NOT_BY_SIZE = (
    Cause.OTHER_PROCESS,
    Cause.MEMORY_FRACTION,
    Cause.MISLEADING_FREE,
    Cause.FRAGMENTATION,
    Cause.PRIVATE_POOLS,
    Cause.ADDRESS_SPACE,
    Cause.SPILL,
)


# Families of PyTorch before 2.1, which has no expandable segments; the first two have no max_split_size either.
_BEFORE_SPLIT = ("torch-cuda-thc", "torch-cuda-cached")
_BEFORE_EXPANDABLE = (*_BEFORE_SPLIT, "torch-cuda-reserved", "torch-cuda-reserved-hint")
_VARIABLES = {
    "torch-hip": "PYTORCH_HIP_ALLOC_CONF",
    "torch-npu": "PYTORCH_NPU_ALLOC_CONF",
    "torch-xpu": "PYTORCH_ALLOC_CONF",
}


def advise(
    family: str,
    cause: Cause,
    numbers: Mapping[str, int],
    text: str,
    settings: str,
    *,
    program: str,
    frames: Sequence[str],
    device: str,
) -> tuple[Advice, ...]:
    """Return advice for a message, the most promising first; at the end advice that does not help, with the reason.

    ``settings`` are the allocator's settings and shares of the device in the log; ``program`` is the one that ran
    out, ``frames`` are lines of its traceback, the innermost first.
    """
    on = "expandable_segments is enabled" in text or "expandable_segments:true" in settings.lower()
    advices: list[Advice] = []
    for advice in _ranked(family, cause, numbers, f"{settings} {text}", program, frames, device):
        if advice.paste == EXPANDABLE.paste:
            advices += [] if on else _expandable_for(family) if advice is EXPANDABLE else [_named(family, advice)]
        else:
            advices.append(_on_device(advice, device))
    return (*advices, *_no_help(family, cause, numbers, text, settings, expandable_on=on))


# In place of NVIDIA's: the tool that lists a device's processes, and the variable that hides devices.
_TOOLS = {
    "hip": ("amd-smi process", "HIP_VISIBLE_DEVICES"),
    "xpu": ("xpu-smi ps", "ZE_AFFINITY_MASK"),
    "npu": ("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES"),
}


def _on_device(advice: Advice, device: str) -> Advice:
    tool, variable = _TOOLS.get(device.partition(":")[0], ("nvidia-smi", "CUDA_VISIBLE_DEVICES"))
    paste = advice.paste.replace("nvidia-smi", tool).replace("CUDA_VISIBLE_DEVICES", variable)
    return replace(advice, paste=paste)


def _ranked(
    family: str, cause: Cause, numbers: Mapping[str, int], text: str, program: str, frames: Sequence[str], device: str
) -> list[Advice]:
    """Return helpful advice: the program's own remedies and settings, else by phase, else by cause."""
    by_cause = list(_BY_CAUSE[cause])
    if family == "jax-tpu" and cause in _ON_TPU:
        return list(_ON_TPU[cause])
    own = list(_BY_FAMILY.get(family, ()))
    if family == "dataloader":
        own = [NAMED["shared memory" if is_shared_memory(text) else "who was killed"], NAMED["fewer workers"]]
    on_host = cause is Cause.HOST_MEMORY
    of_program = program_advice(program, frames, text, numbers, on_host=on_host or device == "cpu")
    if of_program and not on_host:
        own = [advice for advice in own if not advice.helps]
        of_program += own
    elif own and (family == "hami" or cause not in (Cause.OTHER_PROCESS, Cause.MEMORY_FRACTION)):
        return [own[0], *of_program] if of_program and program in IN_RAM else spelled(program, own)
    if of_program:
        if cause not in _NOT_BY_SIZE or OF_FAMILY.get(family) == program:
            return of_program
        against = [advice for advice in by_cause if advice not in (SMALLER, RECOMPUTE, PRECISION, NAMED["generate"])]
        first = of_program if cause is Cause.SPILL else remedies(program, text, numbers)
        return list(dict.fromkeys([*first, *against, *of_program]))
    if family.startswith("torch-") and cause is Cause.EXHAUSTED and numbers.get("allocated") == 0:
        return [WHO, *by_cause]
    phase = phase_of(frames) if cause in (Cause.EXHAUSTED, Cause.TOO_LARGE, Cause.FRAGMENTATION) else None
    if phase is not None and family.startswith("torch-"):
        by_phase = list(BY_PHASE[phase])
        if cause is Cause.FRAGMENTATION:
            by_phase = [EXPANDABLE, REPLAY, *by_phase]
        return spelled(program, by_phase)
    return spelled(program, by_cause)


def _expandable_for(family: str) -> list[Advice]:
    """Return the advice against fragmentation for the family's version of PyTorch."""
    if family in _BEFORE_SPLIT:
        return [Advice("Update PyTorch: from 2.1 on it has expandable segments (expandable_segments:True).")]
    if family in _BEFORE_EXPANDABLE:
        split = Advice(
            "Keep large blocks whole (PyTorch 1.10 and later).",
            "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128",
        )
        newer = "From PyTorch 2.1 on, use expandable segments instead: free pieces then join."
        return [Advice(newer, EXPANDABLE.paste), split]
    return [_named(family, EXPANDABLE)]


def _named(family: str, advice: Advice) -> Advice:
    """Return the advice with the family's name of the variable."""
    variable = _VARIABLES.get(family)
    return replace(advice, paste=f"export {variable}=expandable_segments:True") if variable else advice


def _no_help(
    family: str, cause: Cause, numbers: Mapping[str, int], text: str, settings: str, *, expandable_on: bool
) -> list[Advice]:
    """Return popular settings that would not help here, with the reason."""
    said = f"{text} {settings}"
    of_torch = family.startswith("torch-") and family != "torch-mps" and numbers.get("allocated", 0) > 0
    sentences = []
    if expandable_on:
        sentences.append("expandable_segments:True is already on.")
        sentences.append("max_split_size_mb has no effect on expandable segments.")
    elif re.search(r"expandable_segments:True|max_split_size_mb", text) and cause is not Cause.FRAGMENTATION:
        free = format_bytes(unallocated_bytes(numbers))
        sentences.append(f"The message's hint would not help: only {free} are reserved but unallocated.")
    elif cause is Cause.FRAGMENTATION and of_torch:
        sentences.append("max_split_size_mb has no effect beside expandable_segments:True: set one of the two.")
    if cause is Cause.EXHAUSTED and of_torch and unallocated_bytes(numbers) < 64 * MIB:
        sentences.append("torch.cuda.empty_cache() would not help: PyTorch has emptied its cache before failing.")
    if cause is Cause.FRAGMENTATION and of_torch:
        sentences.append(
            "torch.cuda.empty_cache() would not help: it frees only unused segments, and PyTorch already did."
        )
    collects = "garbage_collection_threshold" in said or (cause is Cause.FRAGMENTATION and of_torch)
    if collects and numbers.get("allowed", UNSET_BYTES) >= UNSET_BYTES:
        sentences.append("garbage_collection_threshold has no effect without a memory fraction below 1.")
    return [Advice(sentence, helps=False) for sentence in sentences]
