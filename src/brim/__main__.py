"""``python -m brim`` is ``brim``."""

from __future__ import annotations

import sys

from brim.cli import main

if __name__ == "__main__":
    sys.exit(main())
