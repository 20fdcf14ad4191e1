"""``python -m brim`` is ``brim``."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120  # as `brim` has it, not the current folder

from brim.cli import main

if __name__ == "__main__":
    sys.exit(main())
