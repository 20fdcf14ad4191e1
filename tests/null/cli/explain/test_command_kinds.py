"""``brim explain`` tells by its content what a file is, compares two of a kind, and writes reports and traces."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from pathlib import Path

import pytest

import brim
from brim.allocator.out_of_memory import OutOfMemory
from brim.cli import main
from brim.core import EventKind, Timeline
from brim.recordings.what_if import CANDIDATES
from brim.units import MIB
from support import synthetic_trace
from support.simulated_recording import Recording

ROOT = Path(__file__).parents[4]
TRUTH = Path(os.environ.get("BRIM_GROUND_TRUTH", ROOT.parent / "shared" / "ground_truth"))
MESSAGE = "RuntimeError: CUDA error: out of memory\n"


def recording(path: Path, rounds: int = 4) -> Path:
    """In each round a block of 61 MiB takes the place of one of 100 MiB; then 200 MiB do not fit into 500."""
    made = Recording("", 500 * MIB)
    for _ in range(rounds):
        made.free(made.malloc(100 * MIB))
        made.malloc(61 * MIB)
    with pytest.raises(OutOfMemory):
        made.malloc(200 * MIB)
    path.write_bytes(made.dump())
    return path


def timeline(path: Path, size: int, *, failed: bool = False) -> Path:
    made = Timeline("step", measured=False, facts={"context_bytes": 5.0})
    made.add(EventKind.ALLOC, "vram", size, storage=0, category="activation", stack="model.layers.0", label="mm")
    made.add(EventKind.COMPUTE, "vram", 0, time_s=0.0, duration_s=1.0, label="mm")
    made.add(EventKind.COMPUTE, "vram", 0, time_s=3.0, duration_s=1.0, label="mm")
    if failed:
        made.add(EventKind.OOM, "vram", 7 * MIB, label="bmm")
    path.write_text(json.dumps(made.to_json()))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["explain", *map(str, arguments), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """One file of each kind, under names that tell nothing."""
    log = tmp_path / "a"
    log.write_text(MESSAGE)
    trace = tmp_path / "b.json"
    synthetic_trace.write(trace, 400)
    return {
        "oom": log,
        "profile": trace.rename(tmp_path / "b"),
        "snapshot": recording(tmp_path / "c"),
        "timeline": timeline(tmp_path / "d", 9 * MIB),
    }


@pytest.mark.parametrize("kind", ["oom", "profile", "snapshot", "timeline"])
@pytest.mark.parametrize("stdin", [False, True], ids=["file", "standard input"])
def test_the_content_tells_the_kind(files, kind, stdin, capsys, monkeypatch):
    source: object = files[kind]
    if stdin:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(files[kind].read_bytes())))
        source = "-"
    assert answer(capsys, source)["kind"] == kind


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="there is no /dev/fd, so no <(command) either")
@pytest.mark.parametrize("kind", ["oom", "profile", "snapshot", "timeline"])
def test_a_pipe_is_read_from_its_beginning(files, kind, capsys):
    """As in ``brim explain <(zcat oom.log.gz)``; 100,000 bytes are more than it takes to tell the kind."""
    data = files[kind].read_bytes()
    if kind in ("oom", "timeline", "profile"):  # JSON and logs may end in space
        data += b"\n" * 100_000
    reading, writing = os.pipe()
    thread = threading.Thread(target=lambda: Path(f"/dev/fd/{writing}").write_bytes(data) and os.close(writing))
    thread.start()
    try:
        body = answer(capsys, f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        thread.join()
    assert body["kind"] == kind
    for key in ("numbers_bytes", "devices", "peak"):
        if key in body:
            assert body[key] == answer(capsys, files[kind])[key]


def test_what_cannot_be_opened_is_one_error(tmp_path, capsys):
    listening = socket.socket(socket.AF_UNIX)
    with listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "socket", tmp_path, tmp_path / "none", tmp_path / ("x" * 5000)):
            assert main(["explain", str(path)]) == 2
            assert "Cannot explain" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["oom", "profile", "snapshot", "timeline"])
def test_every_kind_has_a_report(files, kind, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["explain", str(files[kind]), "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    found = capsys.readouterr()
    assert found.out.strip()
    assert f"report: {page}" in found.err


def test_a_folder_that_does_not_exist_is_told_before_anything_is_read(tmp_path, capsys):
    page = tmp_path / "none" / "out"
    assert main(["explain", str(tmp_path / "not read"), "--html", str(page)]) == 2
    assert f"'{page.parent}' is not a folder" in capsys.readouterr().err


EVIL = "\x1b[2J\x1b]0;title\x07 at a/b/c/d.py:1\r\x9b31m\u202e\ud800\u2028"


def test_names_in_a_file_reach_no_terminal(tmp_path, capsys):
    made = Timeline(EVIL, measured=True)
    made.add(EventKind.ALLOC, "ram", MIB, category=EVIL, label=EVIL, stack=EVIL)
    made.add(EventKind.IDLE, "ram", 0, time_s=1.0, duration_s=1.0, label=EVIL, category=EVIL)
    made.add(EventKind.OOM, "ram", 8 * MIB, label=EVIL)
    path = tmp_path / "run"
    path.write_text(json.dumps(made.to_json()))
    trace = tmp_path / "trace"
    kernel = {"ph": "X", "cat": "kernel", "name": EVIL, "ts": 0, "dur": 5, "args": {"device": 0, "stream": 7}}
    later = {**kernel, "ts": 50}
    trace.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": EVIL}], "traceEvents": [kernel, later]}))
    log = tmp_path / "log"
    log.write_text(
        f"[rank7]: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; {EVIL[:-2]} 8 GiB total capacity"
    )
    for arguments in ([path], [trace], [log], ["--diff", path, path], ["--diff", trace, trace]):
        assert main(["explain", *map(str, arguments)]) == 0
        shown = capsys.readouterr().out
        assert shown.strip()
        assert all(letter.isprintable() for letter in shown.replace("\n", "")), shown


def test_a_snapshot_is_explained_by_its_cause_first(files, capsys):
    assert main(["explain", str(files["snapshot"])]) == 0
    text = capsys.readouterr().out
    assert text.startswith("device 0: Out of memory")
    for part in ("when it failed", "largest free block", "pinned by", "serves the request that failed:", "replayed"):
        assert part in text


def test_a_snapshot_in_json_holds_the_fragmentation_and_the_proof(files, capsys):
    (device,) = answer(capsys, files["snapshot"])["devices"]
    failed = next(one for one in device["moments"] if one["what"] == "oom")
    assert failed["requested_bytes"] == 200 * MIB
    assert failed["allocated_bytes"] == 244 * MIB
    assert failed["free_bytes"] == failed["pinned_bytes"] == 156 * MIB
    assert failed["largest_free_bytes"] == 39 * MIB
    assert failed["segments_with_pins"] == len(failed["segments"]) == 4
    assert {pin["bytes"] for one in failed["segments"] for pin in one["pins"]} == {61 * MIB}
    assert device["cause"] == "fragmentation"
    best = device["what_if"][0]
    assert best["serves_failure"]
    assert f"With {best['settings']} it is served" in device["headline"]
    assert device["headline"].endswith("later events are not recorded.")
    assert "later events are not recorded" in device["advice"][0]["text"]
    assert device["advice"][0]["helps"]
    assert device["advice"][0]["paste"].endswith(best["settings"])
    run = next(run for run in device["what_if"] if run["settings"] == "expandable_segments:True")
    assert run["serves_failure"]
    assert run["peak_reserved_bytes"] <= 500 * MIB


@pytest.mark.parametrize("in_time", [True, False])
def test_a_search_that_was_cut_short_names_what_it_left_out(files, tmp_path, capsys, monkeypatch, in_time):
    """A long run's own sizes are tried too, as long as time allows."""
    monkeypatch.setattr("brim.recordings.what_if.MOST_SEARCHED_EVENTS", 10)
    monkeypatch.setattr("brim.recordings.what_if.SEARCH_S", 60.0 if in_time else 0.0)
    (device,) = answer(capsys, files["snapshot"])["devices"]
    replayed = {one["settings"] for one in device["what_if"]}
    assert (len(replayed) > len(CANDIDATES)) is in_time
    assert bool(device["untried"]) is not in_time
    assert replayed.isdisjoint(device["untried"])
    assert main(["explain", str(files["snapshot"]), "--html", str(tmp_path / "page.html")]) == 0
    shown, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for text in device["untried"]:
        assert text in shown
        assert text in page
    assert ("not replayed, to save time" in shown) is not in_time


