"""Work of streams that happens as late as CUDA allows: what does not wait for it finds poison, or is told of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OnDevice

HEAD = """
    import ctypes, mmap, torch
    from brim.device import loaded
    device, result = loaded(), {}
    runtime = ctypes.CDLL("libbrimdevice.so")
    N = 1 << 16
    side = torch.cuda.Stream()
    def numbers(first=0.0):
        return torch.arange(N, dtype=torch.float32).add_(first).pin_memory()
    def take_hazards():
        found = device.hazards()
        device.reset()
        return found
    torch.cuda.synchronize()
    device.reset()
"""

COPIES = """
    # onto the device and back, with every wait that is needed
    source, back, there = numbers(), torch.empty(N).pin_memory(), torch.empty(N, device="cuda")
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    back.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    result["early"] = [bool(back.isnan().all()), event.query()]
    event.synchronize()
    result["waited"] = [bool(torch.equal(back, source)), event.query(), take_hazards()]

    # the default stream does not wait for the copy
    again = torch.empty(N, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        again.copy_(source, non_blocking=True)
    back.copy_(again, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    result["missing"] = [bool(back.isnan().any()), take_hazards()]
    torch.cuda.synchronize()
    take_hazards()

    # the pinned buffer is filled anew before its copy happened
    buffer = numbers()
    with torch.cuda.stream(side):
        there.copy_(buffer, non_blocking=True)
    buffer.fill_(-1)
    side.synchronize()
    result["refilled"] = there.cpu().unique().tolist()
    take_hazards()

    # a slot is overwritten while another stream may still read it
    slot, other = numbers().cuda(), numbers(7)
    torch.cuda.synchronize()
    take_hazards()
    back.copy_(slot, non_blocking=True)
    with torch.cuda.stream(side):
        slot.copy_(other, non_blocking=True)
    result["overwritten"] = take_hazards()
    torch.cuda.synchronize()

    # as above, but the second copy waits for the first
    slot.copy_(source)
    torch.cuda.synchronize()
    back.copy_(slot, non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slot.copy_(other, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    result["ordered"] = [bool(torch.equal(back, source)), take_hazards()]
    side.synchronize()

    # a kernel that Python computes reads a slot; a copy into it comes too early
    default = torch.cuda.current_stream()
    device.begin_kernel(default.cuda_stream)
    device.kernel_access(default.cuda_stream, slot.data_ptr(), slot.nbytes, writes=False, name="aten::mm")
    with torch.cuda.stream(side):
        slot.copy_(other, non_blocking=True)
    result["kernel"] = take_hazards()
    torch.cuda.synchronize()

    # an event that is asked again and again is ready some day
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
        event.record()
    asked = 1
    while not event.query():
        asked += 1
    result["asked"] = asked

    # memory that is not pinned: the host waits
    before = device.pageable_copies()
    plain = torch.arange(N, dtype=torch.float32)
    with torch.cuda.stream(side):
        there.copy_(plain, non_blocking=True)
        plain.fill_(-1)
    side.synchronize()
    result["pageable"] = [device.pageable_copies() - before, there.cpu()[1].item(), take_hazards()]

    # memory that was never written is poisoned
    result["fresh"] = bool(torch.empty(3 << 20, device="cuda").cpu().isnan().all())
"""

REGISTRATION = """
    memory = mmap.mmap(-1, 4 * N)
    plain = torch.frombuffer(memory, dtype=torch.float32)
    pointer, size = ctypes.c_void_p(plain.data_ptr()), ctypes.c_size_t(4 * N)
    inside = ctypes.c_void_p(plain.data_ptr() + 4096)
    def called(name, *arguments):
        error = getattr(runtime, name)(*arguments)
        return [error, runtime.cudaGetLastError(), runtime.cudaGetLastError()]
    result["registered"] = called("cudaHostRegister", pointer, size, 0)
    result["pinned"] = plain.is_pinned()
    result["twice"] = called("cudaHostRegister", pointer, size, 0)
    result["part"] = called("cudaHostRegister", inside, ctypes.c_size_t(4096), 0)
    result["inside"] = called("cudaHostUnregister", inside)
    target = torch.empty(N, device="cuda")
    with torch.cuda.stream(side):
        target.copy_(plain, non_blocking=True)
    result["released"] = called("cudaHostUnregister", pointer)
    result["early"] = take_hazards()
    result["again"] = called("cudaHostUnregister", pointer)
    runtime.cudaHostRegister(pointer, size, 0)
    across = torch.empty(2 * N, device="cuda")
    half = torch.empty(N // 2, dtype=torch.float32)
    result["beyond"] = runtime.cudaMemcpyAsync(
        ctypes.c_void_p(across.data_ptr()), inside, size, 1, ctypes.c_void_p(side.cuda_stream)
    )
    runtime.cudaGetLastError()
    result["unmapped range"] = runtime.cudaHostRegister(ctypes.c_void_p(4096), ctypes.c_size_t(4096), 0)
    runtime.cudaGetLastError()
    # the mapping goes while it is registered and a copy out of it has not happened
    with torch.cuda.stream(side):
        target.copy_(plain, non_blocking=True)
    ctypes.CDLL(None).munmap(pointer, size)
    side.synchronize()
    result["unmapped"] = take_hazards()
"""

SEEDED = """
    sources = [numbers(i) for i in range(8)]
    slots = [torch.empty(N, device="cuda") for _ in sources]
    backs = [torch.empty(N).pin_memory() for _ in sources]
    torch.cuda.synchronize()
    for source, slot, back in zip(sources, slots, backs):
        with torch.cuda.stream(side):
            slot.copy_(source, non_blocking=True)
            back.copy_(slot, non_blocking=True)
    result["happened"] = [not bool(back.isnan().any()) for back in backs]
    side.synchronize()
    result["right"] = all(torch.equal(source, back) for source, back in zip(sources, backs))
    result["hazards"] = device.hazards()
"""

TRAINING = """
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.zeros(32, 64), batch_size=8, pin_memory=True)
    for batch in data:
        model(batch.to("cuda", non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    result["hazards"] = device.hazards()
"""

# A model whose blocks come from RAM and from disk, with one wait taken out of the code that moves them.
STREAMED = """
    import os, torch
    from torch import nn
    from brim.memory import streams
    from brim.memory.transfer import Done
    from brim.device import loaded
    from support.placed import place

    def without(planted):
        if planted == "the copy":  # before a block computes, or its slot is filled anew
            streams.StreamPoint.wait = lambda self: None
            streams._IssuedLater.wait = lambda self: self.ticket.wait()
        if planted == "the compute":  # that still uses a slot
            streams.StreamEngine.mark = lambda self: Done()
        if planted == "the staging buffer":  # that a copy still reads
            waits = streams._HostWait.wait
            streams._IssuedLater.synchronize = lambda self: self.ticket.wait()
            streams._HostWait.wait = lambda self: (
                None if isinstance(getattr(self._condition, "condition", self._condition), streams.StreamPoint)
                else waits(self)
            )

    def net():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)])

    with torch.no_grad():
        x = torch.ones(2, 256, device="cuda")
        expected, model = net().cuda()(x).cpu(), net()
        without(os.environ["PLANTED"])
        handle = place(model, vram=1 << 20, ram=3 << 19, device="cuda", activations="64KiB")
        kinds = sorted(set(handle.plan.choices("weight_streaming").values()))
        loaded().reset()
        right = [torch.equal(model(x).cpu(), expected) for _ in range(3)]
        result = {"kinds": kinds, "right": all(right), "hazards": loaded().hazards()}
        os._exit(print("\\n" + __import__("json").dumps(result), flush=True) or 0)  # waits were taken out for good
"""

# A training whose activations and optimizer states go to RAM and back, with one wait taken out.
TRAINED = """
    import os, torch
    from torch import nn
    from brim.core import Timeline
    from brim.memory import streams
    from brim.memory.tiers import device_memory
    from brim.memory.transfer import Done
    from brim.device import loaded
    from brim.techniques.activation_offload import technique as activation_offload
    from brim.techniques.checkpointing import technique as checkpointing
    from brim.techniques.optimizer_offload import technique as optimizer_offload

    def without(planted):
        if planted == "the copy":  # of an activation back, before the backward pass reads it
            streams.StreamPoint.wait = lambda self: None
            streams._IssuedLater.wait = lambda self: self.ticket.wait()
        if planted == "the compute":  # that makes what is sent away, and reads what came back
            streams.StreamEngine.mark = lambda self: Done()
        if planted == "the host's wait":  # for a copy from VRAM, before its bytes are written to the disk
            waits = streams._HostWait.wait
            streams._IssuedLater.synchronize = lambda self: self.ticket.wait()
            streams._HostWait.wait = lambda self: (
                None if isinstance(getattr(self._condition, "condition", self._condition), streams.StreamPoint)
                else waits(self)
            )
        if planted == "the gradients":  # on their way to RAM, before they are stepped there
            streams.StreamEngine.finish = lambda self, condition: None

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    def losses(offloads):
        torch.manual_seed(0)
        net = nn.Sequential(*[Block() for _ in range(6)]).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        if offloads:
            where = torch.device("cuda", torch.cuda.current_device())
            memory = device_memory(Timeline("t", measured=True), vram_bytes=1 << 30, ram_bytes=1 << 30, device=where)
            if way == "pieces":
                repeats = checkpointing.apply(net, {str(i): checkpointing.FULL for i in range(6)}, rows=16)
            if not on_gpu:
                held = activation_offload.apply(net, [str(i) for i in range(6)], memory, window_bytes=8 << 20)
            away = optimizer_offload.apply(
                net, optimizer, memory, states=rests, block_bytes=1 << 20, gpu_sixteenths=on_gpu
            )
        made = []
        for step in range(3):
            x = torch.full((64, 4, 256), step / 3, device="cuda")
            loss = net(x).pow(2).mean()
            with away.final() if offloads else torch.enable_grad():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append(loss.item())
        return made

    way = os.environ["WAY"]
    on_gpu, rests = int(way.endswith("to the GPU")), "disk" if way.startswith("disk") else "ram"
    expected = losses(False)
    loaded().reset()
    without(os.environ["PLANTED"])
    found = losses(True)
    right = bool(torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0 if on_gpu else 1e-4, atol=0))
    result = {"right": right, "hazards": loaded().hazards()}
    os._exit(print("\\n" + __import__("json").dumps(result), flush=True) or 0)
"""


@pytest.fixture(scope="module")
def copies(on_device: OnDevice) -> Any:
    return on_device.run(HEAD + COPIES, order="late")


@pytest.fixture(scope="module")
def registration(on_device: OnDevice) -> Any:
    return on_device.run(HEAD + REGISTRATION, order="late")


def test_a_target_is_poison_until_something_waits_and_right_then(copies: Any) -> None:
    assert copies["early"] == [True, False]
    assert copies["waited"] == [True, True, []]


def test_a_missing_wait_reads_poison_and_is_a_hazard(copies: Any) -> None:
    poisoned, hazards = copies["missing"]
    assert poisoned and len(hazards) == 1
    assert "a copy to the host on stream" in hazards[0] and "is not ordered after it" in hazards[0]


def test_a_pinned_buffer_that_is_filled_too_early_is_what_the_device_gets(copies: Any) -> None:
    assert copies["refilled"] == [-1.0]


def test_a_slot_overwritten_too_early_is_a_hazard(copies: Any) -> None:
    assert len(copies["overwritten"]) == 1 and "writes" in copies["overwritten"][0]
    assert copies["ordered"] == [True, []]


def test_so_it_is_where_a_computed_kernel_reads_it(copies: Any) -> None:
    assert len(copies["kernel"]) == 1 and "aten::mm" in copies["kernel"][0]


def test_a_loop_that_polls_an_event_ends(copies: Any) -> None:
    assert 2 < copies["asked"] < 100


def test_pageable_memory_is_read_before_the_call_returns(copies: Any) -> None:
    assert copies["pageable"] == [1, 1.0, []]


def test_new_memory_is_poison(copies: Any) -> None:
    assert copies["fresh"]


def test_memory_is_registered_once(registration: Any) -> None:
    """The error stays until somebody takes it, as in CUDA: PyTorch's next launch would raise it."""
    assert registration["registered"] == [0, 0, 0] and registration["pinned"]
    assert registration["twice"] == registration["part"] == [712, 712, 0]
    assert registration["inside"] == registration["again"] == [713, 713, 0]
    assert registration["unmapped range"] == 1


def test_memory_released_before_its_copy_is_a_hazard(registration: Any) -> None:
    assert registration["released"][0] == 0
    assert len(registration["early"]) == 1 and "cudaHostUnregister" in registration["early"][0]
    assert len(registration["unmapped"]) == 1 and "was unmapped before the copy" in registration["unmapped"][0]


def test_a_copy_past_the_end_of_what_is_registered_is_refused(registration: Any) -> None:
    assert registration["beyond"] == 1


def test_a_seed_settles_when_copies_happen(on_device: OnDevice) -> None:
    first, same, other = (on_device.run(HEAD + SEEDED, order="seeded", seed=seed) for seed in (1, 1, 2))
    assert first == same and first["happened"] != other["happened"]
    for outcome in (first, other):
        assert outcome["right"] and outcome["hazards"] == []


def test_ordinary_training_has_no_hazards(on_device: OnDevice) -> None:
    assert on_device.run(HEAD + TRAINING, order="late")["hazards"] == []


@pytest.mark.parametrize("planted", ["", "the copy", "the compute", "the staging buffer"])
def test_a_wait_that_is_missing_in_a_streamed_model_is_noticed(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """``tests/gpu`` fails of it: there a hazard is an error of the test that had it."""
    monkeypatch.setenv("PLANTED", planted)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    found = on_device.run(STREAMED, values="all", order="late")
    assert {"stream:disk", "stream:ram"} <= set(found["kinds"])
    if planted:  # the host's own writes are no accesses of a stream: they show in what the device gets
        assert found["hazards"] != [] or not found["right"]
    else:
        assert found["right"] and found["hazards"] == []


@pytest.mark.parametrize(
    ("planted", "way"),
    [
        *((planted, "activations") for planted in ("", "the copy", "the compute", "the gradients")),
        *((planted, "pieces") for planted in ("", "the copy", "the compute")),
        *((planted, "RAM to the GPU") for planted in ("", "the copy", "the compute")),
        *((planted, "disk to the GPU") for planted in ("", "the copy", "the compute", "the host's wait")),
    ],
)
def test_so_is_one_in_a_training_that_offloads(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch, planted: str, way: str
) -> None:
    monkeypatch.setenv("PLANTED", planted)
    monkeypatch.setenv("WAY", way)
    found = on_device.run(TRAINED, values="all", order="late")
    if planted:
        assert found["hazards"] != [] or not found["right"]
    else:
        assert found["right"] and found["hazards"] == []
