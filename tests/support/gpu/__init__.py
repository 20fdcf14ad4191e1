"""Recorded runs on GPUs: their cases, how one is run and predicted, and how far off predictions are."""

import os

from brim.device.settings import VARIABLE
from brim.errors import ABOVE_BUDGET

# Exit codes of a command that did what it was to do. The memory of the rehearsal device lies in RAM, where no promise
# has it: 3 says so.
DONE = {0, ABOVE_BUDGET} if VARIABLE in os.environ else {0}
