"""Page-locked memory: registered for as long as it is mapped, and no longer."""

from __future__ import annotations

import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from brim import accelerator
from brim.measure import device_rates
from brim.memory import streams
from brim.memory.streams import PinnedSource
from support.placed import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)])


@pytest.mark.parametrize("bytes", [100, 5000, 5 * MIB])
def test_an_address_can_be_locked_again_once_its_last_view_is_gone(bytes):
    source = PinnedSource(DEVICE)
    for _ in range(5):
        view = source.make(bytes)[3:9]
        assert view.is_pinned()
        address = view.data_ptr()
    del view
    assert not torch.frombuffer(bytearray(8), dtype=torch.uint8).is_pinned()
    assert address


def test_pages_are_locked_by_a_processor_of_the_gpu_s_node(monkeypatch):
    allowed, seen = os.sched_getaffinity(0), []
    lock = streams.page_lock
    monkeypatch.setattr(
        streams, "processors_near", lambda pci_address, system: asked.append(pci_address) or {min(allowed)}
    )
    monkeypatch.setattr(streams, "page_lock", lambda *args: seen.append(os.sched_getaffinity(0)) or lock(*args))
    asked = []
    assert PinnedSource(DEVICE).make(MIB).is_pinned()
    assert seen == [{min(allowed)}] and os.sched_getaffinity(0) == allowed
    assert all(re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.0", address) for address in asked) and asked


def test_a_refused_lock_leaves_memory_that_is_copied_all_the_same(monkeypatch):
    runtime = torch.cuda.cudart()

    class Refusing:
        cudaHostRegister = staticmethod(lambda *args: 1)
        cudaHostUnregister = staticmethod(lambda *args: pytest.fail("it was not registered"))

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    with pytest.warns(UserWarning, match="page-locked") as warned:
        source = PinnedSource(DEVICE)
        tensor, other = source.make(MIB), source.make(2 * MIB)
    assert len(warned) == 1
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor.fill_(7)
    assert not tensor.is_pinned() and bool((tensor.cuda().cpu() == 7).all())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: Refusing)
        del tensor, other


def test_links_are_measured_where_nothing_can_be_locked(monkeypatch):
    told = torch.cuda.cudart().cudaMemGetInfo
    refusing = SimpleNamespace(cudaHostRegister=lambda *args: 304, cudaMemGetInfo=told)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(device_rates, "_COPY_BYTES", MIB)
    on = accelerator.available(accelerator.CUDA)
    assert on is not None
    with device_rates.unnoticed(on):
        there, back = device_rates.links(on)
    assert there.bytes_per_s > 0 and back.bytes_per_s > 0
    torch.zeros(1, device=DEVICE)  # no error is left over


@torch.no_grad()
def test_models_that_are_closed_removed_or_dropped_lock_nothing_that_stays():
    for end in ("remove", "close", "drop", "remove", "drop"):
        model = net()
        handle = place(model, vram=MIB, ram="64MiB", device="cuda", activations="64KiB")
        model(torch.ones(2, 256).cuda())
        if end != "drop":
            getattr(handle, end)()
        del model, handle


def test_a_child_of_a_fork_copies_no_locked_page():
    tensor = PinnedSource(DEVICE).make(8 * MIB)
    tensor.fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if not child:
        os._exit(int(tensor[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(tensor[0]) == 1
