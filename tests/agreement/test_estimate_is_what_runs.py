"""``brim estimate`` is of the step that ``brim train`` and ``brim generate`` make, or its answer says where not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

import brim
from brim.cli import brim as program
from brim.core import Trace
from brim.core.options import STORED
from brim.errors import UsageError
from brim.estimation.estimate import traced
from brim.estimation.models import find_model
from brim.estimation.steps import PROGRAM, Job
from brim.estimation.workload import CHECKPOINTING, METHODS, PRECISIONS, Workload
from brim.models.quantized import open_as
from brim.planning.request import Request
from brim.planning.strategy.choice import Choice
from brim.planning.training import case_of
from brim.predict.optimizer_states import OPTIMIZERS
from brim.requests.plan import LOSSY
from brim.techniques.checkpointing import technique as checkpointing
from brim.units import GIB
from support.recorded_cases import gpu
from support.tiny_model import save_llama

pytestmark = pytest.mark.thorough

_SEQ = 64
_FP8 = (8, 9)  # the capability that float8 needs
Modules = Counter[tuple[str, str]]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model stored in 32 or 16 bits."""
    return save_llama(tmp_path_factory.mktemp("model"), layers=2, hidden=64, dtype=request.param)


def modules_of(run: Callable[[], Trace]) -> tuple[Modules, Trace]:
    """Which modules were called while ``run`` traced, by library and type, and how often in a step."""
    called: Modules = Counter()

    def note(module: nn.Module, _: Any) -> None:
        if isinstance(module, (PeftModel, BaseTuner)):
            return  # PEFT's wrappers hand their arguments on
        called[type(module).__module__, type(module).__name__] += 1

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        made = run()
    finally:
        hook.remove()
    steps = len(made.step_starts)
    return Counter({name: count // steps for name, count in called.items()}), made


def steps(made: Trace) -> list[Counter[tuple[str, int, int]]]:
    """Operations of each step, with what they read and write."""
    found: list[Counter[tuple[str, int, int]]] = [Counter() for _ in made.step_starts]
    for op in made.ops:
        if op.step >= 0:  # what makes the model and its optimizer comes before
            found[op.step][op.name, op.read_bytes, op.written_bytes] += 1
    return found


def estimated(folder: Path, **asked: Any) -> tuple[Modules, Trace, dict[str, str]]:
    job = Job(find_model(folder), Workload(seq=_SEQ, **asked))
    called, made = modules_of(lambda: traced(job, _FP8))
    return called, made, job.differs


def trained(folder: Path, *, checkpointed: str = "none", **asked: Any) -> tuple[Modules, Trace]:
    """The step of ``brim train`` with everything on the GPU."""
    case = case_of(Request(model=folder, task="train", seq=_SEQ, batch=1, **asked), gpu(24 * GIB), 0)
    blocks = checkpointing.blocks(case.step.model) if checkpointed != "none" else ()
    choice = Choice(precision=case.precision, checkpointing=dict.fromkeys(blocks, checkpointed))
    return modules_of(lambda: case.step.trace(choice))


def compare(folder: Path, *, checkpointing: str = "none", **asked: Any) -> None:
    given = {} if checkpointing == "none" else {"checkpointing": checkpointing}
    called, made, differs = estimated(folder, **asked, **given)
    brims, brims_trace = trained(folder, checkpointed=checkpointing, **asked)
    assert (called == brims) == (not differs.keys() & {"layers"})
    (step,) = steps(brims_trace)  # states are there before it, a gradient scaler's factor is not
    assert (step in steps(made)) == (not differs), differs


TRAINED = [precision for precision in PRECISIONS if precision not in ("int8", "int4", "fp8", STORED)]


@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("method", METHODS)
def test_precisions_and_methods_of_a_training_step(folder: Path, precision: str, method: str) -> None:
    compare(folder, precision=precision, method=method, optimizer="sgd")


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw8bit"])
def test_optimizers(folder: Path, optimizer: str) -> None:
    compare(folder, precision="fp32", optimizer=optimizer)


@pytest.mark.parametrize("kind", [name for name in CHECKPOINTING if name != "alternate"])
def test_checkpointing(folder: Path, kind: str) -> None:
    compare(folder, precision="fp32", optimizer="sgd", checkpointing=kind)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"precision": "int8", "method": "lora"}, "layers"),
        ({"precision": "int4", "method": "lora"}, "layers"),
        ({"precision": "fp8"}, "layers"),
        ({"optimizer": "adamw8bit"}, "optimizer"),
        ({"checkpointing": "alternate"}, "checkpointing"),
    ],
)
def test_what_brim_train_lacks_or_leaves_to_torchao_is_said(folder: Path, asked: dict[str, str], part: str) -> None:
    assert part in estimated(folder, **{"optimizer": "sgd", **asked})[2]
    if asked.get("precision") in ("int8", "int4"):
        with pytest.raises(UsageError, match="--precision"):
            Request(model=folder, task="train", **asked).check()


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if "mixed" not in name and name != STORED])
def test_layers_of_a_generation(folder: Path, precision: str) -> None:
    job = Job(find_model(folder), Workload(task="generate", seq=_SEQ, new_tokens=2, precision=precision))
    called, _ = modules_of(lambda: traced(job, _FP8))
    if precision == "fp8":
        assert "layers" in job.differs
        return
    if precision in LOSSY:
        pytest.importorskip("bitsandbytes")
    opened = open_as(folder, precision)
    brims = {
        type(module).__name__.removesuffix("Lt")
        for module in opened.module.modules()
        if not isinstance(module, nn.ModuleList)
    }
    assert ({name for _, name in called} == brims) == ("layers" not in job.differs)
    assert "cache" in job.differs


def test_the_answer_names_itself(folder: Path) -> None:
    words = ["estimate", str(folder), "--seq", "64", "--precision", "fp32", "--json"]
    answers = {}
    for name in ("sgd", "adamw"):
        answers[name] = json.loads(CliRunner().invoke(program, [*words, "--optimizer", name]).stdout)
        assert answers[name]["program"] == PROGRAM
    assert answers["sgd"]["brim_differs"] == {}
    assert list(answers["adamw"]["brim_differs"]) == ["optimizer"]
    found = brim.estimate(folder, seq=64, precision="fp32")
    assert PROGRAM in found.program
    assert "optimizer: brim train" in found.program
