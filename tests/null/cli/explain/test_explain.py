"""``brim explain`` on a memory snapshot: what was replayed, and what other settings would have done."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest

from brim.cli import main
from brim.units import MIB


@pytest.fixture
def snapshot_path(tmp_path: Path) -> Path:
    """One request of 3 MiB in a segment of 20 MiB, freed again, and one that failed."""
    at = 1 << 40
    row = {"stream": 0, "time_us": 1}
    trace = [
        {"action": "segment_alloc", "addr": at, "size": 20 * MIB} | row,
        {"action": "alloc", "addr": at, "size": 3 * MIB} | row,
        {"action": "oom", "device_free": 5 * MIB, "size": 30 * MIB} | row,
        {"action": "free_requested", "addr": at, "size": 3 * MIB} | row,
        {"action": "free_completed", "addr": at, "size": 3 * MIB} | row,
    ]
    segment = {
        "device": 0,
        "address": at,
        "total_size": 20 * MIB,
        "stream": 0,
        "segment_type": "large",
        "blocks": [{"address": at, "size": 20 * MIB, "requested_size": 0, "state": "inactive"}],
    }
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [trace]}))
    return path


def test_json_gives_the_replay_and_the_what_if_runs_per_device(snapshot_path, capsys):
    arguments = ["explain", str(snapshot_path), "--what-if", "expandable_segments:True", "--json"]
    assert main(arguments) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["device"] == 0
    expected = {
        "allocations": 1,
        "addresses_matched": 1,
        "segments": 1,
        "segments_matched": 1,
        "peak_reserved_measured_bytes": 20 * MIB,
        "peak_reserved_replayed_bytes": 20 * MIB,
        "ooms": 1,
        "exact": True,
    }
    assert expected.items() <= device["replay"].items()
    asked, *searched = device["what_if"]
    assert asked["settings"] == "expandable_segments:True"
    assert asked["serves_failure"] is False
    assert len(searched) > 5  # a run that failed is replayed under others too


def test_people_get_lines(snapshot_path, capsys):
    assert main(["explain", str(snapshot_path), "--what-if", "best"]) == 0
    text = capsys.readouterr().out
    for part in ("1 of 1 addresses", "20 MiB measured", "out of memory", "expandable_segments:True", "failed: no"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--what-if", "expandable_segment:True"], "expandable_segments"),
        (["--what-if", "per_process_memory_fraction:0.5"], "size of the device is unknown"),
    ],
)
def test_wrong_settings_are_named(snapshot_path, arguments, told, capsys):
    assert main(["explain", str(snapshot_path), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_file_is_one_error(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "gone.pickle")]) == 2
    assert "gone.pickle" in capsys.readouterr().err


MESSAGE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 130.00 MiB (GPU 1; 7.80 GiB total capacity; 5.91 GiB "
    "already allocated; 33.56 MiB free; 6.09 GiB reserved in total by PyTorch)"
)


def test_a_log_is_explained_from_a_file_and_from_the_standard_input(tmp_path, capsys, monkeypatch):
    path = tmp_path / "oom.log"
    path.write_text(f"step 1\n{MESSAGE}\n")
    assert main(["explain", str(path), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["family"], body["device"], body["cause"]) == ("torch-cuda-reserved", "cuda:1", "exhausted")
    assert body["numbers_bytes"]["tried"] == 130 * MIB
    assert {"text", "paste", "helps"} <= body["advice"][0].keys()

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    assert main(["explain", "-"]) == 0
    assert "torch-cuda-reserved on cuda:1: exhausted" in capsys.readouterr().out


def test_a_log_without_a_message_and_what_if_on_a_log_are_errors(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text("all is well")
    assert main(["explain", str(path)]) == 2
    assert "known forms" in capsys.readouterr().err
    assert main(["explain", str(path), "--what-if", "expandable_segments:True"]) == 2
    assert "has no run" in capsys.readouterr().err
