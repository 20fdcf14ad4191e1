"""The sentence that a report begins with: whether it fits, by how much, and how far one may go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from brim.errors import ABOVE_BUDGET
from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.cli.console import Console
    from brim.core import Plan
    from brim.core.leak import Leak
    from brim.estimation.estimate import Estimate
    from brim.planning.request import Answer
    from brim.rehearsal.rehearse import Rehearsal

_UNKNOWN = (
    "Numbers that were not computed count as finite: no step was skipped because of an overflow.",
    "Not known without the GPU: seconds, and the memory of the driver, NCCL and kernel libraries.",
)
_CUDNN = "Convolutions went through cuDNN, whose workspaces are not known and not counted."
_OTHERS = "Each process that uses CUDA has its own simulated devices; real devices would be shared."
_FLUSHED = (
    "The GPU was full until the allocator returned its cache, which takes time on a real GPU. A slightly larger step "
    "may not fit."
)
_MOST_READS = 8  # that are listed
_RANKS = "The other ranks are assumed to do the same as this one."


def of_estimate(estimate: Estimate, total_bytes: int | None, largest_batch: int | None) -> str:
    """``Fits with 3.1 GiB to spare; batch 25 is the largest.`` Bytes are of the whole process."""
    process, leak = estimate.peak_bytes.process, estimate.leak
    if total_bytes is None:
        told = (
            f"Takes {format_bytes(process)} of GPU memory, {format_bytes(estimate.context_bytes)} of it CUDA context"
        )
        return f"{told}." if leak is None else f"{told}, after {leak.steps:,} steps: {of_leak(leak)}."
    if leak is not None and estimate.fits is False:
        return f"Does not fit: {of_leak(leak)}."
    if estimate.fits:
        told = f"Fits with {format_bytes(max(total_bytes - process, 0))} to spare"
        over = estimate.upper_bound_bytes - total_bytes
        told += f", though the safe upper bound is {format_bytes(over)} above the memory" if over > 0 else ""
    else:
        told = f"Does not fit: it takes {format_bytes(process)} of {format_bytes(total_bytes)}"
    return f"{told}; batch {largest_batch:,} is the largest." if largest_batch else f"{told}."


def shares(sizes: Mapping[str, int], total: int) -> Iterator[tuple[str, str, str]]:
    """Yield what is not zero as rows of a table, the largest first, with its share of ``total``."""
    for name, size in sorted(sizes.items(), key=lambda row: -row[1]):
        if size:
            yield name.replace("_", " "), format_bytes(size), f"{size / total:.1%}"


def of_precision(precision: str | None, origin: str) -> str:
    """``precision: bf16, by dtype of its configuration (bfloat16)``."""
    return f"precision: {precision}, {origin}"


def of_exceeded(plan: Plan, measured_bytes: Mapping[str, int], console: Console) -> int:
    """Write measurements above their budget or promise in red. Return the exit code of a misfit."""
    sentences = plan.exceeded(measured_bytes)
    for sentence in sentences:
        console.print(sentence, style="bold red", highlight=False, soft_wrap=True)
    return ABOVE_BUDGET if sentences else 0


def of_leak(leak: Leak) -> str:
    """``memory in use grows by 80 MiB with each step, and the GPU is full at about step 134``: part of a sentence."""
    grows = f"memory in use grows by {format_bytes(leak.bytes_per_step)} with each {leak.unit}"
    full = "" if leak.full_step is None else f", and the GPU is full at about {leak.unit} {leak.full_step:,}"
    return f"{grows}{full}"


def of_plans(answer: Answer) -> str:
    """``Fits with 1.2 GiB of VRAM to spare, at 12 ms per token.`` Of the first plan."""
    if not answer.proposals:
        needs = ", ".join(f"{format_bytes(count)} of {tier.upper()}" for tier, count in answer.needs_bytes.items())
        return f"Nothing fits: it takes {needs}." if needs else "Nothing fits."
    best, tier = answer.proposals[0], answer.machine.hardware.compute
    spare = answer.machine.budget_bytes[tier] - best.plan.promise.peak_bytes.get(tier, 0)
    step = "step" if answer.request.task == "train" else "token"
    told = f"Fits with {format_bytes(max(spare, 0))} of {tier.upper()} to spare"
    return f"{told}, at {format_seconds(best.step_s)} per {step} ({answer.tokens_per_s(best):.3g} tokens/s)."


def decisions_of(rehearsal: Rehearsal) -> list[str]:
    """A heading and the places where numbers that were made up decided what the program did; [] if none did."""
    decided = [read for read in rehearsal.reads if read["decides"]]
    lines = ["decisions by made-up numbers" + (f", in {len(decided)} places:" if len(decided) > 1 else ":")]
    for read in decided[:_MOST_READS]:
        where = f"{read['file']}:{read['line']}" if read["file"] else "in a backward pass"
        lines.append(f"{where}: {' '.join(read['source'].split())}  ({read['what']}, {read['times']:,} times)")
    return lines if decided else []


def notes_of(rehearsal: Rehearsal) -> list[str]:
    """Assumptions, and limits of the rehearsal."""
    notes = [_OTHERS] if rehearsal.other_processes else []
    if rehearsal.ended == "enough":
        notes.append(
            f"What the program does after step {rehearsal.steps}, such as an evaluation or steps with larger "
            "inputs, is not included: brim rehearse --steps runs more."
        )
    if rehearsal.ran_out and rehearsal.fits is not False:
        times = "once" if rehearsal.ran_out == 1 else f"{rehearsal.ran_out} times"
        notes.append(f"Memory ran out {times}, and the program continued.")
    if (leak := rehearsal.leak) is not None and not leak.fills_memory:
        grows = of_leak(leak)
        notes.append(f"{grows[0].upper()}{grows[1:]}.")
    if any(device.cache_flushes for device in rehearsal.devices):
        notes.append(_FLUSHED)
    notes += [_CUDNN] if rehearsal.uses_cudnn else []
    notes += [_RANKS] if rehearsal.rank is not None else []
    if rehearsal.left_bytes:
        notes.append(
            f"{format_bytes(rehearsal.left_bytes)} of weights that the program created on the CPU were left zero, to "
            "save RAM in the rehearsal."
        )
    if rehearsal.not_computed:
        notes.append(f"Not computed, because PyTorch has no CPU kernel: {', '.join(rehearsal.not_computed)}.")
    return [*notes, *_UNKNOWN] if rehearsal.devices else notes
