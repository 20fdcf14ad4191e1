"""A trace through the simulated allocator: peaks, limits, and the operation that does not fit."""

import pytest
import torch

import brim
from brim import simulate
from brim.catalog import general_context, gpu
from brim.core import Category, EventKind, Hardware, Op, Phase, Storage, Tier, Trace
from brim.errors import UsageError
from brim.estimation.simulation import place_of

MIB = 1 << 20


def trace(
    *lives: tuple[int, int, int | None], target: str = "cuda", category=Category.ACTIVATION, module=""
) -> Trace:
    """One operation at tick 0, then storages of (bytes, born, died)."""
    op = Op(name="aten.mm.default", module="layers.0", phase=Phase.FORWARD, step=0, at=0)
    storages = tuple(
        Storage(id=index, bytes=size, category=category, module=module, born=born, died=died)
        for index, (size, born, died) in enumerate(lives)
    )
    return Trace(model="tiny", target=target, ops=(op,), storages=storages, step_starts=(0,))


def test_cuda_peaks_are_counted_in_blocks_and_segments():
    peaks = simulate(trace((1000, 1, 4), (3 * MIB, 2, 3), (100, 5, None))).peak_bytes
    assert peaks.allocated == 1024 + 3 * MIB
    assert peaks.reserved == 2 * MIB + 20 * MIB
    assert peaks.process == peaks.reserved + general_context().bytes


def test_cpu_peaks_are_added_up_to_the_byte():
    timeline = simulate(trace((1000, 1, 4), (3 * MIB, 2, 3), (100, 5, None), target="cpu"))
    peaks = timeline.peak_bytes
    assert (peaks.allocated, peaks.reserved, peaks.process) == (1000 + 3 * MIB,) * 3
    assert timeline.peak_bytes("ram") == peaks.allocated


def test_every_event_names_its_storage_and_operation():
    events = [e for e in simulate(trace((1000, 1, 2))) if e.kind in (EventKind.ALLOC, EventKind.FREE)]
    assert [(e.kind, e.storage, e.bytes, e.label) for e in events] == [
        (EventKind.ALLOC, 0, 1024, "aten.mm.default"),
        (EventKind.FREE, 0, 1024, "aten.mm.default"),
    ]


def test_a_request_that_does_not_fit_ends_the_timeline_and_names_the_operation():
    small = Hardware(name="small", compute="vram", tiers=(Tier(name="vram", capacity_bytes=general_context().bytes),))
    failed = simulate(trace((8 * MIB, 1, None), (8 * MIB, 2, None)), small).out_of_memory
    assert failed is not None
    assert failed.storage == 0
    assert failed.label.startswith("aten.mm.default in layers.0 (forward of step 1): CUDA out of memory.")


def test_memory_without_a_gpu_has_no_end():
    timeline = simulate(trace((1 << 50, 1, None)))
    assert timeline.out_of_memory is None
    assert timeline.peak_bytes.allocated == 1 << 50


def test_settings_of_the_allocator_are_followed():
    lives = [(6 * MIB, 1, None), (6 * MIB, 2, None)]
    assert simulate(trace(*lives), alloc_conf="expandable_segments:True").peak_bytes.reserved == 20 * MIB
    assert simulate(trace(*lives), alloc_conf="large_segment_size_mb:40").peak_bytes.reserved == 40 * MIB


def test_the_cublas_workspace_is_that_of_the_gpu():
    made = trace((8519680, 1, None), category=Category.WORKSPACE, module="cuBLAS")
    assert simulate(made, "H200").peak_bytes.allocated == gpu("H200").cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"gpu": "RTX 4091"}, "RTX 4090"),
        ({"alloc_conf": "expandable_segment:True"}, "expandable_segments"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(arguments, told):
    with pytest.raises(UsageError, match=told):
        simulate(trace((1, 1, 2)), **arguments)


@pytest.mark.parametrize("arguments", [{"gpu": "RTX 4090"}, {"alloc_conf": "expandable_segments:True"}])
def test_a_cpu_trace_takes_no_gpu_settings(arguments):
    with pytest.raises(UsageError, match="CPU"):
        simulate(trace((1, 1, 2), target="cpu"), **arguments)


def test_sizes_are_rounded_as_the_settings_say():
    odd = trace((9 * MIB + 1, 1, None))
    assert simulate(odd, alloc_conf="roundup_power2_divisions:2").peak_bytes.allocated == 12 * MIB


def test_a_traced_workspace_is_the_one_of_the_gpu_that_is_simulated():
    def build():
        weight = torch.ones(8, 8, device="cuda")
        return lambda: weight @ weight

    made = brim.trace(build, steps=1, target="cuda")
    ada, hopper = (simulate(made, name).peak_bytes.allocated for name in ("RTX 4090", "H200"))
    assert hopper - ada == 32 * MIB - 8_519_680


def test_a_limit_above_the_memory_of_the_gpu_is_noted():
    card = place_of("RTX 4090")
    above, below = place_of("RTX 4090", "100GiB"), place_of("RTX 4090", "20GiB")
    assert (above.total_bytes, below.total_bytes) == (card.total_bytes, 20 << 30)
    assert [note for note in above.notes if "--vram" in note]
    assert below.notes == card.notes
