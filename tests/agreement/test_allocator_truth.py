"""The real caching allocator's recorded runs are replayed exactly; bench/allocator_truth.py records them on a GPU."""

from __future__ import annotations

import gzip

import pytest

from brim.recordings import snapshot
from support import allocator_runs

RECORDS = sorted(allocator_runs.FOLDER.glob("*.pickle.gz"))


@pytest.mark.skipif(not RECORDS, reason=f"no runs of a real GPU are recorded under {allocator_runs.FOLDER.name}/")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.partition(".")[0])
def test_a_real_random_run_is_replayed_exactly(path):
    result = allocator_runs.replayed(path)
    assert result.allocations > 500
    assert result.exact, result


@pytest.mark.parametrize("name", ["native", "expandable", "max_split", "roundup_list"])
def test_a_simulated_run_of_the_same_kind_is(name):
    data = allocator_runs.run(allocator_runs.Simulated(allocator_runs.SETTINGS[name]), seed=5, events=400)
    result = allocator_runs.replay(snapshot.parse(gzip.decompress(gzip.compress(data)), name).devices[0])
    assert result.allocations > 100
    assert result.exact, result
