"""Disks that fail, memory that ends, users who interrupt: one clear error, nothing left, and it works again after."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brim
from brim.errors import ModelError, TransferError
from brim.memory.checksums import checksum, write_manifest
from brim.techniques.streaming.weight_streaming import WeightStreaming
from support.streamed import FITS, INPUTS, X, least_bytes, load_streamed, make_net, same_values, warm
from support.tiny_model import held


@pytest.fixture(autouse=True)
def _inference(cache: Path, scratch: Path) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=list(FITS))
def fit(request: pytest.FixtureRequest) -> Callable[[nn.Module], WeightStreaming]:
    return FITS[request.param]


class Disk:
    """``os.preadv`` that fails at chosen calls, as the kernel makes it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.bad: Callable[[int], bool] = lambda call: False
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _preadv(self, *arguments: Any) -> int:
        self.calls += 1
        if self.bad(self.calls):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(*arguments)

    @contextmanager
    def failing(self, bad: Callable[[int], bool]) -> Iterator[None]:
        self.calls, self.bad = 0, bad
        try:
            yield
        finally:
            self.bad = lambda call: False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_any_one_failed_read_is_one_error_and_the_next_call_works(
    fit: Callable[[nn.Module], WeightStreaming], disk: Disk
) -> None:
    net = make_net()
    before, want, values = held(), net(X), {k: v.clone() for k, v in net.state_dict().items()}
    handle = fit(net)
    assert len([d for d in handle.plan.decisions if d.choice == "stream:disk"]) >= 5
    with disk.failing(lambda call: False):
        assert torch.equal(net(X), want)
        per_step = disk.calls
    assert per_step >= 5
    for n in range(1, 2 * per_step + 1):
        failed = 0
        with disk.failing(lambda call, n=n: call == n):
            for _ in range(5):  # reads are ahead of use, so the error may show two calls later
                try:
                    assert torch.equal(net(X), want)
                except TransferError as error:
                    failed += 1
                    assert os.strerror(errno.EIO) in str(error)
                    assert error.todo
        assert failed <= 1, f"read {n} failed once, and {failed} calls did"
        assert torch.equal(net(X), want)
    handle.remove()
    assert same_values(net.state_dict(), values)
    assert torch.equal(net(X), want)
    del handle
    assert held() == before


def test_a_disk_that_stays_bad_fails_every_call_and_works_again_when_it_does(
    fit: Callable[[nn.Module], WeightStreaming], disk: Disk
) -> None:
    net = make_net()
    want, handle = net(X), fit(net)
    with disk.failing(lambda call: True):
        for _ in range(3):
            with pytest.raises(TransferError):
                for _ in range(2):  # what was prefetched before may carry the first
                    net(X)
    for _ in range(2):
        assert torch.equal(net(X), want)
    handle.remove()


@pytest.mark.thorough
def test_a_failed_read_while_loading_is_one_error_that_leaves_nothing(
    saved_llama: Path, disk: Disk, tmp_path: Path
) -> None:
    warm(saved_llama)
    before, least = held(tmp_path), least_bytes(saved_llama)
    with disk.failing(lambda call: False):
        model = load_streamed(saved_llama, least)
        loading = disk.calls
        model.brim.remove()
    del model
    assert held(tmp_path) == before
    assert loading >= 3
    for n in range(1, loading + 1):
        model = None
        with disk.failing(lambda call, n=n: call == n):
            try:
                model = load_streamed(saved_llama, least)
                for _ in range(2):  # the last reads of a call are for the next one, which hears of them
                    model(torch.arange(4)[None])
            except TransferError as error:
                assert "model.safetensors" in str(error)
            else:
                raise AssertionError(f"read {n} failed and nobody said so")
        del model
        assert held(tmp_path) == before


@pytest.mark.thorough
def test_a_file_that_is_cut_short_during_the_run_is_an_error_and_works_again_when_mended(llama: Path) -> None:
    model, ids = load_streamed(llama), torch.arange(20)[None]
    want = model(ids).logits
    path = llama / "model.safetensors"
    whole, times = path.read_bytes(), path.stat()
    os.truncate(path, 100_000)
    for _ in range(3):
        with pytest.raises(TransferError, match=r"model\.safetensors.*\n.*ends .* too early"):
            for _ in range(2):
                model(ids)
    with pytest.raises(TransferError):
        model.brim.remove()  # what is lost cannot come back; nothing has changed
    with path.open("r+b") as file:
        file.write(whole)
    with pytest.raises(TransferError, match="It was written to since its header was read"):
        model(ids)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the file that it was, as a copy with its times is
    assert torch.equal(model(ids).logits, want)
    model.brim.remove()
    assert torch.equal(model(ids).logits, want)


