"""Engines move bytes in order, hand over failures, and end their threads."""

import threading
import time

import pytest
import torch

from brim.core import EventKind, Timeline
from brim.errors import BrimError, TransferError
from brim.memory.direct_io import OpenFiles, bounce_bytes
from brim.memory.layout import ReadRun
from brim.memory.pool import Buffer, HostSource, Pool
from brim.memory.recorder import Recorder
from brim.memory.transfer import Done, NullEngine, ThreadEngine, Ticket

WAY = ("ram", "vram")


class Bench:
    """An engine over a real file."""

    def __init__(self, path) -> None:
        self.recorder = Recorder(Timeline("test", measured=True))
        self.pool = Pool("ram", 1 << 28, HostSource(), self.recorder)
        self.files = OpenFiles()
        self.engine = ThreadEngine(self.recorder, self.files, lambda size: self.pool.allocate(size, "bounce"))
        self.path = str(path)

    def run(self, offset: int, size: int, at: int = 0, direct: bool = False) -> ReadRun:
        return ReadRun(path=self.path, offset=offset, bytes=size, at=at, direct=direct)

    def buffer(self, size: int) -> Buffer:
        return self.pool.allocate(size, "target")

    def close(self) -> None:
        self.engine.close()
        self.files.close()


@pytest.fixture
def data() -> torch.Tensor:
    return torch.randint(0, 256, (20_000_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def bench(tmp_path, data):
    path = tmp_path / "weights.bin"
    path.write_bytes(data.numpy().tobytes())
    made = Bench(path)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("brim-")]


def test_a_read_then_a_copy_arrives(bench, data):
    host, device = bench.buffer(1 << 24), bench.buffer(1 << 24)
    read = bench.engine.read([bench.run(12_345, 9_000_000)], host, "block", [])
    copied = bench.engine.copy(host.tensor[:9_000_000], device, "block", [read], WAY)
    copied.wait()
    assert torch.equal(device.tensor[:9_000_000], data[12_345 : 12_345 + 9_000_000])
    kinds = [(e.source, e.tier, e.bytes) for e in bench.recorder.timeline if e.kind is EventKind.COPY]
    assert kinds == [("disk", "ram", 9_000_000), ("ram", "vram", 9_000_000)]


def test_a_move_waits_for_what_it_comes_after(bench, data):
    gate, target = Ticket(), bench.buffer(1 << 20)
    read = bench.engine.read([bench.run(0, 1000)], target, "block", [gate])
    time.sleep(0.05)
    assert not read.done
    gate.finish()
    read.wait()
    assert torch.equal(target.tensor[:1000], data[:1000])


def test_a_read_past_the_end_says_how_much_is_missing(bench):
    read = bench.engine.read([bench.run(19_999_000, 5000)], bench.buffer(1 << 20), "block", [])
    with pytest.raises(TransferError, match="ends") as failure:
        read.wait()
    assert bench.path in str(failure.value)


def test_a_missing_file_and_what_depends_on_it_fail_and_later_moves_do_not(bench, data):
    target = bench.buffer(1 << 20)
    gone = ReadRun(path=bench.path + ".gone", offset=0, bytes=10, at=0, direct=False)
    read = bench.engine.read([gone], target, "block", [])
    copied = bench.engine.copy(target.tensor, bench.buffer(1 << 20), "block", [read], WAY)
    for ticket in (read, copied):
        with pytest.raises(TransferError, match="No such file"):
            ticket.wait()
    again = bench.engine.read([bench.run(0, 10)], target, "block", [])
    again.wait()
    assert torch.equal(target.tensor[:10], data[:10])


def test_an_unexpected_error_on_a_thread_reaches_the_waiter(bench):
    class Broken:
        def wait(self) -> None:
            raise ZeroDivisionError("a bug")

    with pytest.raises(BrimError, match="a bug"):
        bench.engine.read([], bench.buffer(10), "block", [Broken()]).wait()


def test_closing_ends_waiting_and_refuses_more(bench):
    gate, target = Ticket(), bench.buffer(1 << 24)
    first = bench.engine.read([bench.run(0, 16_000_000)], target, "block", [gate])
    queued = bench.engine.read([bench.run(0, 16_000_000)], target, "block", [])
    threading.Timer(0.05, gate.finish).start()
    bench.engine.close()
    for ticket in (first, queued, bench.engine.read([bench.run(0, 1)], target, "block", [])):
        with pytest.raises(TransferError, match="closed"):
            ticket.wait()
    bench.engine.close()


def test_without_direct_io_the_bytes_are_the_same(bench, data, monkeypatch):
    monkeypatch.setattr("brim.memory.direct_io._O_DIRECT", 0)
    target = bench.buffer(1 << 24)
    bench.engine.read([bench.run(4096 + 7, 9_000_000, at=7, direct=True)], target, "block", []).wait()
    assert torch.equal(target.tensor[7 : 7 + 9_000_000], data[4096 + 7 : 4096 + 7 + 9_000_000])


def test_the_null_engine_writes_down_the_same_copies_and_moves_nothing():
    recorder = Recorder(Timeline("test", measured=False))
    pool = Pool("vram", 1 << 20, HostSource(), recorder)
    ram = Pool("ram", 1 << 20, HostSource(), recorder)
    engine = NullEngine(recorder, OpenFiles(), lambda bytes: ram.allocate(bytes, "bounce buffer"))
    target = pool.allocate(100, "slot")
    runs = [ReadRun(path="nowhere", offset=0, bytes=60, at=0, direct=False)] * 2
    assert isinstance(engine.read(runs, target, "block", []), Done)
    engine.copy(torch.ones(50, dtype=torch.uint8), target, "block", [], WAY).wait()
    copies = [(e.source, e.tier, e.bytes) for e in recorder.timeline if e.kind is EventKind.COPY]
    assert copies == [("disk", "ram", 120), ("ram", "vram", 50)]
    assert int(target.tensor.sum()) == 0
    assert ram.held_bytes == bounce_bytes(runs) > 0
