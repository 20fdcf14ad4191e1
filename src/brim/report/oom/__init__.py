"""Out-of-memory messages: extracted from logs, read, explained, answered with advice."""

import tomllib
from importlib import resources
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this folder."""
    return tomllib.loads(resources.files(__name__).joinpath(name).read_text(encoding="utf-8"))
