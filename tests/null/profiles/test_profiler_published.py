"""Traces that others published give the figures that counting their events by hand gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from brim.core import EventKind
from brim.profiles import profiler as profile
from support.accuracy import ground_truth

TRACES = ground_truth.folder() / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not here")


def brute_force(path: Path) -> dict[str, Any]:
    """The plain figures counted in the plainest way: microseconds marked one interval after the other."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    groups: dict[str, list[tuple[float, float]]] = {"kernel": [], "copy": []}
    size = 0
    for event in events:
        kind = event["cat"].lower().removeprefix("gpu_")
        span = (event["ts"], event["ts"] + event["dur"])
        if kind == "kernel" and "nccl" not in event["name"]:
            groups["kernel"].append(span)
        elif kind in ("memcpy", "memset"):
            groups["copy"].append(span)
            size += event["args"]["bytes"]
    lengths = {}
    for name, spans in groups.items():
        at, total = float("-inf"), 0.0
        for begin, end in sorted(spans):
            total += max(0.0, end - max(begin, at))
            at = max(at, end)
        lengths[name] = total * 1e-6
    return lengths | {"bytes": size, "kernels": len(groups["kernel"])}


NAMES = ("kineto_resnet50_v100.json.gz", "megatron_tp2_rank0.json", "modded_nanogpt_8xh100_rank0.json.gz")


@pytest.mark.parametrize("name", NAMES)
def test_published_traces_give_the_figures_that_counting_gives(name):
    path = TRACES / name
    (found,) = profile.read(path).devices
    counted = brute_force(path)
    assert found.busy_s == pytest.approx(counted["kernel"], abs=1e-7)
    assert found.copy_s == pytest.approx(counted["copy"], abs=1e-7)
    assert sum(c.bytes for c in found.copies) == counted["bytes"]
    computing = [e for e in found.timeline if e.kind is EventKind.COMPUTE and not e.category]
    assert len(computing) == counted["kernels"]
    assert found.busy_s + found.idle_s == pytest.approx(found.wall_s, abs=1e-6)
    assert sum(found.idle_by_cause.values()) == pytest.approx(found.idle_s)


def test_the_resnet_trace_has_memory_events_and_waits_for_data():
    found = profile.read(TRACES / NAMES[0])
    (one,) = found.devices
    assert one.name == "Tesla V100-DGXS-32GB"
    assert one.timeline.peak_bytes.allocated > 0
    assert len(found.host) > 0
    assert max(one.idle_by_cause, key=one.idle_by_cause.__getitem__) == "data loader"


def test_the_eight_gpu_rank_waits_for_its_peers():
    (one,) = profile.read(TRACES / NAMES[2]).devices
    assert max(one.idle_by_cause, key=one.idle_by_cause.__getitem__) == "collective"
