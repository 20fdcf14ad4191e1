"""``brim plan``: the fastest ways that fit a machine, which may be another one, and what would do when none fits."""

from __future__ import annotations
