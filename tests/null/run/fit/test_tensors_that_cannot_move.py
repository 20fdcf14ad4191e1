"""Parameters that are more, or less, than their values: refused before anything is planned, with what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import brim
from brim.errors import BudgetError, UnsupportedError


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


class Params4bit(nn.Parameter):
    """As bitsandbytes has it: codes, and beside them what they mean; ``cuda`` quantizes."""

    quant_state: Any = None

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was moved")

    to = cpu = cuda


Params4bit.__module__ = "bitsandbytes.nn.modules"


def of_bitsandbytes(model: nn.Sequential) -> None:
    for layer in model:
        codes = torch.zeros(64 * 64 // 2, 1, dtype=torch.uint8)
        layer.weight = codes.as_subclass(Params4bit)  # type: ignore[assignment]
        layer.weight._is_param = True


def of_a_subclass(model: nn.Sequential) -> None:
    for layer in model:
        layer.weight = nn.Parameter(TwoTensor(torch.zeros(64, 64), torch.zeros(64, 64)))


def on_meta(model: nn.Sequential) -> None:
    model.to("meta")


def of_accelerate(model: nn.Sequential) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def sparse(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.eye(64).to_sparse())


def lazy(model: nn.Sequential) -> None:
    model.append(nn.LazyLinear(64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_bitsandbytes, r"'0\.weight'.*Params4bit(.|\n)*bitsandbytes(.|\n)*quantization="),
        (of_a_subclass, r"'0\.weight'.*TwoTensor"),
        (on_meta, r"'0\.weight'.*meta(.|\n)*to_empty"),
        (of_accelerate, r"'0\.weight'.*meta(.|\n)*accelerate(.|\n)*device_map"),
        (sparse, r"'0\.weight'.*sparse_coo"),
        (lazy, r"'8\.weight'.*no shape(.|\n)*[Cc]all the model once"),
    ],
)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_they_are_refused_with_what_to_do(change: Any, words: str, trains: bool) -> None:
    model = net()
    change(model)
    before = {name: (type(p), p.device) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(net().parameters()) if trains else None
    arguments: Any = (model,) if optimizer is None else (model, optimizer)
    with pytest.raises(UnsupportedError, match=words):
        brim.fit(*arguments, ram="1MiB", device="cpu", activations="64KiB")
    assert {name: (type(p), p.device) for name, p in model.named_parameters()} == before


def test_a_class_that_only_has_a_name_of_its_own_is_fitted() -> None:
    class Named(nn.Parameter):
        """As some libraries mark what they shard."""

    model = net()
    for layer in model:
        layer.weight = Named(torch.zeros(64, 64))
    brim.fit(model, ram="1MiB", device="cpu", activations="64KiB").remove()
    assert type(model[0].weight) is Named


PROGRAM = textwrap.dedent("""
    import torch
    from torch import nn
    from torch.testing._internal.two_tensor import TwoTensor
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    for layer in model:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.data, layer.weight.data))
    with torch.no_grad():
        print(float(model(torch.ones(1, 512)).sum()))
""")


@pytest.mark.thorough
def test_a_program_with_them_is_refused_by_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "brim", "run", "--device", "cpu", "--ram", "4MiB", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == BudgetError.exit_code, done.stderr
    assert "'0.weight' is a TwoTensor" in done.stderr