def test_a_failed_timeline_says_so(tmp_path, capsys):
    path = timeline(tmp_path / "run", 9 * MIB, failed=True)
    body = answer(capsys, path)
    assert body["out_of_memory"] == {"bytes": 7 * MIB, "label": "bmm"}
    assert "7 MiB were requested by bmm" in body["headline"]
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "activation" in text
    assert "idle 2 s" in text


def test_where_only_waiting_was_recorded_the_rest_is_not_called_computing(tmp_path, capsys):
    made = Timeline("generate", measured=True)
    made.add(EventKind.IDLE, "ram", 0, time_s=0.0, duration_s=1.0, label="layers.1", category="copy")
    made.add(EventKind.ALLOC, "ram", MIB, time_s=4.0)
    path = tmp_path / "run"
    path.write_text(json.dumps(made.to_json()))
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "waiting 1 s of 4 s (25%); the rest was not recorded" in text
    assert "computing" not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"context_bytes": 5.0', '"context_bytes": NaN'),
        ('"context_bytes": 5.0', '"device": 1e999'),
        ('"context_bytes": 5.0', f'"context_bytes": {"9" * 400}'),
        ('"time_s": [0.0, 0.0, 3.0]', '"time_s": [0.0, 0.0, NaN]'),
        ('"duration_s": [0.0, 1.0, 1.0]', '"duration_s": [0.0, 1.0, 1e308]'),
    ],
)
def test_numbers_that_are_none_are_told_and_never_printed(tmp_path, capsys, old, new):
    path = timeline(tmp_path / "run", 9 * MIB)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    for arguments in (["explain", str(path), "--json"], ["explain", "--diff", str(path), str(path)]):
        assert main(arguments) == 2
        found = capsys.readouterr()
        assert (found.out, "Cannot read" in found.err or "must be a number" in found.err) == ("", True)


