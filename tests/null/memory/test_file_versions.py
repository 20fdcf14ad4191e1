"""Files of weights that are changed while they are in use: one error, and no answer out of two models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import brim
from brim.errors import TransferError
from brim.memory.checkpoint_files import read_safetensors_header
from brim.memory.mapped import MappedFile
from brim.models.file_tensor import FileTensor
from brim.run.generate.request import Request, generate
from support.tiny_model import save_llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("saved") / "llama", hidden=512, layers=4)


@pytest.fixture
def weights(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model") / "model.safetensors"


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1" * 4096)


def replace(path: Path) -> None:
    beside = path.with_suffix(".new")
    shutil.copyfile(path, beside)
    beside.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


CHANGES = {
    "written to": (write_into, "It was written to since its header was read"),
    "replaced": (replace, "Another file has taken its place since its header was read"),
    "cut": (cut, "It was written to since its header was read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_another_than_its_header_was_read_of_is_not_opened(name: str, weights: Path) -> None:
    change, says = CHANGES[name]
    source = next(iter(read_safetensors_header(weights).values()))
    assert FileTensor.open(source).materialize().shape == source.shape
    file = MappedFile.open(str(weights))
    change(weights)
    for read in (lambda: FileTensor.open(source).materialize(), lambda: MappedFile.open(str(weights))):
        with pytest.raises(TransferError, match=says):
            read()
    if name != "replaced":  # what is open already is the file whose header was read
        with pytest.raises(TransferError, match=says):
            file.map(source.extents[0].offset, source.bytes)
        with pytest.raises(TransferError, match=says):
            file.read(0, torch.empty(16, dtype=torch.uint8))
    file.close()
    source = next(iter(read_safetensors_header(weights).values())) if name != "cut" else None
    assert source is None or FileTensor.open(source).materialize().shape == source.shape


@pytest.mark.thorough
@pytest.mark.parametrize("change", [write_into, cut])
def test_no_text_of_two_models_ends_well(change: Callable[[Path], None], weights: Path, cache: Path) -> None:
    budget = "60MiB"
    texts: list[str] = []

    def on_text(text: str) -> None:
        texts.append(text)
        if len(texts) == 2:
            change(weights)

    asked = Request(model=weights.parent, prompt="hello there", max_new_tokens=8, ram=budget, device="cpu")
    assert any(d.choice == "stream:disk" for d in generate(asked).plan.decisions)
    with pytest.raises(TransferError, match="since its header was read"):
        generate(asked, on_text=on_text)
    assert len(texts) >= 2


@pytest.mark.thorough
def test_a_loaded_model_is_not_called_with_other_weights(weights: Path, cache: Path) -> None:
    model = brim.load(weights.parent, ram="60MiB", device="cpu")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
        write_into(weights)
        with pytest.raises(TransferError, match="since its header was read"):
            model(ids)
