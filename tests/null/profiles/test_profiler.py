"""Profiler traces: figures are those that one counts by hand, causes those that happened."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from brim.core import EventKind, Timeline
from brim.profiles import profiler as profile
from brim.profiles.activity import ALLOCATE, COPY_NAMES, LAUNCH, SYNCHRONIZE, call_kind
from brim.profiles.figures import CAUSES, DeviceProfile, Profile
from brim.profiles.profiler import copy_kind
from brim.units import MIB
from support.profiles import called, copied, kernel, memory, operation

Events = list[dict[str, Any]]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Sequence[dict[str, Any]]], Profile]:
    def reader(events: Sequence[dict[str, Any]]) -> Profile:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(events), "traceName": "x"}))
        return profile.read(path)

    return reader


@pytest.fixture
def device(read: Callable[[Events], Profile]) -> Callable[[Events], DeviceProfile]:
    return lambda events: read(events).devices[0]


def us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def causes(found: dict[str, float]) -> dict[str, float]:
    return {cause: us(seconds) for cause, seconds in found.items() if us(seconds)}


def test_busy_idle_and_overlap_are_unions_not_sums(device):
    found = device([kernel(0, 10), kernel(5, 10, stream=8), kernel(40, 10), copied(10, 20, MIB), copied(20, 5, 8)])
    assert (us(found.wall_s), us(found.busy_s), us(found.idle_s)) == (50, 25, 25)
    assert (us(found.copy_s), us(found.overlap_s)) == (20, 5)


def test_a_gap_in_which_a_copy_ran_waited_for_the_copy(device):
    found = device(
        [
            kernel(0, 10),
            copied(12, 30, 64 * MIB),
            called("cudaLaunchKernel", 1, 2, key=3),
            kernel(45, 5, key=3),
        ]
    )
    assert causes(found.idle_by_cause) == {"copy": 30, "launch": 5}
    assert found.gaps[0].label == "Memcpy HtoD (Pinned -> Device)"


def test_a_launch_that_came_late_is_the_hosts_doing_and_names_its_operation(device):
    found = device(
        [
            kernel(0, 10),
            operation("aten::linear", 60, 20),
            operation("aten::addmm", 62, 10),
            called("cudaLaunchKernel", 70, 3, key=8),
            kernel(75, 5, key=8),
        ]
    )
    assert causes(found.idle_by_cause) == {"cpu": 60, "launch": 5}
    assert found.gaps[0].label == "aten::linear"


def test_python_between_operations_is_called_python(device):
    found = device([kernel(0, 10), called("cudaLaunchKernel", 70, 3, key=8), kernel(75, 5, key=8)])
    assert found.gaps[0].label == "Python"


def test_waiting_for_the_device_is_a_synchronization_also_for_the_launches_it_delayed(device):
    """The host waited 8 us while the device computed: 8 of the 20 us until its next launch are due to that."""
    found = device(
        [
            kernel(0, 10),
            operation("aten::item", 1, 15),
            called("cudaStreamSynchronize", 2, 10),
            called("cudaLaunchKernel", 32, 3, key=8),
            kernel(34, 5, key=8),
        ]
    )
    assert causes(found.idle_by_cause) == {"synchronization": 2 + 8, "cpu": 12, "launch": 2}


def test_a_long_synchronization_names_the_operation_that_made_it(device):
    found = device(
        [
            kernel(0, 10),
            operation("aten::item", 1, 80),
            called("cudaStreamSynchronize", 2, 70),
            called("cudaLaunchKernel", 75, 3, key=8),
            kernel(76, 5, key=8),
        ]
    )
    assert found.gaps[0].label == "aten::item (cudaStreamSynchronize)"


def test_waiting_for_data_and_for_device_memory_is_told_apart(device):
    found = device(
        [
            kernel(0, 10),
            operation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 10, 30),
            called("cudaMalloc", 45, 20),
            called("cudaLaunchKernel", 70, 3, key=8),
            kernel(70, 5, key=8),
        ]
    )
    assert causes(found.idle_by_cause) == {"data loader": 30, "allocation": 20, "cpu": 10}
    assert found.gaps[0].label == "DataLoader"


def test_a_collective_is_not_computing(device):
    found = device([kernel(0, 10), kernel(10, 40, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL"), kernel(50, 5)])
    assert (us(found.busy_s), us(found.collective_s)) == (15, 40)
    assert causes(found.idle_by_cause) == {"collective": 40}
    collectives = [e for e in found.timeline if e.category == "collective" and e.kind is EventKind.COMPUTE]
    assert [us(e.duration_s) for e in collectives] == [40]


def test_a_gap_that_nobody_explains_is_unknown(device):
    assert causes(device([kernel(0, 10), kernel(30, 10)]).idle_by_cause) == {"unknown": 20}


def test_annotated_steps_are_the_wall(device):
    found = device([operation("ProfilerStep#3", -20, 100, kind="user_annotation"), kernel(0, 10)])
    assert us(found.wall_s) == 100
    assert us(found.idle_s) == 90


@pytest.mark.parametrize("seed", range(5))
def test_causes_sum_to_the_idle_time_and_the_timeline_says_the_same(seed, tmp_path):
    random_ = random.Random(seed)
    events: Events = []
    for key in range(300):
        at = random_.uniform(0, 3000)
        events.append(
            kernel(at + random_.uniform(-5, 30), random_.uniform(0, 8), key=key, stream=random_.choice((7, 8)))
        )
        events.append(called(random_.choice(("cudaLaunchKernel", "cudaMalloc")), at, random_.uniform(0, 5), key=key))
        if key % 10 == 0:
            events.append(called("cudaDeviceSynchronize", at + 9, random_.uniform(0, 60)))
            events.append(copied(at, random_.uniform(0, 40), random_.randrange(1 << 30)))
            events.append(operation("enumerate(DataLoader)#x", at, 30))
            events.append(kernel(at + 4, 25, name="ncclKernel_AllGather", stream=30))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    found = profile.read(path).devices[0]
    assert sum(found.idle_by_cause.values()) == pytest.approx(found.idle_s)
    assert found.busy_s + found.idle_s == pytest.approx(found.wall_s)
    assert set(found.idle_by_cause) <= set(CAUSES)
    idle = [event for event in found.timeline if event.kind is EventKind.IDLE]
    for cause in CAUSES:
        told = sum(event.duration_s for event in idle if event.category == cause)
        assert told == pytest.approx(found.idle_by_cause.get(cause, 0.0))
    computing = [
        (e.time_s, e.time_s + e.duration_s) for e in found.timeline if e.kind is EventKind.COMPUTE and not e.category
    ]
    assert all(e.time_s + e.duration_s <= b + 1e-12 or e.time_s >= f - 1e-12 for e in idle for b, f in computing)


def test_copies_are_counted_by_way_and_size(device):
    found = device(
        [
            copied(0, 5, 100),
            copied(10, 5, 8 * MIB),
            copied(20, 2, 8 * MIB, way="DtoH (Device -> Pageable)"),
            kernel(30, 1),
            copied(40, 3, 5000, way="HtoD (Managed -> Device)"),
            copied(50, 1, 64, way="PtoP (Device -> Device)"),
            kernel(60, 2, name="Memset (Device)") | {"cat": "gpu_memset"},
        ]
    )
    by_kind = {(c.kind, c.unified): c for c in found.copies}
    assert by_kind["H2D", False].sizes == {"< 4 KiB": 1, "< 16 MiB": 1}
    assert by_kind["H2D", False].bytes == 8 * MIB + 100
    assert {kind for kind, _ in by_kind} == {"H2D", "D2H", "P2P", "memset"}
    assert found.unified_share_count == pytest.approx(1 / 6)
    assert found.unified_share_time == pytest.approx(3 / 18)
    assert found.memory_operations_share == pytest.approx(18 / 19)
    assert found.timeline.copied_bytes("ram", "vram") == 8 * MIB + 100 + 5000
    assert found.timeline.copied_bytes("vram", "ram") == 8 * MIB


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "H2D"),
        ("Memcpy DtoH (Device -> Pinned)", "D2H"),
        ("Memcpy PtoP (Device -> Device)", "P2P"),
        ("CopyHostToDevice", "H2D"),
        ("CopyDeviceToDevice", "D2D"),
        ("Memcpy M2D(Memory -> Device)", "H2D"),
        ("odd", "unknown"),
    ],
)
def test_the_way_of_a_copy_is_in_its_name(name, kind):
    assert COPY_NAMES[copy_kind(name)] == kind


def test_calls_that_wait_and_calls_that_allocate_are_known_by_name():
    waits = [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "hipEventSynchronize",
        "cuCtxSynchronize",
        "cudaMemcpy",
    ]
    assert {call_kind(name) for name in [*waits, "cudaStreamSynchronize_v3020", "cuMemcpyDtoH_v2"]} == {SYNCHRONIZE}
    allocations = ["cudaMalloc", "cudaFree", "cudaHostAlloc", "hipMalloc", "cuMemCreate", "cuMemMap", "cudaFreeHost"]
    assert {call_kind(name) for name in allocations} == {ALLOCATE}
    others = ["cudaMallocAsync", "cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamWaitEvent", "cudaEventQuery"]
    assert {call_kind(name) for name in others} == {LAUNCH}


def test_what_was_held_before_the_recording_counts(device):
    found = device(
        [
            kernel(0, 1),
            memory(1, 512, **{"Total Allocated": 5 * MIB + 512, "Total Reserved": 20 * MIB}),
            memory(2, -512, **{"Total Allocated": 5 * MIB, "Total Reserved": 20 * MIB}),
            memory(3, MIB, **{"Total Allocated": 6 * MIB, "Total Reserved": 22 * MIB}),
        ]
    )
    assert found.timeline.peak_bytes.allocated == 6 * MIB
    assert found.timeline.peak_bytes.reserved == 22 * MIB


def test_old_traces_without_totals_never_fall_below_nothing(device):
    found = device([kernel(0, 1), memory(1, -3 * MIB), memory(2, MIB), memory(3, 4 * MIB)])
    assert found.timeline.peak_bytes.allocated == 5 * MIB


def test_a_device_of_which_only_memory_was_recorded_has_a_timeline(device):
    found = device([memory(1, 4096), memory(2, 4096), operation("aten::empty", 0, 5)])
    assert found.timeline.peak_bytes.allocated == 8192
    assert (found.wall_s, found.gaps) == (0.0, ())


def test_memory_of_the_host_is_a_timeline_of_its_own(read):
    found = read([memory(1, 4096, kind=0), memory(2, 8192, kind=0)])
    assert found.devices == ()
    assert found.host.peak_bytes("ram") == 12288


def test_a_device_event_without_arguments_is_its_process(device):
    bare = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 3, "dur": 4}
    assert us(device([bare]).busy_s) == 4


def test_the_longest_gaps_come_first_and_json_is_plain(read):
    found = read([kernel(at * 100, at, name="k") for at in range(1, 40)])
    (one,) = found.devices
    assert len(one.gaps) == 20
    assert [gap.duration_s for gap in one.gaps] == sorted((gap.duration_s for gap in one.gaps), reverse=True)
    assert one.kernels[0].count == 39
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["devices"][0]["kernels"][0]["name"] == "k"
    assert plain["events"] == 39


def test_each_text_goes_into_a_timeline_once(device, monkeypatch):
    """What is handed over in pieces hands over its own texts only, else work grows with the square of the events."""
    handed, extend = [], Timeline.extend

    def counted(self, kinds, numbers, texts):
        handed.append(sum(len(names) for _, names in texts.values()))
        extend(self, kinds, numbers, texts)

    monkeypatch.setattr(Timeline, "extend", counted)
    count = 30_000  # several pieces
    found = device([kernel(at, 0.5, name=f"kernel {at}") for at in range(count)])
    computing = [event for event in found.timeline if event.kind is EventKind.COMPUTE]
    assert [event.label for event in computing] == [f"kernel {at}" for at in range(count)]
    assert sum(handed) < 3 * count


def test_an_allocation_without_an_address_has_none(device):
    bare = memory(1, 512)
    del bare["args"]["Addr"]
    found = device([kernel(0, 1), bare, memory(2, 512, Addr=0), memory(3, 512, Addr=(1 << 64) - 4096)])
    addresses = [event.address for event in found.timeline if event.kind is EventKind.ALLOC]
    assert addresses == [-1, 0, (1 << 63) - 4096]


def test_a_reserve_that_is_not_known_is_no_step(device):
    """Other allocators write events of the same device without totals: what PyTorch's own held stays."""
    known = {"Total Allocated": MIB, "Total Reserved": 20 * MIB}
    found = device([kernel(0, 1), memory(1, MIB, **known), memory(2, 512), memory(3, 512), memory(4, 512, **known)])
    taken = [e for e in found.timeline if e.kind in (EventKind.SEGMENT_ALLOC, EventKind.SEGMENT_FREE)]
    assert [(event.kind, event.bytes) for event in taken] == [(EventKind.SEGMENT_ALLOC, 20 * MIB)]
    assert found.timeline.peak_bytes.reserved == 20 * MIB
