"""Views of a Timeline: explanations, comparisons, pages, traces for other viewers."""

import tomllib
from importlib import resources
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this folder."""
    return tomllib.loads(resources.files(__name__).joinpath(name).read_text(encoding="utf-8"))


def listed(value: str | list[str]) -> tuple[str, ...]:
    """Return one text or several as several."""
    return (value,) if isinstance(value, str) else tuple(value)
