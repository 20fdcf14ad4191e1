import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def read_operators() -> dict[str, Any]:
    """Return the tables of ``operators.toml``: names of PyTorch's operators by what they do."""
    return tomllib.loads(resources.files(__name__).joinpath("operators.toml").read_text(encoding="utf-8"))