def test_two_runs_are_compared(tmp_path, capsys):
    before, after = timeline(tmp_path / "a", 4 * MIB), timeline(tmp_path / "b", 9 * MIB)
    (device,) = answer(capsys, "--diff", before, after)["devices"]
    assert device["by_category"][0]["before_bytes"] == 4 * MIB
    assert device["by_category"][0]["after_bytes"] == 9 * MIB
    page = tmp_path / "page.html"
    assert main(["explain", "--diff", str(before), str(after), "--html", str(page)]) == 0
    assert "activation: 4 MiB -> 9 MiB (+5 MiB)" in capsys.readouterr().out
    assert page.stat().st_size > 10_000


def test_a_headline_names_what_changed_the_same_way_as_the_whole(tmp_path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    sizes = {before: {"gradient": 9, "activation": 1, "parameter": 2}, after: {"gradient": 4, "activation": 5}}
    sizes[after]["parameter"] = 5
    for path, held in sizes.items():
        made = Timeline("step", measured=True)
        for number, (category, size) in enumerate(held.items()):
            made.add(EventKind.ALLOC, "vram", size * MIB, storage=number, category=category)
        path.write_text(json.dumps(made.to_json()))
    (device,) = answer(capsys, "--diff", before, after)["devices"]
    assert "most of it activation: 1 MiB -> 5 MiB (+4 MiB)" in device["headline"]
    (device,) = answer(capsys, "--diff", after, before)["devices"]
    assert "most of it activation: 5 MiB -> 1 MiB (-4 MiB)" in device["headline"]
    (device,) = answer(capsys, "--diff", after, after)["devices"]
    assert "most of it" not in device["headline"]


def test_two_snapshots_and_two_profiles_are_compared(files, tmp_path, capsys):
    other = recording(tmp_path / "other", 5)
    (device,) = answer(capsys, "--diff", files["snapshot"], other)["devices"]
    names = {one["name"] for one in device["figures"]}
    assert {"pinned_at_the_peak_bytes", "reserved_peak_bytes", "unused_at_the_peaks_share"} <= names
    assert main(["explain", "--diff", str(files["snapshot"]), str(other)]) == 0
    assert "by segment size" in capsys.readouterr().out
    trace = tmp_path / "trace.json"
    synthetic_trace.write(trace, 900)
    (device,) = answer(capsys, "--diff", files["profile"], trace)["devices"]
    assert any(one["name"] == "busy_s" and one["before"] != one["after"] for one in device["figures"])


def test_names_of_kernels_are_told_as_they_are(tmp_path, capsys):
    """And are no units: this one has "_share" in it."""
    traces = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, count in zip(traces, (600, 900), strict=True):
        synthetic_trace.write(path, count)
        path.write_text(path.read_text().replace("kernel_", "kernel_share_"))
    assert main(["explain", "--diff", *map(str, traces)]) == 0
    counts = [line for line in capsys.readouterr().out.splitlines() if "kernel_share_" in line and "count" in line]
    assert counts
    assert not any("%" in line for line in counts)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "0 files"),
        (["snapshot", "timeline"], "--diff"),
        (["--diff", "snapshot"], "Give two"),
        (["--diff", "snapshot", "profile"], "of the kind"),
        (["--diff", "oom", "oom"], "Both are error messages, which hold no runs"),
        (["--diff", "snapshot", "snapshot", "--what-if", "best"], "--what-if"),
        (["timeline", "--what-if", "best"], "no run that can be replayed"),
        (["profile", "--what-if", "best"], "no run that can be replayed"),
        (["--diff", "-", "-"], "itself"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(files, arguments, told, tmp_path, capsys):
    given = [str(files.get(one, one)).format(folder=tmp_path) for one in arguments]
    assert main(["explain", *given]) == 2
    assert told in capsys.readouterr().err


def test_other_artefacts_of_brim_are_named(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text('{\n "kind": "Plan",\n "version": 1}')
    assert main(["explain", str(path)]) == 2
    assert "It is a Plan" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.skipif(not TRUTH.exists(), reason=f"{TRUTH} is not at hand")
@pytest.mark.parametrize("path", sorted((TRUTH / "snapshots").glob("*.pickle")), ids=lambda path: path.stem)
def test_recorded_snapshots_are_explained(path, capsys):
    devices = answer(capsys, path)["devices"]
    assert devices
    for device in devices:
        assert device["replay"]["exact"]
        assert device["headline"]
        held = sum(one["bytes"] for one in device["peak"]["by_category"])
        assert held == device["peak"]["allocated_bytes"] == device["replay"]["peak_allocated_replayed_bytes"]


def test_a_file_of_another_program_is_no_recording(tmp_path, capsys):
    path = tmp_path / "report.sqlite"
    path.write_bytes(b"SQLite format 3\0" + bytes(4096))
    assert main(["explain", str(path)]) == 2
    assert f"Cannot read an out-of-memory message in {path}" in capsys.readouterr().err


def test_a_damaged_standard_input_is_named_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x80")))
    assert main(["explain", "-"]) == 2
    assert "Cannot read the standard input" in capsys.readouterr().err


def test_what_watch_writes_is_explained(tmp_path, capsys):
    path = tmp_path / "run.brim"
    with brim.watch(path, on_exit=True):
        assert len(bytes(8 * MIB)) == 8 * MIB
    body = answer(capsys, path)
    assert body["kind"] == "timeline"
    assert body["measured"]
    peak = body["peak"]
    assert peak["tier"] == "ram"
    held = sum(one["bytes"] for one in peak["by_label"])
    assert held == peak["allocated_bytes"] == body["facts"]["peak_rss_bytes"]
