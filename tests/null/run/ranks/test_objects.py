"""What ranks send each other is read without running code."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from brim.run.checkpoint.manifest import FileEntry
from brim.run.ranks.group import Reader, only_plans


def read(value: Any) -> Any:
    return Reader(io.BytesIO(pickle.dumps(value))).load()


class Calls:
    """An object that a stranger sends."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("value", [
    {"a": [1, 2.5, None, True, b"x"], "b": {"c"}}, torch.bfloat16, torch.Size([2, 3]),
    TensorProperties(torch.float32), FileEntry(bytes=3, checksum="0", tensors={}),
    SavePlan([WriteItem(MetadataIndex("weight", torch.Size([0])), WriteItemType.TENSOR)]),
])  # fmt: skip
def test_plans_and_values_are_read(value: Any) -> None:
    assert read(value) == value


def test_a_rank_s_exception_is_read() -> None:
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        told, stack = read(_wrap_exception(error))
    assert isinstance(told, OSError) and told.errno == 28 and stack[0].name.startswith("test_")


@pytest.mark.parametrize("call", [
    (os.system, "touch FILE"), (exec, "open('FILE', 'w')"), (getattr, SavePlan, "__init__"), (open, "FILE", "w"),
    (Path("FILE").touch,), (torch.load, "FILE"), (os.kill, 0, 0),
])  # fmt: skip
def test_what_would_run_code_is_refused(call: tuple[Any, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="no plan and no value"):
        read(Calls(*call))
    assert list(tmp_path.iterdir()) == []


def test_names_that_a_module_of_plans_imports_are_refused() -> None:
    for name in (b"os", b"os.system", b"pickle"):
        text = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c" + bytes([len(name)]) + name + b"\x93."
        with pytest.raises(pickle.UnpicklingError):
            Reader(io.BytesIO(text)).load()


def test_collectives_read_so_while_ranks_are_joined() -> None:
    sent = torch.frombuffer(bytearray(pickle.dumps(Calls(os.getpid))), dtype=torch.uint8)
    with only_plans(), pytest.raises(pickle.UnpicklingError):
        distributed_c10d._tensor_to_object(sent, len(sent), None)
    assert distributed_c10d._tensor_to_object(sent, len(sent), None) == os.getpid()
