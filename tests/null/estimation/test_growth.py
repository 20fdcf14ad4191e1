"""Memory at other sizes is solved, and equals a trace at those sizes."""

import dataclasses

import pytest

from brim.core import Hardware, Tier
from brim.estimation.estimate import Study, traced
from brim.estimation.growth import Solved
from brim.estimation.models import find_model
from brim.estimation.simulation import place_of, simulate
from brim.estimation.steps import Job
from brim.estimation.workload import Workload


def trace_of(source, **settings):
    return traced(Job(source, Workload(**settings)), (8, 0))


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_bytes_are_linear_in_the_batch(folder, name):
    source = find_model(folder(name))
    settings = {"seq": 32} if name == "llama" else {}
    solved = Solved([(size, trace_of(source, batch=size, **settings)) for size in (2, 3)])
    assert solved.of_one_structure
    assert solved.at(7).storages == trace_of(source, batch=7, **settings).storages


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bytes_are_at_most_quadratic_in_the_sequence(folder, attention):
    source = find_model(folder("llama", attn_implementation=attention))
    solved = Solved([(length, trace_of(source, batch=2, seq=length)) for length in (32, 64, 128)])
    assert solved.of_one_structure
    assert solved.at(256).storages == trace_of(source, batch=2, seq=256).storages


def test_the_largest_batch_fits_and_the_next_does_not(folder):
    source = find_model(folder("llama"))
    gpu = Hardware(name="small", compute="vram", tiers=(Tier(name="vram", capacity_bytes=600 << 20),))
    study = Study(source, Workload(batch=1, seq=64), place_of(gpu), None, "")
    largest = study.growth().largest_batch
    assert largest is not None
    assert largest > 1
    fits = [
        simulate(trace_of(source, batch=size, seq=64), gpu).out_of_memory is None for size in (largest, largest + 1)
    ]
    assert fits == [True, False]


def test_no_batch_fits_where_the_weights_do_not(folder):
    gpu = Hardware(name="tiny", compute="vram", tiers=(Tier(name="vram", capacity_bytes=400 << 20),))
    study = Study(find_model(folder("llama")), Workload(seq=16), place_of(gpu), None, "")
    assert study.growth().largest_batch == 0


def test_growth_tells_the_peaks_of_the_sizes_that_were_traced(folder):
    source = find_model(folder("llama"))
    study = Study(source, Workload(batch=2, seq=256), place_of(None), None, "")
    growth, found = study.growth(), study.estimate()
    assert growth.largest_batch is None
    same = [p for p in (*growth.batches, *growth.lengths) if (p.batch, p.seq) == (2, 256)]
    assert len(same) == 2
    assert all(point.allocated_bytes == found.peak_bytes.allocated for point in same)


def test_a_users_own_step_does_not_grow():
    study = Study(find_model(lambda: lambda: None), Workload(), place_of(None), None, "")
    assert dataclasses.astuple(study.growth()) == ((), (), None)