@pytest.mark.thorough
def test_embedding_rows_that_are_gone_are_an_error_and_no_crash(llama: Path) -> None:
    """Rows are looked up in the mapped file, where a missing page would end the process with SIGBUS."""
    code = (
        "import sys, os, torch, brim\nfrom brim.errors import *\n"
        "from transformers import LlamaForCausalLM\n"
        "from brim.estimation.step_memory import Inputs\n"
        "inputs = Inputs(prompt=300, total=300)\n"
        "brim.load(sys.argv[1], inputs=inputs).brim.remove()\n"
        "try: brim.load(sys.argv[1], ram=1, inputs=inputs)\n"
        "except BudgetError as error: least = error.smallest_bytes['ram']\n"
        "for more in (4, 2, 1, 0):  # what the program takes beside the model differs by some MiB from load to load\n"
        "    try: model = brim.load(sys.argv[1], ram=least + (more << 20), inputs=inputs)\n"
        "    except BudgetError: continue\n"
        "    choices = {d.block: d.choice for d in model.brim.plan.decisions}\n"
        "    if choices['model.embed_tokens'] != 'resident': break\n"
        "    model.brim.close()\n"
        "os.truncate(sys.argv[1] + '/model.safetensors', 4096)\n"
        "try: print(choices['model.embed_tokens'], model.model.embed_tokens(torch.arange(300)[None]).sum())\n"
        "except TransferError as error: print(choices['model.embed_tokens'], 'told')\n"
        "model.brim.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "stream:disk told"


def test_a_missing_file_at_the_first_read_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Any = importlib.import_module("brim.run.generate.load")
    put_in_force = opened.put_in_force

    def delete_first(*arguments: Any) -> Any:
        (llama / "model.safetensors").unlink()
        return put_in_force(*arguments)

    monkeypatch.setattr(opened, "put_in_force", delete_first)
    before = held()
    with pytest.raises(TransferError, match=r"Cannot open .*model\.safetensors"):
        brim.load(llama, ram="400MiB")  # little enough to be planned
    assert held() == before


@pytest.mark.thorough
def test_a_flipped_bit_shows_against_the_manifest_wherever_the_block_rests(llama: Path) -> None:
    from brim.memory.checkpoint_files import read_checkpoint

    path = llama / "model.safetensors"
    raw = bytearray(path.read_bytes())
    sources = read_checkpoint(llama)
    data = torch.frombuffer(raw, dtype=torch.uint8)
    ranges = {name: (s.extents[0].offset, s.extents[0].offset + s.bytes) for name, s in sources.items()}
    write_manifest(llama, {name: checksum(data[start:end]) for name, (start, end) in ranges.items()})
    least = least_bytes(llama)
    load_streamed(llama, least)(torch.arange(4)[None])
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"):
        damaged = bytearray(raw)
        damaged[ranges[name][0] + 5] ^= 16
        path.write_bytes(damaged)
        for ram in (None, least):
            with pytest.raises(ModelError, match=f"{name} of llama.*\n.*checksum") as caught:
                brim.load(llama, ram=ram, inputs=INPUTS)(torch.arange(4)[None])
            assert caught.value.exit_code == 2
            del caught
            assert held()["threads"] == []


def test_ctrl_c_during_a_call_is_recovered_from(fit: Callable[[nn.Module], WeightStreaming]) -> None:
    net = make_net()
    want, handle, interrupting = net(X), fit(net), [False]

    def interrupt(module: nn.Module, args: object) -> None:
        if interrupting[0]:
            raise KeyboardInterrupt

    for place in (0, 3, 4, 7):
        hook = net[place][1].register_forward_pre_hook(interrupt)
        interrupting[0] = True
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                net(X)
        interrupting[0] = False
        hook.remove()
        misses = handle.misses
        for _ in range(3):
            assert torch.equal(net(X), want)
        assert handle.misses - misses <= 1  # no slot is lost: it prefetches as before
    handle.remove()
    assert torch.equal(net(X), want)


def test_an_error_of_the_models_own_leaves_the_handle_working(fit: Callable[[nn.Module], WeightStreaming]) -> None:
    net = make_net()
    want, handle = net(X), fit(net)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            net(X[:, :100])
        assert torch.equal(net(X), want)
    handle.remove()


@pytest.mark.thorough
def test_a_failed_load_reads_no_more_than_it_must(saved_llama: Path, disk: Disk) -> None:
    """What was to stream is not brought into memory just because the load was given up."""
    warm(saved_llama)
    least, read = least_bytes(saved_llama), [0]
    preadv = os.preadv

    def count(fd: int, buffers: list[Any], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        read[0] += got
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", count)
        patch.setattr("brim.techniques.streaming.weight_streaming.Guards.install", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_streamed(saved_llama, least)
    assert read[0] < (saved_llama / "model.safetensors").stat().st_size
    assert held()["threads"] == []


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_table_of_positions_on_disk_takes_a_mask_or_none(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=3000, hidden_size=256, ffn_dim=512, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=4096, word_embed_proj_dim=256, dropout=0.0,
    )  # fmt: skip
    plain = OPTForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    model: Any = brim.load(tmp_path, ram=least_bytes(tmp_path) + (1 << 20), device="cpu")
    assert model.brim.plan.choices("weight_streaming")["model.decoder.embed_positions"] == "stream:disk"
    ids = torch.arange(2, 42)[None]
    for mask in ({}, {"attention_mask": torch.ones_like(ids)}, {"attention_mask": torch.ones(1, 40)}):
        assert torch.equal(model(ids, **mask).logits, plain(ids, **mask).logits)
    os.truncate(tmp_path / "model.safetensors", 100_000)
    with pytest.raises(TransferError):
        model(ids)
    model.brim.close()


def test_a_loaded_model_returns_what_a_pass_frees(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Any = importlib.import_module("brim.run.generate.load")
    set_up: list[str] = []
    monkeypatch.setattr(opened.heap, "return_freed_memory", lambda: set_up.append("heap"))
    brim.load(llama, ram="400MiB").brim.remove()
    assert set_up == ["heap"]
