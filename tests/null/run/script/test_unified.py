"""Unified memory without a GPU: what is asked of which resource, what is counted, and what is refused."""

from __future__ import annotations

import io
import threading

import pytest

from brim.errors import UnsupportedError, UsageError
from brim.run.script.settings import Settings
from brim.run.script.unified import AfterItsStream, Spilling, Unified, check_managed

MIB = 1 << 20


class Ledger:
    """A resource that gives addresses, and knows what is held at each."""

    def __init__(self, first: int, limit_bytes: int = 1 << 60) -> None:
        self.held: dict[int, int] = {}
        self._next, self._limit = first, limit_bytes

    def allocate(self, nbytes: int, stream: object = None) -> int:
        if sum(self.held.values()) + nbytes > self._limit:
            raise MemoryError("the device is full")
        self._next += nbytes + 256
        self.held[self._next] = nbytes
        return self._next

    def deallocate(self, ptr: int, nbytes: int, stream: object = None) -> None:
        assert self.held.pop(ptr) == nbytes


def spilling(device: Ledger, host: Ledger, limit: int = 4 * MIB, host_limit: int = 8 * MIB) -> Spilling:
    return Spilling(device, host, limit_bytes=limit, host_limit_bytes=host_limit)


def test_vram_first_then_ram_then_an_error_and_everything_goes_back_where_it_came_from() -> None:
    device, host = Ledger(0), Ledger(1 << 40)
    made = spilling(device, host)
    held = [made.allocate(MIB, None) for _ in range(12)]
    assert len(device.held) == 4 and len(host.held) == 8
    with pytest.raises(MemoryError, match=r"4 MiB of 4 MiB of VRAM and 8 MiB of 8 MiB of RAM"):
        made.allocate(1, None)
    assert made.statistics() == {
        "vram_limit": 4 * MIB,
        "vram_peak": 4 * MIB,
        "spilled_now": 8 * MIB,
        "spilled_peak": 8 * MIB,
        "asked": 12 * MIB + 1,
        "asked_spilled": 8 * MIB,
    }
    made.deallocate(held[0], MIB, None)
    held[0] = made.allocate(MIB, None)
    assert len(device.held) == 4, "room in VRAM is used again"
    for address in held:
        made.deallocate(address, MIB, None)
    assert not device.held and not host.held
    assert made.held_bytes == made.spilled_bytes == 0 and made.spilled_peak_bytes == 8 * MIB


def test_a_device_that_others_use_too_may_be_full_before_the_budget_is() -> None:
    device, host = Ledger(0, limit_bytes=MIB), Ledger(1 << 40)
    made = spilling(device, host)
    for _ in range(3):
        made.allocate(MIB, None)
    assert (made.held_bytes, made.spilled_bytes) == (MIB, 2 * MIB)


def test_a_tensor_that_is_freed_while_another_is_being_made_does_not_hang_it() -> None:
    device, host = Ledger(0), Ledger(1 << 40)
    made = spilling(device, host)
    old = made.allocate(3 * MIB, None)

    class Collecting(Ledger):
        """The garbage collector runs when it likes to."""

        def allocate(self, nbytes: int, stream: object = None) -> int:
            made.deallocate(old, 3 * MIB, None)
            return super().allocate(nbytes, stream)

    made._host = Collecting(1 << 41)
    thread = threading.Thread(target=made.allocate, args=(2 * MIB, None), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert (made.held_bytes, made.spilled_bytes) == (0, 2 * MIB)


def test_host_memory_is_freed_when_its_stream_has_done_what_it_was_given() -> None:
    order: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            order.append("synchronized")

    class Telling(Ledger):
        def deallocate(self, ptr: int, nbytes: int, stream: object = None) -> None:
            order.append("freed")
            super().deallocate(ptr, nbytes, stream)

    host = AfterItsStream(Telling(0))
    made = Spilling(Ledger(1 << 40), host, limit_bytes=0, host_limit_bytes=MIB)
    made.deallocate(made.allocate(MIB, Stream()), MIB, Stream())
    assert order == ["synchronized", "freed"]


def test_threads_do_not_lose_count() -> None:
    device, host = Ledger(0), Ledger(1 << 40)
    made = spilling(device, host, limit=64 * MIB)

    def work() -> None:
        for _ in range(200):
            made.deallocate(made.allocate(MIB, None), MIB, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.held_bytes == made.spilled_bytes == 0 and made.total_bytes == 800 * MIB


def test_what_spilled_is_told_and_warned_of_where_it_is_much() -> None:
    made = spilling(Ledger(0), Ledger(1 << 40))
    unified, stream = Unified(made, None), io.StringIO()
    unified.write_summary(stream)
    assert stream.getvalue() == "", "nothing spilled: nothing to tell"
    for _ in range(8):
        made.allocate(MIB, None)
    unified.write_summary(stream)
    assert "at most 4 MiB were in RAM, 50% of the bytes allocated. Reading them takes most" in stream.getvalue()


def test_more_managed_memory_than_the_device_has_is_refused_unless_insisted_on() -> None:
    check_managed(3 * MIB, 4 * MIB, insist=False)
    with pytest.raises(UsageError, match="hang a driver"):
        check_managed(5 * MIB, 4 * MIB, insist=False)
    check_managed(5 * MIB, 4 * MIB, insist=True)


def test_without_cuda_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is there")
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        Unified.for_process(Settings(mode="unified"))
