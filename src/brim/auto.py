"""``import brim.auto`` does what ``brim run`` does, for programs that something else starts (torchrun, a notebook).

The settings come from the environment: ``BRIM_VRAM``, ``BRIM_RAM``, ``BRIM_MODE``, ``BRIM_DEVICE``, ``BRIM_REPORT``,
with the meanings of ``brim run``'s options. In a process that ``brim run`` has started it does nothing.
"""

from __future__ import annotations

import atexit
import os

from brim.run.script.run import is_watched, watch
from brim.run.script.settings import Settings

if not is_watched():
    atexit.register(watch(Settings.of_environment(os.environ)).end)
