"""The real caching allocator's recorded runs are replayed exactly; bench/allocator_truth.py records them on a GPU."""

from __future__ import annotations

import gzip

import pytest

import allocator_truth
from brim.recordings import snapshot
from brim.recordings.replay import replay

RECORDS = sorted(allocator_truth.FOLDER.glob("*.pickle.gz"))


@pytest.mark.skipif(not RECORDS, reason=f"no runs of a real GPU are recorded under {allocator_truth.FOLDER.name}/")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.partition(".")[0])
def test_a_real_random_run_is_replayed_exactly(path):
    result = allocator_truth.replayed(path)
    assert result.allocations > 500
    assert result.exact, result


@pytest.mark.parametrize("name", ["native", "expandable", "max_split", "roundup_list"])
def test_a_simulated_run_of_the_same_kind_is(name):
    data = allocator_truth.run(allocator_truth.Simulated(allocator_truth.SETTINGS[name]), seed=5, events=400)
    result = replay(snapshot.parse(gzip.decompress(gzip.compress(data)), name).devices[0])
    assert result.allocations > 100
    assert result.exact, result
