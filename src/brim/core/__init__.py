"""The types that every other package reads and writes. Standard library only."""

from __future__ import annotations

from brim.core.hardware import Hardware, Link, Tier
from brim.core.plan import Decision, Plan, Promise
from brim.core.timeline import Event, EventKind, Timeline
from brim.core.trace import Category, Op, Phase, Storage, Trace

__all__ = [
    "Category",
    "Decision",
    "Event",
    "EventKind",
    "Hardware",
    "Link",
    "Op",
    "Phase",
    "Plan",
    "Promise",
    "Storage",
    "Tier",
    "Timeline",
    "Trace",
]
