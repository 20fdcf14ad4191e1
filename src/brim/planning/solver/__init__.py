"""Search the fastest plan that fits, and simulate its schedule."""

from brim.planning.solver.passes import BlockCost, Job
from brim.planning.solver.streaming import smallest_budget

__all__ = ["BlockCost", "Job", "smallest_budget"]
