"""brim: virtual memory for PyTorch that knows the future."""

from __future__ import annotations

__version__ = "0.1.0"
