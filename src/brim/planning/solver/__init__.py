"""Searches for the fastest way that fits, simulates its schedule, and says what it promises."""

from brim.planning.solver.passes import BlockCost, Job
from brim.planning.solver.streaming import plan_streaming, smallest_budget

__all__ = ["BlockCost", "Job", "plan_streaming", "smallest_budget"]
