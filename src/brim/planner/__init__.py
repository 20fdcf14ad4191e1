"""Searches for the fastest way that fits, simulates its schedule, and says what it promises."""

from brim.planner.streaming import BlockCost, Job, plan_streaming, smallest_budget

__all__ = ["BlockCost", "Job", "plan_streaming", "smallest_budget"]
