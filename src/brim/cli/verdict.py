"""The sentence that a report begins with: whether it fits, by how much, and how far one may go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from brim.estimation.estimate import Estimate
    from brim.run.plan.request import Answer


def of_estimate(estimate: Estimate, total_bytes: int | None, largest_batch: int | None = None) -> str:
    """``Fits with 3.1 GiB to spare; batch 25 is the largest.`` Bytes are of the whole process."""
    process = estimate.peak_bytes.process
    if total_bytes is None:
        return (
            f"Takes {format_bytes(process)} of GPU memory, {format_bytes(estimate.context_bytes)} of it CUDA context."
        )
    if estimate.fits:
        told = f"Fits with {format_bytes(max(total_bytes - process, 0))} to spare"
        over = estimate.upper_bound_bytes - total_bytes
        told += f", though the safe upper bound is {format_bytes(over)} above the memory" if over > 0 else ""
    else:
        told = f"Does not fit: it takes {format_bytes(process)} of {format_bytes(total_bytes)}"
    return f"{told}; batch {largest_batch:,} is the largest." if largest_batch else f"{told}."


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
