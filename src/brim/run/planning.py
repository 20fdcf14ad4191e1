"""``brim plan``: the fastest ways that fit a machine, which may be another one, and what would do when none fits."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from brim.core import Plan, Promise
from brim.core.hardware import DISK, RAM, VRAM
from brim.errors import BudgetError, UnsupportedError
from brim.estimation.models import Source, find_model
from brim.estimation.steps import Job
from brim.estimation.workload import Workload
from brim.planner.training import Limits
from brim.run.fitting import Need, make_plan
from brim.run.inference import SLACK_BYTES
from brim.run.planning_request import Answer, Effect, Machine, Nearest, Proposal, Request, machine_of
from brim.run.planning_training import Found, Planner
from brim.run.step_memory import Inputs, watch_inference
from brim.run.trainee import add_lora, make_optimizer
from brim.run.training_prediction import Rehearsal
from brim.techniques.blocks import find_blocks
from brim.techniques.weight_streaming import NAME as STREAMING
from brim.techniques.weight_streaming import RESIDENT, Weights
