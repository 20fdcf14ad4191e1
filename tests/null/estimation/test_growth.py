"""Memory at other sizes is solved, and equals a trace at those sizes."""

import dataclasses

import pytest

from brim.core import Hardware, Tier
from brim.estimation import extrapolation
from brim.estimation.estimate import Study, traced
from brim.estimation.growth import numbers, polynomial, powers, structure, with_workspaces
from brim.estimation.models import find_model
from brim.estimation.simulation import Replay, place_of, simulate
from brim.estimation.steps import Job
from brim.estimation.workload import Workload


def trace_of(source, **settings):
    return traced(Job(source, Workload(**settings)), (8, 0))


def bytes_of(trace):
    return [storage.bytes for storage in trace.storages]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet"])
def test_two_traces_tell_the_sizes_at_any_batch_and_length(folder, name):
    source = find_model(folder(name, n_positions=512))
    first, second, asked = [(2, 64), (6, 128), (7, 192)]
    if name == "resnet":
        first, second, asked = [(batch, None) for batch, _ in (first, second, asked)]
    traces = [trace_of(source, batch=batch, seq=seq) for batch, seq in (first, second, asked)]
    assert structure(traces[0]) == structure(traces[1]) == structure(traces[2])
    solved = powers(*(numbers(trace.storages) for trace in traces[:2]), first, second)
    assert solved is not None
    bytes_at = with_workspaces(solved, traces[0].storages)
    assert bytes_at(asked[0], asked[1] or 0) == bytes_of(traces[2])


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bytes_are_at_most_quadratic_in_the_sequence(folder, attention):
    source = find_model(folder("llama", attn_implementation=attention))
    lengths = (32, 64, 128)
    traces = [trace_of(source, batch=2, seq=length) for length in lengths]
    solved = polynomial(lengths, [numbers(trace.storages) for trace in traces])
    bytes_at = with_workspaces(lambda _, length: solved(length), traces[0].storages)
    assert bytes_at(2, 256) == bytes_of(trace_of(source, batch=2, seq=256))


def test_a_size_without_a_law_is_no_power():
    assert powers([1000, 512], [1700, 512], (2, 64), (6, 128)) is None
    assert powers([1_000_000, 1000], [6_000_000, 5700], (2, 64), (6, 128))(4, 64) == [2_000_000, 1940]


@pytest.mark.parametrize("alloc_conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_a_replay_has_the_peaks_of_the_simulation(folder, alloc_conf):
    trace = trace_of(find_model(folder("llama")), batch=2, seq=64)
    for gpu in ("H100 SXM", "RTX 3060"):
        place = place_of(gpu)
        peaks, found = simulate(trace, place, alloc_conf).peak_bytes, Replay(trace, alloc_conf).peaks(None, place)
        assert (peaks.allocated, peaks.reserved) == (found.allocated_bytes, found.reserved_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_largest_batch_fits_and_the_next_does_not(folder, name):
    source = find_model(folder(name))
    gpu = Hardware(name="small", compute="vram", tiers=(Tier(name="vram", capacity_bytes=600 << 20),))
    study = Study(source, Workload(batch=1, seq=64), place_of(gpu), None, "")
    largest = study.growth().largest_batch
    assert largest is not None
    assert largest > 1
    fits = [
        simulate(trace_of(source, batch=size, seq=64), gpu).out_of_memory is None for size in (largest, largest + 1)
    ]
    assert fits == [True, False]


@pytest.mark.slow
def test_a_deep_model_grows_as_its_whole_trace_does(folder, monkeypatch):
    """One shallow trace tells the sizes of all layers."""
    source = find_model(folder("llama", num_hidden_layers=12))
    with monkeypatch.context() as patch:
        patch.setattr(extrapolation, "_FEWEST_LAYERS", 99)
        whole = Study(source, Workload(batch=2, seq=64), place_of(None), None, "").growth()
    study = Study(source, Workload(batch=2, seq=64), place_of(None), None, "")
    assert study.job.template is not None
    assert study.growth() == whole
    assert len(whole.batches) == 4
    assert len(whole.lengths) == 5


@pytest.mark.thorough
def test_a_long_generation_grows_as_each_size_by_itself(folder):
    """A few tokens of a shallow model have the sizes of all tokens and layers."""
    source = find_model(folder("llama", num_hidden_layers=12))
    workload = Workload(task="generate", batch=2, seq=64, new_tokens=24)
    study = Study(source, workload, place_of(None), None, "")
    assert study.job.template is not None
    growth = study.growth()
    assert [point.batch for point in growth.batches] == [2, 4, 8, 16]
    assert [point.seq for point in growth.lengths] == [64, 128, 256, 512, 1024]
    for point in (growth.batches[1], growth.lengths[2]):
        changed = dataclasses.replace(workload, batch=point.batch, seq=point.seq)
        peaks = Study(source, changed, place_of(None), None, "").estimate().peak_bytes
        assert (point.allocated_bytes, point.reserved_bytes) == (peaks.allocated, peaks.reserved), point


@pytest.mark.thorough
def test_batches_of_few_tokens_are_told_too(folder):
    gpu = Hardware(name="small", compute="vram", tiers=(Tier(name="vram", capacity_bytes=700 << 20),))
    source = find_model(folder("gpt2"))
    growth = Study(source, Workload(seq=64), place_of(gpu), None, "").growth()
    assert [point.batch for point in growth.batches] == [1, 64, 128, 256]
    assert growth.largest_batch > 64
    for point in growth.batches[1:3]:  # sums over rows are made in other parts at each
        peaks = simulate(trace_of(source, batch=point.batch, seq=64)).peak_bytes
        assert (point.allocated_bytes, point.reserved_bytes) == (peaks.allocated, peaks.reserved)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [1, 2, 70])
def test_the_largest_batch_is_the_same_whatever_batch_was_given(folder, batch):
    gpu = Hardware(name="small", compute="vram", tiers=(Tier(name="vram", capacity_bytes=440 << 20),))
    source = find_model(folder("llama"))
    fits = [simulate(trace_of(source, batch=size, seq=64), gpu).out_of_memory is None for size in (18, 19)]
    assert fits == [True, False]
    growth = Study(source, Workload(batch=batch, seq=64), place_of(gpu), None, "").growth()
    assert growth.largest_batch == 18


@pytest.mark.thorough
def test_lengths_end_where_positions_do(folder):
    study = Study(find_model(folder("gpt2", n_positions=512)), Workload(batch=2, seq=512), place_of(None), None, "")
    assert [point.seq for point in study.growth().lengths] == [64, 128, 256, 512]


@pytest.mark.thorough
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
    assert dataclasses.astuple(study.growth()) == ((), (), None, "")
