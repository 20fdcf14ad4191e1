"""What goes wrong while a model is quantized, or with what was written: one clear error, and nothing half done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import brim
from brim.errors import ModelError, TransferError
from brim.estimation.step_memory import Inputs
from brim.memory.checkpoint_files import read_checkpoint
from brim.memory.checksums import MANIFEST_NAME
from brim.models.prequantized import Quantizer
from brim.models.quantized import open_quantized
from support.forked import forked

pytest.importorskip("bitsandbytes")
INPUTS = Inputs(prompt=4, total=8)
ONCE = "model.layers.1.mlp.down_proj.weight"


def folders(cache: Path) -> list[Path]:
    return sorted((cache / "brim" / "quantized").glob("*"))


def written(cache: Path, llama: Path) -> Path:
    open_quantized(llama, "int8")
    (folder,) = folders(cache)
    return folder


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
def test_a_flipped_bit_is_found_when_it_is_read(llama: Path, cache: Path, name: str) -> None:
    folder = written(cache, llama)
    path, source = folder / "model.safetensors", read_checkpoint(folder)[name]
    damaged = bytearray(path.read_bytes())
    damaged[source.extents[0].offset + 5] ^= 16
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=f"Cannot use {name} of llama .int8.*\n.*checksum") as caught:
        brim.load(llama, quantization="int8", inputs=INPUTS)(torch.arange(4)[None])
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "damage", ["cut short", "another tensor", "no manifest", "a gap in the manifest", "no JSON", "no configuration"]
)
def test_a_cache_that_is_not_as_written_is_made_anew(llama: Path, cache: Path, damage: str) -> None:
    folder = written(cache, llama)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = folder / MANIFEST_NAME
    if damage == "cut short":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "another tensor":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        save_file(tensors, folder / "model.safetensors")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "no JSON":
        manifest.write_text("{")
    elif damage == "no configuration":
        (folder / "config.json").unlink()
    else:
        content = json.loads(manifest.read_text())
        content["checksums"].pop("model.norm.weight")
        manifest.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="is damaged, so the model is quantized again"):
        open_quantized(llama, "int8")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert folders(cache) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_works(
    llama: Path, cache: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(self: Quantizer, model: Any, name: str, value: torch.Tensor) -> Any:
        nonlocal calls
        calls += not value.is_meta
        if calls == 5:
            raise error
        return real(self, model, name, value)

    real = Quantizer.quantized
    with monkeypatch.context() as patch:
        patch.setattr(Quantizer, "quantized", failing)
        with pytest.raises(TransferError if isinstance(error, OSError) else type(error)):
            open_quantized(llama, "int8")
    assert calls == 5
    assert list((cache / "brim" / "quantized").iterdir()) == []
    open_quantized(llama, "int8")
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_that_are_not_finite_are_named(llama: Path, cache: Path, precision: str, value: float) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors[ONCE][7, 7] = value
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"Cannot quantize {ONCE}\.\n.*not finite"):
        open_quantized(llama, precision)
    assert list((cache / "brim" / "quantized").iterdir()) == []


def test_a_weight_of_another_shape_is_found(llama: Path, cache: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors[ONCE] = tensors[ONCE].t().contiguous()
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"by its config, {ONCE} has the shape"):
        open_quantized(llama, "int8")


def test_of_two_processes_at_once_one_quantizes(
    llama: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = tmp_path / "quantized", Quantizer.quantized

    def noted(self: Quantizer, model: Any, name: str, value: torch.Tensor) -> Any:
        if not value.is_meta:
            with written.open("a") as file:
                file.write(f"{name}\n")
        return real(self, model, name, value)

    monkeypatch.setattr(Quantizer, "quantized", noted)
    children = [forked(lambda: open_quantized(llama, "int8")) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    names = written.read_text().split()
    assert ONCE in names and len(names) == len(set(names))
    assert len(folders(cache)) == 1
